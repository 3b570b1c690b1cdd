"""Sums of gradients in host memory, cut into blocks on which several threads may work at the same time.

[Note: casts] torch adds a bf16 tensor to an fp32 tensor element by element. If the cast is done first, into a scratch
buffer that stays in cache, the same sum takes a fifth of the time. The bits are the same: torch, too, adds in the wider
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

BLOCK_NUMEL = 2**19
SCRATCH_BYTES = 4 * BLOCK_NUMEL

Work = Callable[[Tensor], None]
"""The work on a block. Its argument is a scratch buffer of ``SCRATCH_BYTES``, 1D uint8, for its sole use."""
RunAll = Callable[[Sequence[Work]], None]
"""Runs works in any order, or in parallel, and waits for all of them."""


@final
@dataclass(frozen=True, slots=True)
class Sum:
    """The addition of a new gradient to a stored sum. Tensors are 1D."""

    target: Tensor
    """The stored sum, in the update dtype."""
    source: Tensor
    """The new gradient, in the dtype in which autograd made it."""
    factors: tuple[Tensor, ...] = ()
    """0-dim tensors; the target is multiplied by them before the addition."""
    is_first: bool = False
    """Whether there is no stored sum yet: the source is then copied into the target."""


def add_works(sums: Iterable[Sum]) -> list[Work]:
    """Return the works of all sums, by block; bit for bit ``target.mul_(factor)`` and ``target.add_(source)``."""
    works: list[Work] = []
    for one in sums:
        blocks = zip(one.target.split(BLOCK_NUMEL), one.source.split(BLOCK_NUMEL), strict=True)
        work = _copy if one.is_first else partial(_add, one.factors)
        works += [partial(work, target, source) for target, source in blocks]
    return works


def widen_rounds(target: Tensor, source: Tensor) -> Iterator[list[Work]]:
    """Copy a tensor into a wider dtype in overlapping memory. The target must not begin before the source.

    Within a round no byte is both written and read, so its works may run in parallel. Rounds must run one after the
    other.
    """
    apart_bytes, wide, narrow = target.data_ptr() - source.data_ptr(), target.itemsize, source.itemsize
    stop = source.numel()
    while stop > BLOCK_NUMEL:
        start = max(0, -((apart_bytes - narrow * stop) // wide))  # from here on, targets lie behind all sources
        blocks = zip(target[start:stop].split(BLOCK_NUMEL), source[start:stop].split(BLOCK_NUMEL), strict=True)
        yield [partial(_copy, to, origin) for to, origin in blocks]
        stop = start
    if stop:
        yield [partial(_copy_through, target[:stop], source[:stop])]


def run_here(works: Sequence[Work]) -> None:
    """Run works one after the other, on the calling thread."""
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
    for work in works:
        work(scratch)


def _add(factors: Sequence[Tensor], target: Tensor, source: Tensor, scratch: Tensor) -> None:
    for factor in factors:
        target.mul_(factor)
    if source.dtype == target.dtype:
        target.add_(source)
    else:
        target.add_(scratch.view(target.dtype)[: source.numel()].copy_(source))


def _copy(target: Tensor, source: Tensor, _: Tensor) -> None:
    target.copy_(source)


def _copy_through(target: Tensor, source: Tensor, scratch: Tensor) -> None:
    """Copy between overlapping tensors, through the scratch."""
    target.copy_(scratch.view(source.dtype)[: source.numel()].copy_(source))
