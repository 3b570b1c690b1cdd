"""The blocked update: the fused kernels applied in blocks that stay in cache, so that memory sees each byte once.

[Note: blocks] Inside the fused kernels a vector body handles full vectors and a scalar tail the rest, and the two
round differently. A block starts at a multiple of 64 elements from its parameter's start and ends at one or at the
parameter's end, so every element meets the same of the two as in a step over the whole parameter, whatever the block
size, the number of workers and the place in memory.

[Note: interpreter lock] Every call of torch lets go of the interpreter lock and takes it again, and a worker that finds
it taken sleeps until it is woken, which takes longer than the call. So the views of all blocks of a parameter are made
by one call per tensor, and few calls are left per block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    old_target: Tensor | None = None
    """Out of place: what ``target`` is before the update."""
    old_states: Mapping[str, Tensor] = field(default_factory=dict)
    """Out of place: what ``states`` are before the update."""

    def parts(self, numels: Sequence[int]) -> Iterator[Piece]:
        """Cut the whole into parts of so many elements, one behind the other. See [Note: interpreter lock]."""
        if len(numels) == 1:
            yield self
            return

        def cut(tensor: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(numels) if tensor is None else tensor.split_with_sizes(numels)

        def cut_each(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
            columns = {name: tensor.split_with_sizes(numels) for name, tensor in tensors.items()}
            return [{name: column[i] for name, column in columns.items()} for i in range(len(numels))]

        targets, grads, weights = self.target.split_with_sizes(numels), cut(self.grad), cut(self.weights)
        states, old_targets, old_states = cut_each(self.states), cut(self.old_target), cut_each(self.old_states)
        for i, target in enumerate(targets):
            yield replace(
                self,
                target=target,
                grad=grads[i],
                states=states[i],
                weights=weights[i],
                old_target=old_targets[i],
                old_states=old_states[i],
            )


class StoppedError(Exception):
    """An update was stopped between two blocks: some parameters are updated, some are not."""


def update_blocks(pieces: Iterable[Piece], scratch: Tensor, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Update every piece, in blocks as large as the scratch.

    Bit for bit one step of ``torch.optim`` with ``fused=True`` over whole parameters whose gradient is
    ``grad.to(update dtype)`` times the factors, then ``weights.copy_(target)``. See [Note: blocks].

    Args:
        pieces: Any devices and dtypes that the scratch serves; different pieces may have different settings.
        scratch: 1D uint8 on the device of the pieces, aligned to 256 bytes: holds the gradients of one block. On the
            CPU it should fit in a core's share of the cache, beside what streams through; on an accelerator larger is
            faster.
        is_stopped: Asked before each block.

    Raises:
        StoppedError: It said yes.
    """
    with torch.no_grad():
        for (_, dtype, _), group in _alike(pieces).items():
            numel = scratch.numel() // (dtype.itemsize * CUT_NUMEL) * CUT_NUMEL
            room = scratch[: numel * dtype.itemsize].view(dtype)
            for blocks in _filled(group, numel):
                if is_stopped():
                    raise StoppedError("the model was closed")
                _update(blocks, room)


def _alike(pieces: Iterable[Piece]) -> dict[tuple[Hyper, torch.dtype, bool], list[Piece]]:
    """Pieces that one kernel call can take: same settings, same dtype."""
    alike: dict[tuple[Hyper, torch.dtype, bool], list[Piece]] = {}
    for piece in pieces:
        first = isinstance(piece.hyper, SgdHyper) and piece.step == 1
        alike.setdefault((piece.hyper, piece.target.dtype, first), []).append(piece)
    return alike


def _filled(pieces: Sequence[Piece], block_numel: int) -> Iterator[list[Piece]]:
    """Blocks for one kernel call each: as many as fill the scratch."""
    if not block_numel:
        raise AssertionError(f"the scratch of an update holds less than {CUT_NUMEL} elements")
    batch: list[Piece] = []
    room = block_numel
    for piece in pieces:
        for block in piece.parts(_sizes(piece.target.numel(), room, block_numel)):
            batch.append(block)
            room -= align_up(block.target.numel(), CUT_NUMEL)
            if room <= 0:
                yield batch
                batch, room = [], block_numel
    if batch:
        yield batch


def _sizes(numel: int, first: int, following: int) -> list[int]:
    """``numel`` as a sum: at most ``first``, then as many ``following`` as it takes, then the rest."""
    if numel <= first:
        return [numel] if numel else []
    whole, rest = divmod(numel - first, following)
    return [first, *[following] * whole, *([rest] if rest else [])]


def _update(blocks: list[Piece], scratch: Tensor) -> None:
    """One kernel call, and the casts around it. ``scratch`` has the dtype of the targets."""
    grads, start = [], 0
    for block in blocks:
        numel = block.target.numel()
        room = scratch if numel == scratch.numel() else scratch[start : start + numel]
        grads.append(_gradient(block, room))
        start += align_up(numel, CUT_NUMEL)
    hyper = blocks[0].hyper
    for block in blocks:  # out of place: the new bytes of a block are in cache when the kernel comes to them
        if block.old_target is not None:
            block.target.copy_(block.old_target)
        for name, old in block.old_states.items():
            block.states[name].copy_(old)
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


def split(pieces: Sequence[Piece], num_shares: int) -> list[list[Piece]]:
    """Cut work into shares of equal numbers of elements, in order; the same cut for the same pieces.

    A parameter may be cut at multiples of ``CUT_NUMEL``. Shares may be empty where there is too little work.
    """
    total = sum(piece.target.numel() for piece in pieces)
    ends = [-(-total * (i + 1) // num_shares) for i in range(num_shares)]
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    done = 0
    for piece in pieces:
        numels, owners = [], []
        numel = piece.target.numel()
        while numel:
            owners.append(bisect_right(ends, done))
            numels.append(min(align_up(ends[owners[-1]] - done, CUT_NUMEL), numel))
            done += numels[-1]
            numel -= numels[-1]
        for owner, part in zip(owners, piece.parts(numels), strict=True):
            shares[owner].append(part)
    return shares
