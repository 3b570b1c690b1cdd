"""What follows from the visits of a step alone, whatever the plan. It is worked out once for all plans of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Literal

from outcore.order.weight_cache import changed_units
from outcore.spec.model import ModelSpec
from outcore.spec.schedule import ROOT, Phase, Visit

Part = Literal[0, 1, 2]
"""0: a forward; 1: a backward; 2: a backward that completes gradients."""


class Course:
    """The visits of a step among equal ones."""

    def __init__(self, model: ModelSpec, visits: Sequence[Visit]) -> None:
        self.model, self.visits = model, visits
        self.changed = changed_units(model, visits)
        """Units that the step updates."""
        self.ends = self._ends_of_passes()
        """Unit -> for each backward pass, the visit after which its gradient is complete; for the root the last."""
        self.parts: list[tuple[int, Part]] = [(visit.unit, self._part(i)) for i, visit in enumerate(visits)]
        """By visit: the unit, and what the visit does."""
        self.root_ends = [i for i in self.ends.get(ROOT, ()) if visits[i].unit != ROOT]
        """Visits of other units that complete the root's gradients."""
        self.pieces = [i for i in range(1, len(visits)) if visits[i] == visits[i - 1]]
        """Visits that run one more piece of the batch of the visit before."""
        self.firsts: dict[int, int] = {}
        """Unit -> its first visit."""
        for i, visit in enumerate(visits):
            self.firsts.setdefault(visit.unit, i)
        self.starts = self._starts()
        """Visits that begin a sweep: within a sweep no unit comes twice, but for pieces in a row."""

    @cached_property
    def last_backward(self) -> int:
        """The last backward visit of a step that has one."""
        return max(i for i, visit in enumerate(self.visits) if visit.phase is Phase.BACKWARD)

    def _part(self, i: int) -> Part:
        if self.visits[i].phase is not Phase.BACKWARD:
            return 0
        return 2 if i in self.ends.get(self.visits[i].unit, ()) else 1

    def _ends_of_passes(self) -> dict[int, list[int]]:
        ends: dict[int, list[int]] = {}
        reached: dict[int, int] = {}
        for i, visit in enumerate(self.visits):
            if visit.phase is Phase.BACKWARD:
                reached[visit.unit] = i
                is_last = i + 1 == len(self.visits) or self.visits[i + 1].phase is not Phase.BACKWARD
                if is_last:
                    for unit, end in {**reached, ROOT: i}.items():
                        if self.model.units[unit].trainable:
                            ends.setdefault(unit, []).append(end)
                    reached = {}
        return ends

    def _starts(self) -> list[int]:
        starts, seen, pieces = [0], set[int](), set(self.pieces)
        for i, visit in enumerate(self.visits):
            if visit.unit in seen and i not in pieces:
                starts.append(i)
                seen = set()
            seen.add(visit.unit)
        return starts

    @cached_property
    def passes(self) -> list[list[tuple[int, int]]]:
        """By pass: pairs of a forward visit and its backward visit. Passes in which a unit comes twice are left out.

        Pieces of a batch are visits in a row, and backward comes to them in the same order.
        """
        found: list[list[tuple[int, int]]] = []
        forward: dict[tuple[int, int], int] = {}
        is_known = True
        for phase, group in groupby(range(len(self.visits)), key=lambda i: self.visits[i].phase):
            calls = [(self.visits[i].unit, i) for i in group]
            numbered = [
                (unit, k, i) for unit, row in groupby(calls, key=lambda c: c[0]) for k, (_, i) in enumerate(row)
            ]
            places = {(unit, k): i for unit, k, i in numbered}
            if phase is Phase.BACKWARD:
                if is_known:
                    found.append([(i, places[call]) for call, i in forward.items() if call in places])
                forward, is_known = {}, True
            elif phase is Phase.FORWARD:
                is_known &= len(places) == len(numbered) and not places.keys() & forward.keys()
                is_known &= all(k < self.model.micro_batches_in_unit for _, k in places)
                forward |= {(unit, k): i for (unit, k), i in places.items() if unit != ROOT}
        return found
