"""The blocked update: the fused kernels applied in blocks that stay in cache, so that memory sees each byte once.

[Note: blocks] Inside the fused kernels a vector body handles full vectors and a scalar tail the rest, and the two
round differently. A block starts at a multiple of 64 elements from its parameter's start and ends at one or at the
parameter's end, so every element meets the same of the two as in a step over the whole parameter, whatever the block
size, the number of workers and the place in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from outcore.core.quantities import align_up
from outcore.optim.kernels import FusedStep, apply
from outcore.optim.rules import Hyper, SgdHyper

CUT_NUMEL = 64
"""Cuts inside a parameter are multiples of it: a cache line or more in every dtype, and a whole number of vectors."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One parameter to update, or a part of one cut at multiples of ``CUT_NUMEL`` elements. All tensors are 1D."""

    target: Tensor
    """What the rule updates, in the update dtype: master weights, or the weights where there is no master."""
    grad: Tensor | None
    """Gradient in the update dtype or in the dtype in which autograd made it; only read. None needs ``zero``."""
    states: Mapping[str, Tensor]
    """At least the states that ``hyper.state_names`` lists, in the update dtype; updated in place."""
    weights: Tensor | None
    """Receives ``target`` in its own dtype; None if ``target`` is the weights."""
    step: int
    """Number of this update of the parameter, from 1."""
    hyper: Hyper
    factors: tuple[Tensor, ...] = ()
    """0-dim tensors that the gradient is multiplied by, one after the other, after it was cast to the update dtype."""
    zero: bool = False
    """The gradient was zeroed before the factors came; ``grad`` is not read."""

    def part(self, start: int, stop: int) -> Piece:
        """Elements [start, stop)."""

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[start:stop]

        target = self.target[start:stop]
        states = {name: tensor[start:stop] for name, tensor in self.states.items()}
        return replace(self, target=target, grad=cut(self.grad), states=states, weights=cut(self.weights))


def update_blocks(pieces: Iterable[Piece], scratch: Tensor) -> None:
    """Update every piece, in blocks as large as the scratch.

    Bit for bit one step of ``torch.optim`` with ``fused=True`` over whole parameters whose gradient is
    ``grad.to(update dtype)`` times the factors, then ``weights.copy_(target)``. See [Note: blocks].

    Args:
        pieces: Any devices and dtypes that the scratch serves; different pieces may have different settings.
        scratch: 1D uint8 on the device of the pieces, aligned to 256 bytes: holds the gradients of one block. On the
            CPU it should fit in a core's L2 cache beside what streams through; on an accelerator larger is faster.
    """
    with torch.no_grad():
        for blocks in _batches(pieces, scratch.numel()):
            _update(blocks, scratch)


def _batches(pieces: Iterable[Piece], scratch_bytes: int) -> Iterator[list[Piece]]:
    """Blocks that one kernel call can take: same settings, same dtype, gradients no larger than the scratch."""
    alike: dict[tuple[Hyper, torch.dtype, bool], list[Piece]] = {}
    for piece in pieces:
        first = isinstance(piece.hyper, SgdHyper) and piece.step == 1
        alike.setdefault((piece.hyper, piece.target.dtype, first), []).append(piece)
    for (_, dtype, _), group in alike.items():
        yield from _filled(group, scratch_bytes // (dtype.itemsize * CUT_NUMEL) * CUT_NUMEL)


def _filled(pieces: Sequence[Piece], block_numel: int) -> Iterator[list[Piece]]:
    if not block_numel:
        raise AssertionError(f"the scratch of an update holds less than {CUT_NUMEL} elements")
    batch: list[Piece] = []
    room = block_numel
    for piece in pieces:
        numel = piece.target.numel()
        start = 0
        while start < numel:
            stop = min(start + room, numel)
            batch.append(piece if stop - start == numel else piece.part(start, stop))
            room -= align_up(stop - start, CUT_NUMEL)
            start = stop
            if room <= 0:
                yield batch
                batch, room = [], block_numel
    if batch:
        yield batch


def _update(blocks: list[Piece], scratch: Tensor) -> None:
    view = scratch[: scratch.numel() // 4 * 4].view(blocks[0].target.dtype)
    grads, start = [], 0
    for block in blocks:
        numel = block.target.numel()
        grads.append(_gradient(block, view[start : start + numel]))
        start += align_up(numel, CUT_NUMEL)
    hyper = blocks[0].hyper
    targets, steps = [block.target for block in blocks], [block.step for block in blocks]
    states = [tuple(block.states[name] for name in hyper.state_names) for block in blocks]
    apply(FusedStep(hyper=hyper, targets=targets, grads=grads, states=states, steps=steps))
    for block in blocks:
        if block.weights is not None:
            block.weights.copy_(block.target)


def _gradient(block: Piece, room: Tensor) -> Tensor:
    """The gradient as the kernel takes it: itself if it can be read in place, else in ``room``."""
    factors = block.factors
    if block.zero:
        room.zero_()
    elif block.grad is None:
        raise AssertionError("a piece without gradient must be marked zero")
    elif block.grad.dtype != room.dtype:
        room.copy_(block.grad)
    elif factors:
        torch.mul(block.grad, factors[0], out=room)
        factors = factors[1:]
    else:
        return block.grad
    for factor in factors:
        room.mul_(factor)
    return room


def split(pieces: Sequence[Piece], num_workers: int) -> list[list[Piece]]:
    """Cut work into one list per worker, of equal numbers of elements, in order; the same cut for the same pieces.

    A parameter may be cut at multiples of ``CUT_NUMEL``. Lists may be empty where there is too little work.
    """
    total = sum(piece.target.numel() for piece in pieces)
    shares: list[list[Piece]] = [[] for _ in range(num_workers)]
    done = 0
    for piece in pieces:
        numel = piece.target.numel()
        start = 0
        while start < numel:
            worker = min(done * num_workers // total, num_workers - 1)
            share_end = -(-total * (worker + 1) // num_workers)
            stop = min(start + align_up(share_end - done, CUT_NUMEL), numel)
            shares[worker].append(piece if stop - start == numel else piece.part(start, stop))
            done += stop - start
            start = stop
    return shares
