"""What an update needs in host memory: gradients, states, room for new weights; brought from other tiers where needed.

[Note: what slots keep] A slot through which states or gradients went to disk keeps its copy until somebody else takes
it. What is there still is not read again: ``step()`` updates the units whose states slots keep first, and gradients
that came last are taken from the slot in which they landed. Whoever else writes to that place on disk makes the copy
worthless (``Homes.forget``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.memory.arena import Buffer
from outcore.memory.disk import Extent
from outcore.runtime.device import Device
from outcore.runtime.disk_transfers import Answer, DiskTransfers
from outcore.runtime.gradient_homes import GradientHomes
from outcore.runtime.homes import Homes, Slot, SlotPool
from outcore.runtime.lanes import After, Handle, newest
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer
from outcore.spec.lanes import Lane


@dataclass(slots=True)
class Borrowed:
    """Bytes that an update needs in memory: a buffer, what must have happened before, and its slot if any."""

    buffer: Buffer
    after: After
    slot: tuple[SlotPool, Slot] | None = None


class Supply:
    """Brings the bytes of an update together and takes slots back. See [Note: what slots keep]."""

    def __init__(self, homes: Homes, device: Device, traffic: Traffic, resting: GradientHomes) -> None:
        """Args: resting: Gradients at rest."""
        self._homes, self._device, self._resting = homes, device, resting
        self._transfers = DiskTransfers(homes, device, traffic)

    def forget(self, extent: Extent) -> None:
        """Copies in slots of what is on disk there are worth nothing."""
        self._homes.forget(extent)

    def kept_first(self, units: Sequence[Unit]) -> list[Unit]:
        """Put units whose states are still in slots first, so that they are not read again.

        The slot that is taken next is not spared: the first unit whose states must be read takes it at once.
        """
        kept: list[Extent | None] = []
        for pool in self._homes.pools("host", "states"):
            kept += [slot.kept for slot in pool.idle()[min(1, len(pool.slots) - 1) :]]
        is_kept = {unit: isinstance(unit.states, Extent) and unit.states in kept for unit in units}
        return sorted(units, key=lambda unit: not is_kept[unit])

    def gradients(self, unit: Unit, is_due: Answer | None = None) -> Borrowed:
        """Gradients at rest, in host memory; to be given back. Args: is_due: Asked before they are read from disk.

        With ``is_due`` they are read even if they are in a slot still: their way home must not wait for updates.
        """
        if unit.plan.gradients == "host":
            return Borrowed(expect_buffer(unit.gradients, unit.label), {"gradients stored": unit.gradients_ready})
        if unit.plan.gradients == "device":
            buffer, slot, after = self._resting.fetch_from_device(unit)
        else:
            kept = self._resting.take_kept(unit) if is_due is None else None
            buffer, slot, after = kept or self._resting.fetch_from_disk(unit, is_due)
        return Borrowed(buffer, after, slot)

    def states(self, unit: Unit, is_due: Answer | None = None) -> Borrowed | None:
        """States in host memory: their home, or a slot that is being filled from disk. None where there are none."""
        if unit.states is None:
            return None
        if isinstance(unit.states, Buffer):
            return Borrowed(unit.states, {"states written": unit.states_ready, "states read": unit.states_readers})
        extent = unit.states
        kept = self._homes.take_kept("states", extent)
        pool, slot = kept or self._homes.take("host", "states", extent.nbytes)
        buffer = slot.buffer.part(0, extent.nbytes)
        if kept is not None:
            return Borrowed(buffer, {"kept states written": slot.free_after}, kept)
        after: After = {"state slot free": slot.free_after, "states written": unit.states_ready}
        read = self._transfers.read(Lane.STATES_READ, f"read states of {unit.label}", extent, buffer, after, is_due)
        return Borrowed(buffer, {"states read": read}, (pool, slot))

    def new_weights(self, unit: Unit) -> Borrowed:
        """Where the new trainable weights are written: their home, or a slot on the way there."""
        nbytes = unit.spec.trainable_bytes
        if unit.plan.weights == "host":
            home = expect_buffer(unit.weights, unit.label).part(0, nbytes)
            return Borrowed(home, {"weights fetched": unit.weights_readers, "weights updated": unit.weights_ready})
        pool, slot = self._homes.take("host", "new_weights", nbytes)
        return Borrowed(slot.buffer.part(0, nbytes), {"new weights slot free": slot.free_after}, (pool, slot))

    def give_back_gradients(self, unit: Unit, grads: Borrowed, done: Handle) -> None:
        """They were last used by an update."""
        if grads.slot is None:
            unit.gradients_readers = newest([*unit.gradients_readers, done])
        else:
            self.give(grads, done, Lane.UPDATE)

    def write_states(
        self,
        unit: Unit,
        states: Borrowed,
        extent: Extent,
        done: Handle,
        is_due: Answer | None = None,
        is_wanted: Answer | None = None,
    ) -> Handle:
        """Write updated states from their slot to disk; the slot is given back, and keeps a copy.

        Args:
            unit: Whose they are.
            states: In a slot.
            extent: Where they are written.
            done: The update that makes them.
            is_due: See ``DiskTransfers.write``.
            is_wanted: See there.
        """
        if states.slot is None:
            raise AssertionError("states at home are not written")
        written = self._transfers.write(
            f"write states of {unit.label}", states.buffer, extent, {"states updated": done}, is_due, is_wanted
        )
        self._homes.give_kept(*states.slot, extent, done, written)
        return written

    def give(self, borrowed: Borrowed, last_use: Handle, lane: Lane) -> None:
        """Give a slot back after its last use."""
        if borrowed.slot is None:
            raise AssertionError("bytes at home cannot be given back")
        pool, slot = borrowed.slot
        free_after = newest([*slot.free_after, last_use])  # what it keeps may still be on its way to disk
        slot.kept = slot.kept_after = None
        poison = self._device.poison(slot.buffer, lane, {"slot free": free_after})
        pool.give(slot, free_after if poison is None else [poison])
