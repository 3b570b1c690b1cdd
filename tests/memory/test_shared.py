"""Memory shared by processes: visible to all, in no folder, and gone with the last of them, however it ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import nursery
import pytest

from outcore.core.errors import MemoryBudgetError, OutcoreError
from outcore.memory import shared
from outcore.memory.shared import SharedMemory

NBYTES = 3 * 2**20 + 5
OTHER = """
import sys, time
from outcore.memory.shared import SharedMemory
memory = SharedMemory.join(sys.argv[1], int(sys.argv[2]))
memory.settle()
print(int(memory.tensor[7]), flush=True)
sys.stdin.readline()
memory.tensor[8] = 3
print("written", flush=True)
sys.stdin.readline()
"""


def mapped() -> bool:
    gc.collect()
    return "memfd:outcore" in Path("/proc/self/maps").read_text()


def begun(memory):
    pipes = {"stdin": -1, "stdout": -1, "text": True}
    other = nursery.Whole([sys.executable, "-c", OTHER, memory.address, str(NBYTES)], **pipes)
    assert other.stdout.readline() == "2\n"
    return other


def test_what_one_writes_the_other_sees_even_when_it_is_killed():
    before = set(os.listdir("/dev/shm"))
    with SharedMemory.make(NBYTES) as memory:
        assert memory.tensor.numel() == NBYTES
        assert not memory.tensor.any()
        memory.tensor[7] = 2
        with begun(memory) as other:
            memory.settle()
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "written\n"
            assert memory.tensor[8] == 3
            os.kill(other.pid, signal.SIGKILL)
        assert other.returncode == -signal.SIGKILL
        assert memory.tensor[8] == 3
        with pytest.raises(OutcoreError, match="expected to share what process"):
            SharedMemory.join(memory.address, NBYTES)
    assert not mapped()
    assert set(os.listdir("/dev/shm")) <= before


def test_a_view_keeps_it_and_nothing_else():
    memory = SharedMemory.make(NBYTES)
    view = memory.tensor[4096:8192]
    memory.close()
    memory.close()
    view.fill_(1)
    assert view.sum() == 4096
    assert mapped()
    del view
    assert not mapped()


def test_another_file_is_not_taken_for_it(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(OutcoreError, match="another file is there"):
        SharedMemory.join(f"{os.getpid()} {file.fileno()} outcore-1", NBYTES)


def test_too_much_is_refused(monkeypatch):
    with pytest.raises(MemoryBudgetError, match=r"expected 1024.00 TiB to be free, for all ranks"):
        SharedMemory.make(2**50)
    monkeypatch.setattr(shared, "host_free_bytes", lambda: 2**60)
    with pytest.raises(MemoryBudgetError, match="but the system refuses"):
        SharedMemory.make(2**50)
    assert not mapped()
