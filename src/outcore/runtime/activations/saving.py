"""What one call does with what autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outcore.runtime.activations.room import Lease
from outcore.runtime.activations.saved import drop_saved, let_go_of_values, save_weights_by_place, storage_of
from outcore.runtime.unit.unit import Unit

Graph = tuple[Sequence[torch.Tensor], Sequence[Any]]
"""The arguments inside of the block, and its results or their edges in the graph."""


class Saving(Protocol):
    """What one call does with what autograd saves. Room that it has taken goes back with the object."""

    may_drop: bool
    """Whether it may come to a recompute."""
    has_arguments: bool
    """Whether it has the call's arguments in backward, or autograd keeps them. Known when forward is over."""

    @property
    def is_needed(self) -> bool:
        """Whether backward needs this object. Known when forward is over."""

    @property
    def is_kept(self) -> bool:
        """Backward walks the graph of forward, as it looks now; else it runs the block again."""

    def hooks(self) -> Any:
        """To run the block under, with its weights bound."""

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """Forward is over. Returns what backward begins with; None: it is recomputed.

        Args:
            inner: The arguments inside of the block.
            made: Results with a gradient.
            owner: Lives as long as a backward may come.
        """

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that must not be changed in place outside."""

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Watched results as they were handed out, with their versions then: those that somebody else has to watch."""

    def begin_backward(self) -> None:
        """The graph is walked now."""

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Of the call, where it is recomputed. Args: saved: What autograd has kept of them."""

    def again(self, hooks: Any) -> Any:
        """To run the block again under. Args: hooks: What is to be entered besides."""

    def release(self) -> None:
        """The graph is there for the last time: what it was made from is not needed any more."""

    def end_backward(self, *, is_over: bool) -> None:
        """It was walked. Args: is_over: And will not be again."""


class SavingBase:
    """What most do."""

    has_arguments = False

    @property
    def is_needed(self) -> bool:
        """It is."""
        return True

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """All."""
        return results

    def begin_backward(self) -> None:
        """All is where it is wanted."""

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Autograd has kept them."""
        return saved

    def again(self, hooks: Any) -> Any:
        """Nothing besides."""
        return hooks

    def release(self) -> None:
        """It goes with the graph."""

    def end_backward(self, *, is_over: bool) -> None:
        """Nothing to do."""


class KeptGraph(SavingBase):
    """All is kept."""

    is_kept, may_drop = True, False

    def __init__(self, unit: Unit, lease: Lease | None, saved: Sequence[int] | None, where: str) -> None:
        """Args: lease: The bytes that it takes; None: they are not counted. saved: See ``watched``; None: all."""
        self._unit, self._lease, self._saved, self._where = unit, lease, saved, where

    def hooks(self) -> Any:
        """See ``Saving``."""
        return save_weights_by_place(self._unit, self._where)

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph:
        """See ``Saving``."""
        return inner, edges_of(made)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that the graph needs unchanged."""
        return range(len(made)) if self._saved is None else self._saved

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Their versions alone: what comes next may send them away."""
        for tensor, _ in results:
            if storage_of(tensor):
                let_go_of_values(tensor)
        return results


def edges_of(made: Sequence[torch.Tensor]) -> list[Any]:
    """Where backward enters the graph, without the results themselves."""
    return [torch.autograd.graph.get_gradient_edge(t) for t in made]


class Dropped(SavingBase):
    """Nothing is kept."""

    is_kept, may_drop = False, True

    @property
    def is_needed(self) -> bool:
        """It has nothing."""
        return False

    def __init__(self, where: str) -> None:
        """Args: where: For errors."""
        self._hooks = drop_saved(where)

    def hooks(self) -> Any:
        """See ``Saving``."""
        return self._hooks

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> None:
        """See ``Saving``."""

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """None: recompute makes them again."""
        return ()
