"""Host memory of this process: mapped for arenas, and freed memory that the C library holds back from the system.

An arena's memory is anonymous, in huge pages where possible, resident, and by default not inherited by a fork.

[Note: mapping lifetime] The mapping lives as long as any tensor views it: a tensor holds the NumPy array, which holds
the mapping (``torch.frombuffer`` does not). ``close`` therefore cannot unmap. It gives the pages back to the system at
once; the empty address range goes with the last view. A late reader sees zeros, never a crash.

[Note: fork] Without ``MADV_DONTFORK`` a fork would share every page copy-on-write, and rewriting the arena would copy
it. With it the child has a hole at these addresses, which its next large allocation would fill: a tensor over the arena
would then read and write unrelated memory. So the child puts an inaccessible mapping into the hole. Touching the arena
in the child is then a segmentation fault, and unmapping it is harmless.

[Note: interleaving] A page lies on the NUMA node of the thread that touches it first. One thread touches an arena. So
on a machine with two sockets, one memory controller would serve all transfers and updates, and the other none. If pages
are dealt out in turn, any range uses all controllers alike, whichever threads and devices access it. The price is that
every second page is on the other socket for a worker. Binding each range near the worker that updates it would avoid
this, but a range has no such worker: small updates use fewer workers, slots hold a different unit every time, and
copies and disk transfers pass through all of the range.

The system call is made by number, since libnuma is rarely installed. It may fail, since many containers forbid it;
memory then lies where it would lie anyway.

[Note: held back] glibc keeps freed memory that lies below memory in use. Activations and gradients come and go in a
different order every step, so the memory that it keeps grows to a multiple of what a step uses: 180 MiB beside a plan
of 366 MiB. ``malloc_trim`` gives whole pages back wherever they lie. The call takes time, and the next step takes even
more to touch the pages again: ten times as much if activations are large. So it is called when memory has grown, and
seldom enough that both together cost about a hundredth of the time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, final

import numpy as np
import torch

from outcore.core.closing import Closing
from outcore.core.errors import MemoryBudgetError
from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes
from outcore.memory.machine import host_free_bytes, memory_nodes

HUGE_PAGE_BYTES = 2 * 2**20

_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000

# Mappings that children do not inherit, by address. See [Note: fork].
_live_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()

_untouched: weakref.WeakSet[HostMemory] = weakref.WeakSet()


@final
class HostMemory(Closing):
    """A piece of host memory that stays resident from ``touch`` until ``close``."""

    def __init__(self, mapping: mmap.mmap, tensor: torch.Tensor) -> None:
        """Only ``open`` calls this."""
        self._mapping: mmap.mmap | None = mapping
        self._tensor: torch.Tensor | None = tensor
        self._pid = os.getpid()

    @classmethod
    def open(cls, nbytes: int, *, inherit: bool = False, is_touched: bool = True) -> Self:
        """Take ``nbytes`` from the system, zeroed.

        Args:
            nbytes: Size in bytes.
            inherit: Whether a forked child sees the memory, copied on write. If not, forks cost nothing.
            is_touched: Whether to make all of it resident at once. If not, ``touch`` does; until then it counts as
                taken.

        Raises:
            MemoryBudgetError: The machine or this container does not have that much free, or the system refuses.

        Memory: ``nbytes`` of host memory, rounded up to 4 KiB.
        """
        free_bytes = host_free_bytes() - sum(memory.nbytes for memory in _untouched)
        what = f"host memory: expected {format_bytes(nbytes)} to be free"
        todo = "lower the host budget, or stop what else uses memory on this machine or in this container"
        if nbytes > free_bytes:
            raise MemoryBudgetError(f"{what}, but only {format_bytes(free_bytes)} are; {todo}")
        size = max(align_up(nbytes, PAGE_BYTES), PAGE_BYTES)
        try:
            # One huge page more, so that the memory can start on a huge page. The surplus is never touched.
            mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryBudgetError(f"{what}, but the system refuses: {error.strerror}; {todo} (ulimit -v?)") from error
        address = address_of(mapping) if inherit else kept_from_children(mapping)
        interleave(address, len(mapping))
        start = align_up(address, HUGE_PAGE_BYTES) - address
        _use_huge_pages(mapping, start, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        tensor = torch.from_numpy(np.frombuffer(mapping, np.uint8, nbytes, start))
        memory = cls(mapping, tensor)
        _untouched.add(memory)
        if is_touched:
            memory.touch()
        return memory

    def touch(self) -> None:
        """Make every page resident; bytes already written stay. No other thread may write meanwhile."""
        if self in _untouched:
            _untouched.discard(self)
            self.tensor[::PAGE_BYTES].bitwise_or_(0)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as 1D uint8, aligned to 2 MiB."""
        if self._tensor is None:
            raise AssertionError("this host memory is closed")
        return self._tensor

    @property
    def nbytes(self) -> int:
        """Size as requested, in bytes; 0 once closed."""
        return 0 if self._tensor is None else self._tensor.numel()

    def close(self) -> None:
        """Give the pages back to the system, including those that a tensor still views. Idempotent.

        Memory registered with a driver must be unregistered first. In a forked child this gives nothing back.
        """
        _untouched.discard(self)
        mapping, self._mapping, self._tensor = self._mapping, None, None
        if mapping is not None and os.getpid() == self._pid:
            mapping.madvise(mmap.MADV_DONTNEED)  # see [Note: mapping lifetime]


def address_of(mapping: mmap.mmap) -> int:
    """Address of the first byte of a mapping."""
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def kept_from_children(mapping: mmap.mmap) -> int:
    """Keep a mapping from forked children; return its address. See [Note: fork]."""
    address = address_of(mapping)
    _live_mappings[address] = mapping
    mapping.madvise(mmap.MADV_DONTFORK)
    return address


def _use_huge_pages(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    if not nbytes:
        return
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    except OSError:
        return  # this kernel was built without huge pages: small pages also work, only slower


def _fill_holes_in_child() -> None:
    """See [Note: fork]."""
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for address, mapping in _live_mappings.items():
        libc.mmap(address, len(mapping), _PROT_NONE, flags, -1, 0)


os.register_at_fork(after_in_child=_fill_holes_in_child)


_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT = 0
_MPOL_INTERLEAVE = 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Syscall = Callable[..., int]


def interleave(address: int, nbytes: int) -> None:
    """Spread pages that are not touched yet over the nodes that this process runs on.

    Does nothing if there is one node, if the system refuses, or if a policy was set for the process (``numactl``).

    Args:
        address: Address of the first page.
        nbytes: Size of the range.
    """
    nodes = memory_nodes()
    machine = os.uname().machine
    if len(nodes) < 2 or machine not in _MBIND:
        return
    syscall = _syscall()
    policy = ctypes.c_int(-1)
    number, nothing = ctypes.c_long(_GET_MEMPOLICY[machine]), ctypes.c_ulong(0)
    syscall(number, ctypes.byref(policy), None, nothing, None, nothing)
    if policy.value == _MPOL_DEFAULT:
        mask = _mask(nodes)
        # The kernel reads one bit less than this number.
        num_bits = ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
        number, span = ctypes.c_long(_MBIND[machine]), (ctypes.c_void_p(address), ctypes.c_ulong(nbytes))
        syscall(number, *span, ctypes.c_int(_MPOL_INTERLEAVE), mask, num_bits, ctypes.c_uint(0))


def _mask(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    """Bit mask of nodes, for the kernel."""
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return words


def _syscall() -> Syscall:
    """The C library's ``syscall``, which returns -1 if the kernel refuses."""
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return function


WORTH_BYTES = 32 * 2**20
"""Growth that is worth a call."""
_REST = 100  # least time between calls, as a multiple of the last call's time and that to touch the pages again
_TOUCHED_PER_S = 2.0 * 2**30
"""Bytes of fresh memory touched per second. A core of an EPYC finds and clears 82,000 pages in 0.14 s
(benchmarks/step.py)."""
_LEAST_REST_S = 1.0
_STATM = Path("/proc/self/statm")


def give_back() -> None:
    """Give freed memory back to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_bytes() -> int:
    """Resident memory of this process in bytes, without pages of files and shared memory."""
    pages = _STATM.read_text().split()
    return (int(pages[1]) - int(pages[2])) * PAGE_BYTES


@final
class HeldBack:
    """Gives memory back now and then. See [Note: held back]."""

    def __init__(self) -> None:
        self._known_bytes = 0
        self._due_s = 0.0

    def give_back_if_due(self) -> None:
        """Give memory back if it has grown enough and the last call is long ago. Cheap: call it after each step."""
        now = time.monotonic()
        if now < self._due_s:
            return
        if resident_bytes() - self._known_bytes < WORTH_BYTES:
            self._due_s = now + _LEAST_REST_S
            return
        grown_bytes = resident_bytes()
        self.give_back()
        taken_s = time.monotonic() - now + max(0, grown_bytes - self._known_bytes) / _TOUCHED_PER_S
        self._due_s = now + max(_REST * taken_s, _LEAST_REST_S)

    def give_back(self) -> None:
        """Give memory back at once."""
        give_back()
        self._known_bytes = resident_bytes()
