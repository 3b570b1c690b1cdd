"""Weights on the move: fetch, bind, unbind, prefetch, evict.

[Note: weight slots] A unit whose weights do not live on the device borrows a slot there. After unbinding, the slot
stays with the unit ("cached") until another unit needs it; weights never change in a slot, so evicting moves no
bytes. The next fetch into the slot waits for the compute that read it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outcore.core.errors import MemoryBudgetError
from outcore.core.quantities import format_bytes
from outcore.memory.arena import Buffer
from outcore.memory.disk import DiskStore
from outcore.runtime.device import Device
from outcore.runtime.homes import Homes, Slot, SlotPool
from outcore.runtime.lanes import After, Handle, Lane, newest
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer, expect_extent


class Phase(enum.Enum):
    """Why a unit's weights are needed."""

    FORWARD = "forward"
    INFERENCE = "inference"
    BACKWARD = "backward"


class Visit(NamedTuple):
    """A unit bound in a phase."""

    phase: Phase
    unit: int


class VisitOrder:
    """What follows what, as seen the last time.

    Wrong guesses cost time only: whatever is missing is fetched on demand.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._next: dict[Visit, Visit] = {}
        self._last: Visit | None = None

    def record(self, visit: Visit) -> None:
        """A unit is bound now."""
        if self._last is not None:
            self._next[self._last] = visit
        self._last = visit

    def coming(self, *, limit: int, is_updated: bool = False) -> Iterator[Visit]:
        """The next visits, nearest first.

        Args:
            limit: At most so many.
            is_updated: The update of this step has been submitted. Until then what follows backward is left out: its
                weights are about to change.
        """
        visit = self._last
        for _ in range(limit):
            follower = None if visit is None else self._next.get(visit)
            if visit is None or follower is None:
                return
            if visit.phase is Phase.BACKWARD and follower.phase is not Phase.BACKWARD and not is_updated:
                return
            is_updated = False
            yield follower
            visit = follower


class Weights:
    """Brings the weights of units to compute and takes them away again."""

    def __init__(
        self, units: Sequence[Unit], homes: Homes, device: Device, traffic: Traffic, prefetch_depth: int
    ) -> None:
        """Args: units: All, the root first. prefetch_depth: Coming units to fetch ahead."""
        self._units, self._homes, self._device, self._traffic = units, homes, device, traffic
        self._depth = prefetch_depth
        self._order = VisitOrder()
        self._first_uses: dict[str, None] = {}
        self._holders: dict[SlotPool, list[Unit]] = {}

    def bind(self, index: int, phase: Phase) -> None:
        """Make a unit's parameters present; compute that follows sees the current weights.

        Order: compute waits for the fetch, and the fetch for the unit's last update.
        """
        unit = self._units[index]
        self._order.record(Visit(phase, index))
        self._first_uses.setdefault(unit.name)
        unit.num_bound += 1
        if unit.is_gathered:
            return
        if unit.num_bound == 1:
            try:
                if not unit.is_resident and unit.slot is None and unit.weights is not None:
                    self._fetch(unit, is_demand=True)
                self.present(unit)
            except BaseException:  # whoever called will not unbind
                unit.num_bound -= 1
                raise
        self._prefetch(self._order.coming(limit=self._depth))

    def present(self, unit: Unit) -> None:
        """Order compute behind whatever writes the unit's weights on the device, and point the parameters at them."""
        buffer = unit.device_buffer()
        if buffer is None:
            unit.point_at(None)
            return
        after = {"weights updated": unit.weights_ready} if unit.is_resident else {"weights fetched": unit.fetched}
        self._device.compute(f"use weights of {unit.label}", reads=[buffer.region], after=after)
        if not unit.is_resident or not unit.is_present:  # else where they were, with a user's edits
            unit.point_at(buffer)

    def present_on_demand(self, unit: Unit) -> None:
        """Make a resident unit's parameters present because somebody reads them: the root has no call of its own."""
        self._first_uses.setdefault(unit.name)
        self.present(unit)

    def units_by_next_use(self) -> list[Unit]:
        """All units in the order in which they were first used since the last step, then those that were not."""
        rank = {name: i for i, name in enumerate(self._first_uses)}
        self._first_uses = {}
        return sorted(self._units, key=lambda unit: rank.get(unit.name, -1 if not unit.name else len(rank)))

    def unbind(self, index: int) -> None:
        """Make a unit's parameters absent again; its slot may go to another unit once compute is done with it."""
        unit = self._units[index]
        unit.num_bound -= 1
        if unit.is_gathered or unit.num_bound or unit.is_resident:
            return
        if unit.slot is not None:
            unit.slot.free_after = [self._device.mark(f"weights of {unit.label} used")]
        unit.mark_absent(device=self._device.torch_device)

    def rest(self, unit: Unit) -> None:
        """Put an unbound unit's parameters into the state that they have between calls."""
        if unit.is_resident:
            unit.is_present = False
            self.present(unit)
        else:
            unit.mark_absent(device=self._device.torch_device)

    def invalidate(self, unit: Unit) -> None:
        """Forget cached weights: the home holds other ones now, or will."""
        if unit.slot is None:
            return
        if unit.num_bound:
            raise AssertionError(f"unit '{unit.label}' is bound while its weights change")
        self._release(unit)

    def prefetch_after_update(self) -> None:
        """Fetch the first units of the next forward; each waits for its own update."""
        self._prefetch(self._order.coming(limit=self._depth + 1, is_updated=True))

    def _prefetch(self, visits: Iterator[Visit]) -> None:
        for visit in list(visits):
            unit = self._units[visit.unit]
            if unit.is_resident or unit.is_gathered or unit.slot is not None or unit.weights is None:
                continue
            if not self._fetch(unit, is_demand=False):
                return

    def _fetch(self, unit: Unit, *, is_demand: bool) -> bool:
        nbytes = unit.spec.weight_bytes
        pool = self._homes.pool("device", "weights", nbytes)
        slot = pool.take() or self._steal(pool, is_demand=is_demand)
        if slot is None:
            if not is_demand:
                return False
            raise MemoryBudgetError(
                f"unit '{unit.label}' needs a device slot of {format_bytes(nbytes)}, but all {len(pool.slots)} are "
                "bound by units "
                "that are being called right now; plan more weight slots (a larger prefetch_depth) for units that "
                "call one another"
            )
        target = slot.buffer.part(0, nbytes)
        source, give_back, ready = self._host_weights(unit, nbytes)
        handle = self._device.submit(
            Lane.H2D,
            f"fetch {unit.label}",
            lambda: target.bytes.copy_(source.bytes, non_blocking=True),
            reads=[source.region],
            writes=[target.region],
            after={"slot free": slot.free_after, **ready},
        )
        self._traffic.add(Lane.H2D, nbytes)
        if give_back is None:
            unit.weights_readers = newest([*unit.weights_readers, handle])
        else:
            staging_pool, staging = give_back
            poison = self._device.poison(staging.buffer, lane=Lane.H2D)
            staging_pool.give(staging, [h for h in (handle, poison) if h is not None])
        unit.slot, unit.fetched = slot, handle
        self._holders.setdefault(pool, []).append(unit)
        return True

    def _host_weights(self, unit: Unit, nbytes: int) -> tuple[Buffer, tuple[SlotPool, Slot] | None, After]:
        """Weights in host memory: home or staging slot, the slot to give back, and what the copy must wait for."""
        if unit.plan.weights == "host":
            return (
                expect_buffer(unit.weights, unit.label).part(0, nbytes),
                None,
                {"weights updated": unit.weights_ready},
            )
        extent, disk = expect_extent(unit.weights, unit.label), self._disk()
        pool, slot = self._homes.take("host", "weights", nbytes)
        buffer = slot.buffer.part(0, nbytes)
        read = self._device.submit(
            Lane.WEIGHTS_READ,
            f"read weights of {unit.label}",
            lambda: disk.read(extent, buffer.bytes),
            reads=[extent.region],
            writes=[buffer.region],
            after={"staging free": slot.free_after, "weights written": unit.weights_ready},
        )
        self._traffic.add(Lane.WEIGHTS_READ, nbytes)
        unit.weights_readers = newest([*unit.weights_readers, read])
        return buffer, (pool, slot), {"weights read": read}

    def _steal(self, pool: SlotPool, *, is_demand: bool) -> Slot | None:
        """Evict the cached unit that is needed last, as far as the recorded order tells (Belady)."""
        holders = [u for u in self._holders.get(pool, []) if not u.num_bound]
        if not holders:
            return None
        distance = {u.name: len(self._units) * 3 for u in holders}
        for i, visit in enumerate(self._order.coming(limit=2 * len(self._units))):
            name = self._units[visit.unit].name
            if name in distance:
                distance[name] = min(distance[name], i)
        victim = max(holders, key=lambda u: distance[u.name])
        # A prefetch never evicts what is needed sooner than the prefetched unit itself.
        if not is_demand and distance[victim.name] < self._depth:
            return None
        self._release(victim)
        return pool.take()

    def _release(self, unit: Unit) -> None:
        slot = unit.slot
        if slot is None:
            return
        pool = self._homes.pool("device", "weights", unit.spec.weight_bytes)
        self._holders[pool].remove(unit)
        free_after: list[Handle] = slot.free_after + ([unit.fetched] if unit.fetched is not None else [])
        unit.slot = unit.fetched = None
        poison = self._device.poison(slot.buffer, Lane.H2D, {"slot free": free_after})
        pool.give(slot, free_after + ([poison] if poison is not None else []))

    def _disk(self) -> DiskStore:
        if self._homes.disk is None:
            raise AssertionError("weights on disk without a disk tier")
        return self._homes.disk
