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

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Take watched results as they were handed out, and their versions then. Returns those the call must watch."""

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
    """What most kinds of ``Saving`` do."""

    has_arguments = False

    @property
    def is_needed(self) -> bool:
        """True: backward needs it."""
        return True

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Return all results: the call must watch them."""
        return results

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


class KeptGraph(SavingBase):
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

    def hooks(self) -> Any:
        """See ``Saving``."""
        return save_weights_by_place(self._unit, self._where)

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph:
        """See ``Saving``."""
        return inner, edges_of(made)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results that the graph needs unchanged. All, if the earlier call had not as many."""
        saved = self._saved
        return range(len(made)) if saved is None or len(saved) != len(made) else [i for i, s in enumerate(saved) if s]

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Return all results without their memory, for their versions alone: later calls may send the memory away."""
        for tensor, _ in results:
            if storage_of(tensor):
                let_go_of_values(tensor)
        return results


def edges_of(made: Sequence[torch.Tensor]) -> list[Any]:
    """Return where backward enters the graph, without the results themselves."""
    return [torch.autograd.graph.get_gradient_edge(t) for t in made]


class Dropped(SavingBase):
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
        """See ``Saving``."""
        return self._hooks

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> None:
        """See ``Saving``."""

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return no results: recompute makes them again."""
        return ()
