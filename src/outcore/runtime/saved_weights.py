"""Weights on the device while a save copies them: calls use them, and nobody edits them.

[Note: weights that are saved] A user may change weights on the device in place, at any time between calls. A save that
copies them beside training would take half of that. So their parameters are withdrawn meanwhile: to calls they are
lent, and whoever else asks for their values waits for the copy, as for an update that is under way. That does not help
where a unit changes its own weights in forward, or where somebody kept what ``p.data`` gave him. Units that were seen
to do so are waited for before the save returns. Others are found out by sums of their weights, before and behind the
copy: the save fails. So is whoever edits a unit that an exception has left lent, until the engine is asked again.
A sum is taken when the save is asked for, or where an update is still on its way, before the first call uses the unit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from outcore.device.aside import Sum
from outcore.device.device import Device
from outcore.runtime.unit.unit import Unit
from outcore.spec.lanes import Lane

Late = MutableMapping[str, list[Sum]]
"""By label of a unit."""


class SavedWeights:
    """Of the units of one engine."""

    def __init__(self, units: Sequence[Unit], saving: list[Unit], device: Device) -> None:
        """Args: units: All. saving: Those that a save still copies; kept up to date here."""
        self._units, self._saving, self._device = units, saving, device
        self._late: Late = {}

    def are_read(self, edited: Container[str], late: Late) -> None:
        """All of a save was submitted. Waits for units whose weights may be edited unseen.

        Args:
            edited: Those of which that is known otherwise, by label.
            late: Sums that are to be taken before compute uses a unit; kept up to date here.
        """
        self._late = late
        for unit in tuple(self._saving):  # of the one before, which is over
            self._forget(unit)
        for unit in self._units:
            handles = unit.ledger.weights.readers if unit.ledger.cut.is_resident else []
            handle = next((handle for handle in handles if handle.lane == Lane.SAVE.value), None)
            if handle is None:
                continue
            if unit.presence.watch.is_shared or unit.label in edited:
                self._device.wait("weights saved", handle)
                continue
            unit.presence.saved = handle
            self._saving.append(unit)
            self.withdraw(unit)

    def withdraw(self, unit: Unit) -> None:
        """What is still copied, between calls of the unit."""
        presence = unit.presence
        if presence.saved is not None and presence.saved.is_over():
            self._forget(unit)
        elif presence.saved is not None and not presence.num_calls:
            presence.withdraw()

    def lend(self, unit: Unit) -> None:
        """Compute is given its weights, behind whatever writes them."""
        for late in self._late.pop(unit.label, ()):
            late.take()
        unit.presence.lend()

    def wait(self, unit: Unit) -> None:
        """Somebody may edit the weights of a unit now."""
        if unit.presence.saved is not None:
            self._device.wait("weights saved", unit.presence.saved)
            self._forget(unit)

    @contextmanager
    def lent(self, unit: Unit, inside: AbstractContextManager[None]) -> Iterator[None]:
        """Around a call of the unit."""
        unit.presence.lend()
        try:
            with inside:
                yield
        finally:
            self.withdraw(unit)

    @contextmanager
    def all_lent(self) -> Iterator[None]:
        """Around a step: it looks for edits, and its updates come behind the copies."""
        for unit in self._saving:
            unit.presence.lend()
        try:
            yield
        finally:
            for unit in tuple(self._saving):
                self.withdraw(unit)

    def _forget(self, unit: Unit) -> None:
        unit.presence.lend()
        unit.presence.saved = None
        self._saving.remove(unit)
