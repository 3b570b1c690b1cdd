"""What one call does with what autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outcore.engine.activations.room import Lease
from outcore.engine.activations.saved import drop_saved, let_go_of_values, save_weights_by_place, storage_of
from outcore.engine.unit.unit import Unit

Graph = tuple[Sequence[torch.Tensor], Sequence[Any]]
"""The arguments inside of the block, and its results or their edges in the graph."""


class CallSaving(Protocol):
    """What one call does with what autograd saves. Room that it has taken is given back with the object."""

    may_drop: bool
    """Whether the call may be recomputed."""
    has_arguments: bool
    """Whether this object has the call's arguments in backward; else autograd keeps them. Known after forward."""

    @property
    def is_needed(self) -> bool:
        """Whether backward needs this object. Known after forward."""

    @property
    def is_kept(self) -> bool:
        """Whether, as it looks now, backward walks the graph of forward; else it runs the block again."""

    def hooks(self) -> Any:
        """Return the hooks to run the block under, with its weights bound."""

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """End forward. Returns what backward begins with; None: the call is recomputed.

        Args:
            inner: The arguments inside of the block.
            made: Results with a gradient.
            owner: Lives as long as a backward may come.
        """

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results that must not be changed in place outside."""

    def returned(
        self, watched: list[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Take results as they were handed out. Returns those that the call must watch.

        Args:
            watched: Watched ones, and their versions then.
            results: All.
        """

    def begin_backward(self) -> None:
        """Begin a backward: the graph is walked now."""

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the arguments of a recomputed call. Args: saved: What autograd has kept of them."""

    def again(self, hooks: Any) -> Any:
        """Return the context to run the block again under. Args: hooks: A context that is entered, too."""

    def release(self) -> None:
        """Let go of what the graph is made from: it was made for the last time."""

    def end_backward(self, *, is_over: bool) -> None:
        """End a backward: the graph was walked. Args: is_over: Whether it will not be walked again."""


class SavingBase:
    """What most kinds of ``CallSaving`` do."""

    has_arguments = False

    @property
    def is_needed(self) -> bool:
        """True: backward needs it."""
        return True

    def returned(
        self, watched: list[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Return all that are watched: the call must do that."""
        return watched

    def begin_backward(self) -> None:
        """Do nothing: all is where it is needed."""

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return what autograd has kept."""
        return saved

    def again(self, hooks: Any) -> Any:
        """Return ``hooks`` alone."""
        return hooks

    def release(self) -> None:
        """Do nothing: all goes with the graph."""

    def end_backward(self, *, is_over: bool) -> None:
        """Do nothing."""


class KeepGraph(SavingBase):
    """Keeps the whole graph."""

    is_kept, may_drop = True, False

    def __init__(self, unit: Unit, lease: Lease | None, saved: Sequence[bool] | None, where: str) -> None:
        """Keep the graph of one call, or of all calls without a lease.

        Args:
            unit: The unit.
            lease: The bytes that the graph takes; None: they are not counted.
            saved: Whether the graph of an earlier call of this kind has saved each of its results; None: not known.
            where: For errors.
        """
        self._unit, self._lease, self._saved, self._where = unit, lease, saved, where
        self._inside: list[torch.Tensor | None] = []
        """For each result that is not watched, its version inside of the block."""
        self._others: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Versions of these results, inside and outside, and the number outside when they were handed out."""

    def hooks(self) -> Any:
        """See ``CallSaving``."""
        return save_weights_by_place(self._unit, self._where)

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph:
        """See ``CallSaving``."""
        return inner, edges_of(made)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results that the graph needs unchanged. All, if the earlier call had not as many."""
        saved = self._saved
        if saved is None or len(saved) != len(made):
            return range(len(made))
        self._inside = [None if is_saved else _counter_of(t) for t, is_saved in zip(made, saved, strict=True)]
        return [i for i, is_saved in enumerate(saved) if is_saved]

    def returned(
        self, watched: list[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Return what is watched without its memory, for versions alone: later calls may send the memory away."""
        pairs = zip(self._inside, results, strict=False)
        self._others = [(inside, _counter_of(t), t._version) for inside, t in pairs if inside is not None]
        return [(_counter_of(tensor), version) for tensor, version in watched]

    def begin_backward(self) -> None:
        """Let autograd know of results that were changed in place: unlike earlier calls, this one may have saved them.

        The results inside of the block have other version counters than those outside.
        """
        for inside, outside, version in self._others:
            if outside._version != version:
                torch.autograd.graph.increment_version(inside)


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that shares the version counter."""
    alias = tensor.detach()
    if storage_of(alias):
        let_go_of_values(alias)
    return alias


def edges_of(made: Sequence[torch.Tensor]) -> list[Any]:
    """Return where backward enters the graph, without the results themselves."""
    return [torch.autograd.graph.get_gradient_edge(t) for t in made]


class DropGraph(SavingBase):
    """Keeps nothing."""

    is_kept, may_drop = False, True

    @property
    def is_needed(self) -> bool:
        """False: it has nothing."""
        return False

    def __init__(self, where: str) -> None:
        """Args: where: For errors."""
        self._hooks = drop_saved(where)

    def hooks(self) -> Any:
        """See ``CallSaving``."""
        return self._hooks

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> None:
        """See ``CallSaving``."""

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return no results: recompute makes them again."""
        return ()
