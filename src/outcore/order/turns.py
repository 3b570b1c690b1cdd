"""The order in which gradients of units are exchanged, in a run and on paper: [Note: turns] in ``order.gradients``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)


class Turns(Generic[U]):
    """Turns of units, in one backward pass after another."""

    def __init__(self, units: Iterable[U]) -> None:
        """Args: units: All trained units in module order. The root, complete only when a pass is over, comes first."""
        self.order = tuple(units)[::-1]  # the order of backward
        self._places = {unit: i for i, unit in enumerate(self.order)}
        self._next = 0
        self._ready: set[int] = set()

    def come(self, unit: U) -> Iterator[U]:
        """Note that all gradients of a unit are there. Yields the units whose turn it is now, if any."""
        self._ready.add(self._places[unit])
        while self._next in self._ready:
            self._next += 1
            yield self.order[self._next - 1]

    def rest(self) -> Iterator[U]:
        """End the pass. Yields the units that had no turn in it."""
        while self._next < len(self.order):
            self._next += 1
            yield self.order[self._next - 1]
        self._next = 0
        self._ready.clear()
