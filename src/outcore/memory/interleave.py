"""Memory over all memory controllers: pages dealt out to the NUMA nodes in turn.

[Note: interleaving] A page lies on the node of the thread that touches it first. One thread touches an arena, so on a
machine with two sockets one memory controller would serve all transfers and updates, and the other one nothing. Dealt
out in turn, the pages of any range use all controllers alike, whichever threads and devices come to it, at the price
that a worker finds its bytes on the other socket every second time. Binding each range near to the worker that updates
it would save that, but a range has no such worker: small updates use fewer workers, slots hold another unit every
time, and copies and transfers of the disk pass through all of it.

The system call is made by number, since libnuma is rarely installed. It may fail, as many containers forbid it; memory
is then where it would be anyway.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

from outcore.memory.topology import memory_nodes

_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT = 0
_MPOL_INTERLEAVE = 3
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Syscall = Callable[..., int]


def interleave(address: int, nbytes: int) -> None:
    """Spread pages that nobody has touched yet over the nodes that this process runs on.

    Does nothing on one node, where the system refuses, and if a policy was set for the process (``numactl``).

    Args:
        address: At a page.
        nbytes: From there on.
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
        # The kernel takes one bit less than it is told.
        num_bits = ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
        number, span = ctypes.c_long(_MBIND[machine]), (ctypes.c_void_p(address), ctypes.c_ulong(nbytes))
        syscall(number, *span, ctypes.c_int(_MPOL_INTERLEAVE), mask, num_bits, ctypes.c_uint(0))


def _mask(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    """A bit for each node."""
    words = (ctypes.c_ulong * (max(nodes) // _WORD_BITS + 1))()
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return words


def _syscall() -> Syscall:
    """The C library's ``syscall``; -1: the kernel refuses."""
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return function
