"""Host memory is resident, aligned, given back on close, never copied by a fork, and lives as long as any view."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from outcore.core.errors import MemoryBudgetError
from outcore.memory import host
from outcore.memory.arena import Arena
from outcore.memory.host import HUGE_PAGE_BYTES, HostMemory

NBYTES = 64 * 2**20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("nbytes", [0, 1, 199, 4096, 4097, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 4096])
def test_sizes_and_alignment(nbytes):
    with HostMemory.open(nbytes) as memory:
        assert memory.tensor.shape == (nbytes,)
        assert memory.tensor.dtype == torch.uint8
        assert memory.nbytes == nbytes
        assert memory.tensor.data_ptr() % HUGE_PAGE_BYTES == 0 or nbytes == 0
        assert not memory.tensor.any()
        memory.tensor.fill_(3)


def test_it_is_resident_from_the_start_and_given_back_on_close_even_if_viewed():
    gc.collect()
    before = resident_bytes()
    memory = HostMemory.open(NBYTES)
    assert resident_bytes() - before > 0.9 * NBYTES
    view = memory.tensor[4096:8192].view(torch.float32)
    view.fill_(1.0)
    memory.close()
    memory.close()
    assert resident_bytes() - before < 0.2 * NBYTES
    assert not view.any()  # the addresses stay valid as long as a view exists
    view.fill_(2.0)
    assert view.sum() == 2.0 * 1024
    assert memory.nbytes == 0
    with pytest.raises(AssertionError, match="closed"):
        _ = memory.tensor


def test_a_tensor_made_by_an_arena_keeps_the_mapping_alive():
    memory = HostMemory.open(NBYTES)
    tensor = Arena("host", memory.tensor).take(4096).tensor(torch.float32, (1024,))
    del memory
    gc.collect()
    tensor.fill_(5.0)
    assert tensor.sum() == 5.0 * 1024


def test_addresses_go_with_the_last_view():
    def mapped():
        return sum("rw" in line for line in Path("/proc/self/maps").read_text().splitlines())

    HostMemory.open(NBYTES).close()
    gc.collect()
    before = mapped()
    for _ in range(20):
        HostMemory.open(NBYTES).close()
    gc.collect()
    assert mapped() <= before + 2


def test_more_than_is_free_is_refused(monkeypatch):
    monkeypatch.setattr(host, "host_free_bytes", lambda: 2**20)
    HostMemory.open(2**20).close()
    with pytest.raises(MemoryBudgetError, match=r"expected 1.00 MiB to be free, but only 1.00 MiB are; lower the host"):
        HostMemory.open(2**20 + 1)


def test_what_is_touched_later_counts_as_taken_at_once(monkeypatch):
    monkeypatch.setattr(host, "host_free_bytes", lambda: 3 * 2**20)
    before = resident_bytes()
    with HostMemory.open(2**21, is_touched=False) as memory:
        with pytest.raises(MemoryBudgetError, match=r"expected 2.00 MiB to be free, but only 1.00 MiB are"):
            HostMemory.open(2**21)
        memory.tensor[5] = 3
        memory.touch()
        assert resident_bytes() - before >= 2**21
        assert memory.tensor[5] == 3
        HostMemory.open(2**21).close()  # the system counts these pages now


def test_a_system_that_refuses(monkeypatch):
    monkeypatch.setattr(host, "host_free_bytes", lambda: 2**62)
    with pytest.raises(MemoryBudgetError, match="the system refuses: Cannot allocate memory"):
        HostMemory.open(2**60)


def run_script(text):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=60)


def test_a_fork_neither_copies_nor_sees_it_and_unmapping_there_harms_nobody():
    # Without MADV_DONTFORK the child's smaps shows the pages; without the filled hole its next allocation lands there,
    # and dropping the arena in the child unmaps that allocation.
    result = run_script(f"""
        import gc, mmap, os, sys
        from outcore.memory.host import HostMemory
        memory = HostMemory.open({NBYTES})
        start = memory.tensor.data_ptr()
        pid = os.fork()
        if pid == 0:
            resident = 0
            inside = False
            for line in open("/proc/self/smaps"):
                head = line.split()[0]
                if "-" in head and not head.endswith(":"):
                    low, high = (int(x, 16) for x in head.split("-"))
                    inside = low < start + {NBYTES} and high > start
                elif inside and head == "Rss:":
                    resident += int(line.split()[1])
            others = [mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(40)]
            memory.close()
            del memory
            gc.collect()
            for other in others:
                other.write(b"x" * 4096)
            os._exit(0 if resident == 0 else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        memory.tensor.fill_(1)
        sys.exit(status or int(int(memory.tensor[::4096].sum()) != {NBYTES} // 4096))
    """)
    assert result.returncode == 0, result.stderr


def test_touching_it_in_a_forked_child_is_a_crash_never_other_memory():
    result = run_script(f"""
        import mmap, os, signal, sys
        from outcore.memory.host import HostMemory
        memory = HostMemory.open({NBYTES})
        pid = os.fork()
        if pid == 0:
            others = [mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(40)]
            memory.tensor[0].item()
            os._exit(0)
        sys.exit(int(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != -signal.SIGSEGV))
    """)
    assert result.returncode == 0, result.stderr
