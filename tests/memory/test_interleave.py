"""Arenas are spread over all NUMA nodes: which nodes, which system call, and no call where it is not needed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from outcore.memory import host as module
from outcore.memory.host import HUGE_PAGE_BYTES, HostMemory, interleave
from outcore.memory.machine import memory_nodes

NBYTES = 3 * HUGE_PAGE_BYTES + 4096
X86 = SimpleNamespace(get_mempolicy=239, mbind=237, name="x86_64")
ARM = SimpleNamespace(get_mempolicy=236, mbind=235, name="aarch64")


class Kernel:
    """Stands in for ``syscall``."""

    def __init__(self, policy=0, mbind=0, machine=X86):
        self.policy, self.mbind, self.machine = policy, mbind, machine
        self.bound = []

    def __call__(self, number, *args):
        if number.value == self.machine.get_mempolicy:
            mode, mask, num_bits, address, flags = args
            assert (mask, num_bits.value, address, flags.value) == (None, 0, None, 0)
            if self.policy is None:
                return -1
            mode._obj.value = self.policy
            return 0
        assert number.value == self.machine.mbind
        address, nbytes, mode, mask, num_bits, flags = args
        assert num_bits.value == 64 * len(mask) + 1, "the kernel takes one bit less than it is told"
        self.bound.append((address.value, nbytes.value, mode.value, list(mask), flags.value))
        return self.mbind


@pytest.fixture
def boot(monkeypatch):
    def boot(nodes, **options):
        kernel = Kernel(**options)
        monkeypatch.setattr(module, "memory_nodes", lambda: nodes)
        monkeypatch.setattr(module, "_syscall", lambda: kernel)
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=kernel.machine.name))
        return kernel

    return boot


@pytest.mark.parametrize("machine", [X86, ARM], ids=lambda machine: machine.name)
@pytest.mark.parametrize(
    ("nodes", "mask"),
    [((0, 1), [0b11]), ((1, 3), [0b1010]), ((0, 63), [1 | 1 << 63]), ((2, 64, 130), [0b100, 1, 0b100])],
)
def test_the_call(boot, machine, nodes, mask):
    kernel = boot(nodes, machine=machine)
    interleave(0x7F0000000000, NBYTES)
    assert kernel.bound == [(0x7F0000000000, NBYTES, 3, mask, 0)]


@pytest.mark.parametrize("nodes", [(), (0,), (5,)])
def test_nothing_on_one_node(boot, nodes, monkeypatch):
    boot(nodes)
    monkeypatch.setattr(module, "_syscall", lambda: pytest.fail("asked the kernel"))
    interleave(0x7F0000000000, NBYTES)


@pytest.mark.parametrize("policy", [1, 2, 3, 4, None], ids=["preferred", "bind", "interleave", "local", "refused"])
def test_a_policy_of_the_process_is_kept(boot, policy):
    kernel = boot((0, 1), policy=policy)
    interleave(0x7F0000000000, NBYTES)
    assert kernel.bound == []


def test_another_machine_is_left_alone(boot, monkeypatch):
    kernel = boot((0, 1))
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    interleave(0x7F0000000000, NBYTES)
    assert kernel.bound == []


@pytest.mark.parametrize("answer", [0, -1])
@pytest.mark.parametrize("inherit", [False, True])
def test_host_memory_is_spread_before_it_is_touched_and_a_refusal_changes_nothing(boot, answer, inherit, monkeypatch):
    kernel = boot((0, 1), mbind=answer)
    touched = []
    monkeypatch.setattr(
        Kernel, "__call__", lambda self, *args, real=Kernel.__call__: (touched.append(resident()), real(self, *args))[1]
    )
    before = resident()
    with HostMemory.open(64 * HUGE_PAGE_BYTES, inherit=inherit) as memory:
        ((address, nbytes, _, _, _),) = kernel.bound
        assert address <= memory.tensor.data_ptr()
        assert memory.tensor.data_ptr() + memory.nbytes <= address + nbytes
        memory.tensor.fill_(1)
    assert max(touched) - before < 16 * HUGE_PAGE_BYTES


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_this_kernel(monkeypatch):
    # The kernel uses only those of the two nodes that exist.
    monkeypatch.setattr(module, "memory_nodes", lambda: (0, 1))
    answers = []
    real = module._syscall()
    monkeypatch.setattr(module, "_syscall", lambda: lambda *args: answers.append(real(*args)))
    with HostMemory.open(NBYTES) as memory:
        memory.tensor.fill_(7)
        assert int(memory.tensor.sum()) == 7 * NBYTES
        if answers != [0, 0]:
            pytest.skip(f"the system refuses: {answers}")
        mode = ctypes.c_int(-1)
        where = ctypes.c_void_p(memory.tensor.data_ptr())
        numbers = module._GET_MEMPOLICY[os.uname().machine]
        of_an_address = ctypes.c_ulong(2)
        assert real(ctypes.c_long(numbers), ctypes.byref(mode), None, ctypes.c_ulong(0), where, of_an_address) == 0
        assert mode.value == 3


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def make(usable, files):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return make


def node(number, cpulist):
    return {f"sys/devices/system/node/node{number}/cpulist": cpulist if isinstance(cpulist, bytes) else f"{cpulist}\n"}


def status(allowed):
    return {"proc/self/status": f"Name:\tx\nMems_allowed:\t00000000,00000003\nMems_allowed_list:\t{allowed}\n"}


TWO = node(0, "0-3") | node(1, "4-7")


@pytest.mark.parametrize(
    ("usable", "files", "nodes"),
    [
        (range(8), TWO | status("0-1"), (0, 1)),
        (range(8), TWO | status("0-63"), (0, 1)),
        (range(8), TWO | status("1"), (1,)),  # other processes have the memory of node 0
        (range(4), TWO | status("0-1"), (0,)),  # bound to one socket
        (range(8), TWO | node(2, "") | node(10, "") | status("0-2,10"), (0, 1)),  # memory of an accelerator
        (range(8), node(10, "0-3") | node(9, "4-7") | status("9,10"), (9, 10)),
        (range(8), TWO, ()),
        (range(8), status("0-1"), ()),
        (range(8), TWO | status("all"), ()),
        (range(8), TWO | status("0-99999999999"), ()),
        (range(8), TWO | status("-1"), ()),
        (range(8), node(0, "0-3") | node(1, "4-7;x") | status("0-1"), (0,)),
        (range(8), node(0, b"\xff\xfe") | node(1, "0-99999") | status("0-1"), ()),
    ],
)
def test_the_nodes(machine, usable, files, nodes):
    assert memory_nodes(machine(usable, files)) == nodes


def test_this_machine_has_at_least_a_node_if_it_says_so():
    allowed = "Mems_allowed_list" in Path("/proc/self/status").read_text()
    assert bool(memory_nodes()) == (allowed and Path("/sys/devices/system/node/node0").exists())
