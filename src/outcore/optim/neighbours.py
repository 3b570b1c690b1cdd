"""Parameters that lie side by side in memory are updated as one.

[Note: neighbours] A unit's parameters lie side by side in every home, and mostly have the same settings. Updated one by
one, each takes several calls of torch. Each call needs Python's lock, and wakes all threads of a team. If an element
count is a multiple of ``CUT_NUMEL``, the next parameter begins where a block may begin, too. So a fused kernel has the
same bits for a piece over both as for two pieces ([Note: blocks] in ``optim.blocks``). Other updates stay apart: ATen
cuts their operations between its threads anywhere, so their bits may depend on where a tensor begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outcore.optim.blocks import Piece


def join_neighbours(pieces: Sequence[Piece]) -> list[Piece]:
    """Join each run of neighbours with equal settings into one piece. Other pieces stay as they are.

    Only pieces that a fused kernel updates have neighbours.
    """
    found: list[Piece] = []
    run: list[Piece] = []
    ends: list[int] = []
    for piece in pieces:
        tensors = _tensors(piece)
        begins = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if run and (begins != ends or not _are_alike(run[-1], piece)):
            found += _joined(run)
            run = []
        run.append(piece)
        ends = [at + (0 if tensor is None else tensor.nbytes) for at, tensor in zip(begins, tensors, strict=True)]
    return found + (_joined(run) if run else [])


def _tensors(piece: Piece) -> list[Tensor | None]:
    states = [*piece.states.values(), *piece.old_states.values()]
    return [piece.target, piece.grad, piece.weights, piece.old_target, *states]


def _are_alike(one: Piece, other: Piece) -> bool:
    """Whether one kernel can update two pieces as one, if the second begins in memory where the first one ends."""
    if one.target.numel() % one.cut_numel or (one.step, one.zero) != (other.step, other.zero):
        return False
    if one.hyper != other.hyper or [*map(id, one.factors)] != [*map(id, other.factors)]:
        return False
    if one.states.keys() != other.states.keys() or one.old_states.keys() != other.old_states.keys():
        return False
    return _dtypes(one) == _dtypes(other)


def _dtypes(piece: Piece) -> list[object]:
    return [None if tensor is None else tensor.dtype for tensor in _tensors(piece)]


def _joined(run: list[Piece]) -> list[Piece]:
    if len(run) == 1 or not all(piece.is_fused for piece in run):
        return run
    first, last = _tensors(run[0]), _tensors(run[-1])
    if any(_storage(one) != _storage(other) for one, other in zip(first, last, strict=True)):
        return run
    size = (sum(piece.target.numel() for piece in run),)

    def over_all(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.as_strided(size, (1,))

    joined = replace(
        run[0],
        target=run[0].target.as_strided(size, (1,)),
        grad=over_all(run[0].grad),
        weights=over_all(run[0].weights),
        old_target=over_all(run[0].old_target),
        states={name: tensor.as_strided(size, (1,)) for name, tensor in run[0].states.items()},
        old_states={name: tensor.as_strided(size, (1,)) for name, tensor in run[0].old_states.items()},
    )
    return [joined]


def _storage(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()
