"""States that are one number per parameter. The host knows them, so that a step need not wait for their home."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from outcore.engine.unit.unit import Unit
from outcore.engine.values.access import ValueAccess
from outcore.optim.blocks import numbers_after
from outcore.optim.rules import Hyper


class Numbers:
    """Values that the homes have, or will have when all submitted updates are over.

    After any other write to a unit's states (``Unit.states_version``) its values are read again.
    """

    def __init__(self, access: ValueAccess) -> None:
        self._access = access
        self._known: dict[tuple[str, int], tuple[int, Mapping[str, float]]] = {}
        self._after: dict[Hashable, Mapping[str, float]] = {}

    def are_known(self, unit: Unit) -> bool:
        """Return whether the numbers of a unit are known without a wait for their home."""
        return all(not names or self._is_known(unit, i) for i, names in enumerate(unit.views.numbers))

    def of(self, unit: Unit, index: int) -> Mapping[str, float]:
        """Return the numbers of a parameter before its next update."""
        names = unit.views.numbers[index]
        if not names:
            return {}
        if not self._is_known(unit, index):
            values = {name: self._access.read_state(unit, name, index).item() for name in names}
            self._known[unit.name, index] = unit.states_version, values
        return self._known[unit.name, index][1]

    def advance(self, unit: Unit, index: int, hyper: Hyper, step: int) -> Mapping[str, float]:
        """Note that an update is submitted. Returns the numbers before it."""
        before, dtypes = self.of(unit, index), unit.views.dtypes[index]
        if dtypes:
            key = (
                hyper,
                step,
                tuple(before.items()),
                tuple(dtypes),
            )  # most parameters are at the same step of the same group
            if key not in self._after:
                self._after = {key: numbers_after(hyper, before, dtypes, step)}
            self._known[unit.name, index] = unit.states_version, self._after[key]
        return before

    def _is_known(self, unit: Unit, index: int) -> bool:
        version, _ = self._known.get((unit.name, index), (-1, {}))
        return version == unit.states_version
