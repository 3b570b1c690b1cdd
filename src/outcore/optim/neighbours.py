"""Parameters that lie side by side in memory are updated as one.

[Note: neighbours] A unit's parameters lie side by side in every home, and mostly have the same settings. Updated one by
one, each takes several calls of torch. Each call needs Python's lock, and wakes all threads of a team. If an element
count is a multiple of ``CUT_NUMEL``, the next parameter begins where a block may begin, too. So a fused kernel has the
same bits for a piece over both as for two pieces ([Note: blocks] in ``optim.blocks``). Other updates stay apart: ATen
cuts their operations between its threads anywhere, so their bits may depend on where a tensor begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from outcore.optim.blocks import Piece


def join_neighbours(pieces: Sequence[Piece]) -> list[Piece]:
    """Join each run of neighbours with equal settings into one piece. Other pieces stay as they are.

    Only pieces that a fused kernel updates have neighbours.
    """
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and _are_neighbours(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _are_neighbours(one: Piece, other: Piece) -> bool:
    if one.target.numel() % one.cut_numel or (one.step, one.zero) != (other.step, other.zero):
        return False
    if one.hyper != other.hyper or [*map(id, one.factors)] != [*map(id, other.factors)]:
        return False
    if one.states.keys() != other.states.keys() or one.old_states.keys() != other.old_states.keys():
        return False
    return all(_touch(*pair) for pair in zip(_tensors(one), _tensors(other), strict=True)) and other.is_fused


def _tensors(piece: Piece) -> Iterator[Tensor | None]:
    yield from (piece.target, piece.grad, piece.weights, piece.old_target)
    yield from piece.states.values()
    for name in piece.states:
        yield piece.old_states.get(name)


def _touch(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether one 1D tensor ends where the other one begins, in the same memory."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.data_ptr() + one.nbytes != other.data_ptr():
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _joined(run: Sequence[Piece]) -> Piece:
    first, size = run[0], (sum(piece.target.numel() for piece in run),)

    def over_all(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.as_strided(size, (1,))

    return replace(
        first,
        target=first.target.as_strided(size, (1,)),
        grad=over_all(first.grad),
        weights=over_all(first.weights),
        old_target=over_all(first.old_target),
        states={name: tensor.as_strided(size, (1,)) for name, tensor in first.states.items()},
        old_states={name: tensor.as_strided(size, (1,)) for name, tensor in first.old_states.items()},
    )
