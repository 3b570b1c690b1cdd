"""Parameters that lie side by side in host memory are updated as one.

[Note: neighbours] A unit's parameters lie side by side in every home, and mostly have the same settings. Updated one by
one, each takes several calls of torch. Each call needs Python's lock, and wakes all threads of a team. If an element
count is a multiple of ``CUT_NUMEL``, the next parameter begins where a block may begin, too. So a fused kernel has the
same bits for a piece over both as for two pieces ([Note: blocks] in ``optim.blocks``). Other updates stay apart: ATen
cuts their operations between its threads anywhere, so their bits may depend on where a tensor begins and ends. Updates
on a device gain nothing: there one kernel takes many parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outcore.optim.piece import CUT_NUMEL, Piece
from outcore.optim.rules import RuleHyper


def join_neighbours(pieces: Sequence[Piece]) -> list[Piece]:
    """Join each run of neighbours with equal settings into one piece. Other pieces stay as they are.

    Only pieces that a fused kernel updates have neighbours.
    """
    found: list[Piece] = []
    run: list[Piece] = []
    ends: list[tuple[int, object]] = []
    for piece in pieces:
        tensors = _tensors(piece)
        begins = [(0, None) if tensor is None else (tensor.data_ptr(), tensor.dtype) for tensor in tensors]
        if run and (begins != ends or not _are_alike(run[-1], piece)):
            found += _joined(run)
            run = []
        run.append(piece)
        sizes = [0 if tensor is None else tensor.nbytes for tensor in tensors]
        ends = [(at + size, dtype) for (at, dtype), size in zip(begins, sizes, strict=True)]
    return found + (_joined(run) if run else [])


def _tensors(piece: Piece) -> list[Tensor | None]:
    states = [*piece.states.values(), *piece.old_states.values()]
    return [piece.target, piece.grad, piece.weights, piece.old_target, *states]


def _are_alike(one: Piece, other: Piece) -> bool:
    """Whether two pieces have equal settings, and a block may begin where the first one ends."""
    if isinstance(one.hyper, RuleHyper) or one.codes is not None or other.codes is not None:
        return False
    if one.target.numel() % CUT_NUMEL:
        return False
    if (one.step, one.zero, one.hyper) != (other.step, other.zero, other.hyper):
        return False
    if len(one.factors) != len(other.factors) or any(
        a is not b for a, b in zip(one.factors, other.factors, strict=True)
    ):
        return False
    return one.states.keys() == other.states.keys() and one.old_states.keys() == other.old_states.keys()


def _joined(run: list[Piece]) -> list[Piece]:
    one = run[0]
    if len(run) == 1 or not one.is_fused:
        return run
    pairs = zip(_tensors(one), _tensors(run[-1]), strict=True)
    if any(
        a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
        for a, b in pairs
        if a is not None and b is not None
    ):
        return run
    size = (sum([piece.target.numel() for piece in run]),)
    joined = replace(
        one,
        target=one.target.as_strided(size, (1,)),
        grad=None if one.grad is None else one.grad.as_strided(size, (1,)),
        weights=None if one.weights is None else one.weights.as_strided(size, (1,)),
        old_target=None if one.old_target is None else one.old_target.as_strided(size, (1,)),
        states={name: tensor.as_strided(size, (1,)) for name, tensor in one.states.items()},
        old_states={name: tensor.as_strided(size, (1,)) for name, tensor in one.old_states.items()},
    )
    return [joined]
