"""A piece: one parameter to update, a part of one, or neighbours that are updated as one; and how pieces are cut.

[Note: neighbours] A unit's parameters lie side by side in every home, and mostly have the same settings. Updated one by
one, each takes several calls of torch. Each call needs Python's lock, and wakes all threads of a team. If an element
count is a multiple of ``CUT_NUMEL``, the next parameter begins where a block may begin, too. So a fused kernel has the
same bits for a piece over both as for two pieces ([Note: blocks] in ``optim.blocks``). Other updates stay apart: ATen
cuts their operations between its threads anywhere, so their bits may depend on where a tensor begins and ends. Updates
on a device gain nothing: there one kernel takes many parameters.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from outcore.core.quantities import align_up
from outcore.optim.formats import Codes
from outcore.optim.kernels import is_fused
from outcore.optim.rules import Hyper, RuleHyper

CUT_NUMEL = 64
"""Cuts inside a parameter are multiples of it: a cache line or more in every dtype, and a whole number of vectors."""


@final
@dataclass(kw_only=True, slots=True, eq=False)  # not frozen, which would make a Piece, hence a block, take 4x as long
class Piece:
    """One parameter to update, or a part of one, cut at multiples of ``cut_numel`` elements. All tensors are 1D.

    Parameters that lie side by side may be one piece; see [Note: neighbours].
    """

    target: Tensor
    """The tensor that the rule updates, in the update dtype: master weights, or the weights if there is no master. If
    the master is compact, it is the bf16 weights, which are the master's upper half."""
    grad: Tensor | None
    """Gradient in the update dtype or in the dtype in which autograd made it; only read. May be None with ``zero``."""
    states: Mapping[str, Tensor]
    """At least the states that ``hyper`` needs; updated in place. Those in ``numbers`` have one element."""
    weights: Tensor | None
    """Receives ``target``, cast to the dtype of the weights; None if ``target`` is the weights."""
    step: int
    """Number of this update of the parameter, from 1."""
    hyper: Hyper
    factors: tuple[Tensor, ...] = ()
    """0-dim tensors by which the gradient is multiplied, one after the other, after its cast to the update dtype."""
    zero: bool = False
    """Whether the gradient was zeroed before the factors apply; ``grad`` is then not read."""
    old_target: Tensor | None = None
    """For an update out of place: the value of ``target`` before the update."""
    old_states: Mapping[str, Tensor] = field(default_factory=dict)
    """For an update out of place: the values of ``states`` before the update."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values, before the update, of states that are single numbers: all parts of a parameter read the same value."""
    likes: Mapping[str, Tensor] = field(default_factory=dict)
    """For parameters updated as a whole: meta tensors with the shapes and strides for the rule, of the parameter ("")
    and of states with their own shape."""

    codes: Codes | None = None
    """How states are stored; None: as they are updated."""
    start: int = 0
    """Index of the piece's first element in the parameter."""

    @property
    def cut_numel(self) -> int:
        """Number of elements at whose multiples the piece may be cut."""
        return CUT_NUMEL if self.codes is None else max(CUT_NUMEL, self.codes.shared_numel)

    @property
    def update_dtype(self) -> torch.dtype:
        """Dtype in which the rule updates."""
        return self.target.dtype if self.codes is None else torch.float32

    @property
    def formats(self) -> dict[str, str]:
        """Storage formats of what an update decodes: states, and ("") a weight in bf16 that is updated in fp32."""
        if self.codes is None:
            return {}
        is_narrow = self.target.dtype != torch.float32 and "master" not in self.codes.formats
        return {**self.codes.formats, **({"": "nearest"} if is_narrow else {})}

    @property
    def is_fused(self) -> bool:
        """Whether a fused kernel alone updates it."""
        if self.codes is not None or isinstance(self.hyper, RuleHyper):
            return False
        return is_fused(self.hyper, self.target.device, self.update_dtype)

    @property
    def is_whole(self) -> bool:
        """Whether the piece must not be cut."""
        return isinstance(self.hyper, RuleHyper) and self.hyper.rule.is_whole

    def parts(self, numels: Sequence[int]) -> Iterator[Piece]:
        """Cut the piece into consecutive parts. See [Note: interpreter lock] in ``optim.blocks``."""
        if len(numels) == 1:
            yield self
            return

        def cut(tensor: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(numels) if tensor is None else tensor.split_with_sizes(numels)

        def cut_each(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
            columns = {name: self._cut_state(name, tensor, numels) for name, tensor in tensors.items()}
            return [{name: column[i] for name, column in columns.items()} for i in range(len(numels))]

        targets, grads, weights = self.target.split_with_sizes(numels), cut(self.grad), cut(self.weights)
        states, old_targets, old_states = cut_each(self.states), cut(self.old_target), cut_each(self.old_states)
        starts = itertools.accumulate(numels, initial=self.start)
        for i, (target, start) in enumerate(zip(targets, starts, strict=False)):
            yield Piece(
                target=target,
                grad=grads[i],
                states=states[i],
                weights=weights[i],
                step=self.step,
                hyper=self.hyper,
                factors=self.factors,
                zero=self.zero,
                old_target=old_targets[i],
                old_states=old_states[i],
                numbers=self.numbers,
                likes=self.likes,
                codes=self.codes,
                start=start,
            )

    def _cut_state(self, name: str, tensor: Tensor, numels: Sequence[int]) -> Sequence[Tensor]:
        if name in self.numbers:
            return [tensor] * len(numels)
        shared = 1 if self.codes is None else self.codes.elements_of(name)
        return tensor.split_with_sizes([-(-numel // shared) for numel in numels])


def split(pieces: Sequence[Piece], weights: Sequence[int]) -> list[list[Piece]]:
    """Cut pieces into shares, in order. The same pieces are always cut in the same way.

    A piece may be cut at multiples of its ``cut_numel``. Shares are empty if there is too little work.

    Args:
        pieces: The pieces.
        weights: For each share, in proportion to what it gets elements.
    """
    total = sum(piece.target.numel() for piece in pieces)
    ends = [-(-total * weight // sum(weights)) for weight in itertools.accumulate(weights)]
    shares: list[list[Piece]] = [[] for _ in weights]
    done = 0
    for piece in pieces:
        numels, owners, cut = [], [], piece.cut_numel
        numel = piece.target.numel()
        while numel:
            owners.append(bisect_right(ends, done))
            numels.append(min(align_up(ends[owners[-1]] - done, cut), numel))
            done += numels[-1]
            numel -= numels[-1]
        for owner, part in zip(owners, piece.parts(numels), strict=True):
            shares[owner].append(part)
    return shares


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
