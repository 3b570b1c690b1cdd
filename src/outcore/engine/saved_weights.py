"""Weights on the device while a save copies them: calls use them, and nothing edits them.

[Note: weights that are saved] A user may change weights on the device in place, at any time between calls. A save that
copies them beside training would then copy a part of the change. So the parameters are *taken* meanwhile, and given
back for calls. Any other access to their values waits for the copy, as for an update that is under way. This does not
help if a unit changes its own weights in forward, or if a user kept what ``p.data`` returned. The save waits for units
that were seen to do so before it returns. Edits of other units are found by sums of their weights before and after the
copy; the save then fails. If an exception ends a call, its unit is not taken again until the engine is used again. The
sums find edits of such a unit, too. The first sum is made when the save is asked for. If an update is still on its way
then, it is made before the first call uses the unit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from outcore.device.device import Device
from outcore.device.device_copies import DeviceChecksum
from outcore.engine.unit.unit import Unit
from outcore.spec.lane_names import Lane

Late = MutableMapping[str, list[DeviceChecksum]]
"""Sums that are still to be taken, by label of a unit."""


class SavedWeights:
    """Takes and gives back the weights of one engine's units while a save copies them."""

    def __init__(self, units: Sequence[Unit], saving: list[Unit], device: Device) -> None:
        """Args: units: All. saving: Those that a save still copies; kept up to date here."""
        self._units, self._saving, self._device = units, saving, device
        self._late: Late = {}

    def are_read(self, edited: Container[str], late: Late) -> None:
        """Take what a save copies, once all of it was submitted. Waits for units that may be edited unseen.

        Args:
            edited: Labels of units of which that is known from an earlier save.
            late: Sums that are to be taken before compute uses a unit; kept up to date here.
        """
        self._late = late
        for unit in tuple(self._saving):  # of the save before, which is over
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
            self.take(unit)

    def take(self, unit: Unit) -> None:
        """Take a unit's weights if they are still copied and no call of the unit runs."""
        presence = unit.presence
        if presence.saved is not None and presence.saved.is_over():
            self._forget(unit)
        elif presence.saved is not None and not presence.num_calls:
            presence.take()

    def give_back(self, unit: Unit) -> None:
        """Give a unit's weights back to compute, which comes behind whatever writes them. Late sums are taken first."""
        for late in self._late.pop(unit.label, ()):
            late.take()
        unit.presence.give_back()

    def wait(self, unit: Unit) -> None:
        """Wait for the copy of a unit's weights, since they may be edited now."""
        if unit.presence.saved is not None:
            self._device.wait("weights saved", unit.presence.saved)
            self._forget(unit)

    @contextmanager
    def given_back(self, unit: Unit, inside: AbstractContextManager[None]) -> Iterator[None]:
        """Give a unit's weights back for a call of the unit."""
        unit.presence.give_back()
        try:
            with inside:
                yield
        finally:
            self.take(unit)

    @contextmanager
    def all_given_back(self) -> Iterator[None]:
        """Give all weights back for a step: it looks for edits, and its updates come behind the copies."""
        for unit in self._saving:
            unit.presence.give_back()
        try:
            yield
        finally:
            for unit in tuple(self._saving):
                self.take(unit)

    def _forget(self, unit: Unit) -> None:
        unit.presence.give_back()
        unit.presence.saved = None
        self._saving.remove(unit)
