"""Whose gradients are exchanged next, in a run and on paper. See [Note: turns] in ``order.gradients``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class Turns(Generic[U]):
    """Of units in one backward pass after the other."""

    def __init__(self, units: Iterable[U]) -> None:
        """Args: units: All that are trained, in module order: the root, which is whole when a pass is over, first."""
        self.order = tuple(units)[::-1]  # as backward goes
        self._places = {unit: i for i, unit in enumerate(self.order)}
        self._next = 0
        self._ready: set[int] = set()

    def come(self, unit: U) -> Iterator[U]:
        """All gradients of a unit are there: it takes its turn, with those that waited for it, or waits for others."""
        self._ready.add(self._places[unit])
        while self._next in self._ready:
            self._next += 1
            yield self.order[self._next - 1]

    def rest(self) -> Iterator[U]:
        """The pass is over: units that are left have their turn."""
        while self._next < len(self.order):
            self._next += 1
            yield self.order[self._next - 1]
        self._next = 0
        self._ready.clear()
