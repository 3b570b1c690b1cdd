"""Weights on the move: into slots on the way to compute, used there, and out of date after an update.

[Note: weight slots] A unit whose weights do not live on the device borrows a slot there. After unbinding, the slot
stays with the unit ("cached") until another unit needs it. Weights never change in a slot, so evicting moves no
bytes. The next fetch into the slot waits for the compute that read it. Weights whose home is disk pass through slots on
the host. These are cached in the same way, and written again only after the fetch that read them.

[Note: cut fetches] If weights are cut over ranks, a fetch brings this rank's runs to their places in the slot, and an
all-gather fills in the others. Runs that rest on the device go into the all-gather from there. All-gathers meet in the
order in which they are submitted. So all ranks must visit the same units in the same order, and move the same weights.
Whether a fetch is made ahead depends on visits alone, never on time, and no rank drops one that all have submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Generic

from outcore.order.ledger import After, ByteSpan, Dependency, H, Ledger, Slot, newest
from outcore.order.port import Port, Work, WorkFunction
from outcore.order.slots import Pools
from outcore.spec.lane_names import Lane
from outcore.spec.schedule import Phase


class WeightSlots(Generic[H]):
    """Slots for weights on one tier, and the units whose weights they hold. Slots and units are given by index."""

    def __init__(self, slots: Sequence[Slot[H]], port: Port[H], label: str) -> None:
        """Args: slots: Smallest first. label: Label of what must be over before a slot is written again."""
        self.slots = list(slots)
        self.holders: list[int | None] = [None] * len(slots)
        """Unit whose current weights each slot holds."""
        self.sizes = [slot.nbytes for slot in slots]
        self._port, self._label = port, label

    def find(self, unit: int) -> int | None:
        """Return the slot that holds a unit's weights, if one does."""
        return self.holders.index(unit) if unit in self.holders else None

    def put(self, index: int, unit: int, ready: H) -> None:
        """Note that a vacated slot holds a unit's weights."""
        slot, self.holders[index] = self.slots[index], unit
        slot.ready, slot.free_after = ready, []

    def clear(self, kept: Container[int]) -> None:
        """Forget all contents but those of the given units. Nothing may be in flight. See [Note: cut short]."""
        for i, slot in enumerate(self.slots):
            if self.holders[i] not in kept:
                self.holders[i] = slot.ready = None
                slot.free_after = []

    def vacate(self, index: int) -> None:
        """Forget a slot's content. The next writer of the slot waits for its ``free_after``."""
        if self.holders[index] is None:
            return
        slot = self.slots[index]
        free_after = newest([*([] if slot.ready is None else [slot.ready]), *slot.free_after])
        free = self._port.freed(slot, Lane.H2D, {self._label: free_after})
        slot.free_after = free_after if free is None else [*free_after, free]
        self.holders[index] = slot.ready = None


class WeightOrder(Generic[H]):
    """Submits the operations that bring weights to where compute uses them."""

    def __init__(self, units: Sequence[Ledger[H]], port: Port[H], pools: Pools[H]) -> None:
        """Args: units: All units, in the plan's order."""
        self.units, self._port = units, port
        self.on_device = WeightSlots(pools.slots("device", "weights"), port, "slot free")
        self.on_host = WeightSlots(pools.slots("host", "weights"), port, "staging free")
        self.all_gather: Callable[[Ledger[H], ByteSpan, ByteSpan], WorkFunction] = _on_paper
        """Unit, home, slot -> function that fills the slot with the runs of all sharers.
        This rank's runs are in the home if that is on the device, else in the slot."""

    def fetch(self, index: int, place: int) -> None:
        """Bring weights into a device slot, whatever it holds. Weights whose home is disk must be in a host slot."""
        unit = self.units[index]
        self.vacate_on_device(place)
        slot, nbytes = self.on_device.slots[place], unit.spec.weight_bytes
        staging = self.on_host.find(index) if unit.weights.tier == "disk" else None
        staged = None if staging is None else self.on_host.slots[staging]
        whole, free = slot.span(nbytes), {"slot free": slot.free_after}
        if unit.weights.tier == "device":
            fetched = self._put_together(unit, whole, {**free, **unit.weights.before_read()})
            unit.weights.read_by(fetched)
        else:
            if staged is None:
                source, after = unit.weights.span(), {**free, **unit.weights.before_read()}
            else:
                source, after = staged.span(unit.weights.nbytes), {**free, "weights staged": staged.ready}
            reads, writes = self._runs(unit, source, slot) if unit.cut.is_cut else ([source], [whole])
            fetched = self._port.submit(Lane.H2D, "fetch", unit, reads=reads, writes=writes, after=after)
            if staged is None:
                unit.weights.read_by(fetched)
            else:
                staged.free_after = [fetched]
            if unit.cut.is_cut:
                fetched = self._put_together(unit, whole, {"runs fetched": fetched})
        self.on_device.put(place, index, fetched)
        unit.slot = slot

    def _runs(self, unit: Ledger[H], source: ByteSpan, slot: Slot[H]) -> tuple[list[ByteSpan], list[ByteSpan]]:
        """Return this rank's runs in a home or host slot, and their places in a slot on the device."""
        runs = unit.cut.runs()
        reads = [source.part(run.home, run.home + run.nbytes) for run in runs]
        return reads, [slot.span(run.layout + run.nbytes, run.layout) for run in runs]

    def _put_together(self, unit: Ledger[H], whole: ByteSpan, after: After[H]) -> H:
        """Submit the all-gather that completes weights in a slot. See [Note: cut fetches]."""
        home = unit.weights.span()
        return self._port.submit(
            Lane.LINK,
            "all-gather weights of",
            unit,
            reads=[home] if unit.weights.tier == "device" else [],
            writes=[whole],
            after=after,
            work=Work(self.all_gather(unit, home, whole), moved=whole.nbytes - home.nbytes),
        )

    def read(self, index: int, place: int) -> None:
        """Bring weights from disk into a host slot, whatever it holds."""
        unit = self.units[index]
        self.on_host.vacate(place)
        slot = self.on_host.slots[place]
        read = self._port.submit(
            Lane.WEIGHTS_READ,
            "read weights of",
            unit,
            reads=[unit.weights.span()],
            writes=[slot.span(unit.weights.nbytes)],
            after={"staging free": slot.free_after, **unit.weights.before_read()},
        )
        unit.weights.read_by(read)
        self.on_host.put(place, index, read)

    def use(self, unit: Ledger[H], phase: Phase) -> None:
        """Let compute use the weights of a unit, which are on the device or on the way there."""
        span, slot = unit.weights_on_device(), unit.slot
        after: dict[str, Dependency[H]] = {"weights fetched": None if slot is None else slot.ready}
        if unit.cut.is_resident:
            after = unit.weights.before_read()
        self._port.compute(phase.value, unit, reads=[] if span is None else [span], after=after)

    def used(self, unit: Ledger[H]) -> None:
        """Note that compute is done with the weights. If they are in a slot, it may go to another unit."""
        if unit.slot is not None:
            unit.slot.free_after = [self._port.mark("weights used", unit)]

    def invalidate(self, unit: Ledger[H]) -> None:
        """Forget cached weights, since the home holds other ones now, or will."""
        if unit.slot is not None:
            self.vacate_on_device(self.on_device.slots.index(unit.slot))
        staged = self.on_host.find(unit.index)
        if staged is not None:
            self.on_host.vacate(staged)

    def vacate_on_device(self, place: int) -> None:
        """Take a device slot from the unit that has it."""
        holder = self.on_device.holders[place]
        if holder is not None:
            self.units[holder].slot = None
        self.on_device.vacate(place)

    def close(self) -> None:
        """Forget all slots, so that their memory can be given back."""
        self.on_device.slots.clear()
        self.on_host.slots.clear()


def _on_paper(*_: object) -> None:
    """Do nothing."""
