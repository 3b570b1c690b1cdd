"""Slots for weights on one tier, and whose weights they hold."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from outcore.planning.weight_cache import NEVER, slots_for
from outcore.runtime.device import Device
from outcore.runtime.homes import Slot
from outcore.runtime.lanes import Handle, newest
from outcore.spec.lanes import Lane


class SlotCache:
    """Units by index in slots by index: bookkeeping, and the poison of what is evicted."""

    def __init__(self, slots: Sequence[Slot], device: Device, label: str) -> None:
        """Args: slots: Smallest first. label: Of what must have happened before a slot is written again."""
        self.slots = list(slots)
        self.holders: list[int | None] = [None] * len(slots)
        """Unit whose weights each slot holds, as the homes have them."""
        self._written: list[Handle | None] = [None] * len(slots)
        self._sizes = [slot.buffer.nbytes for slot in slots]
        self._device, self._label = device, label

    def find(self, unit: int) -> int | None:
        """The slot that holds a unit's weights."""
        return self.holders.index(unit) if unit in self.holders else None

    def written(self, index: int) -> Handle | None:
        """What wrote a slot's content."""
        return self._written[index]

    def choose(self, nbytes: int, next_use: Callable[[int], int], *, beyond: int) -> int | None:
        """The slot to take for weights of a size: an idle one, else the one whose content is used again last.

        Args:
            nbytes: Of the weights.
            next_use: Of a unit.
            beyond: A content that is used by then is left where it is.
        """
        units = {i: self.holders[i] for i in slots_for(self._sizes, nbytes)}
        uses = {i: NEVER if unit is None else next_use(unit) for i, unit in units.items()}
        last = max(uses, key=lambda i: (uses[i], units[i] is None), default=None)
        return last if last is not None and uses[last] > beyond else None

    def put(self, index: int, unit: int, written: Handle) -> None:
        """A slot that was vacated holds a unit's weights."""
        self.holders[index], self._written[index] = unit, written
        self.slots[index].free_after = []

    def reset(self, kept: Container[int]) -> None:
        """Forget all contents but those of some units; nothing may be in flight. See [Note: cut short]."""
        for i, holder in enumerate(self.holders):
            if holder not in kept:
                self.holders[i] = self._written[i] = None
                self.slots[i].free_after = []

    def vacate(self, index: int) -> None:
        """Forget a slot's content; who uses the slot next waits for its ``free_after``."""
        if self.holders[index] is None:
            return
        slot, written = self.slots[index], self._written[index]
        free_after = newest([*([] if written is None else [written]), *slot.free_after])
        poison = self._device.poison(slot.buffer, Lane.H2D, {self._label: free_after})
        slot.free_after = free_after if poison is None else [*free_after, poison]
        self.holders[index] = self._written[index] = None
