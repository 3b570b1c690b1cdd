"""Gradients of a schedule: into buckets, home, and to whoever updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from outcore.planning.operations import Home, Index, Kept, Operations, ScheduledUnit, Taken
from outcore.spec.plan import Plan
from outcore.spec.schedule import ROOT, Phase, Visit
from outcore.spec.timeline import COMPUTE


class Gradients:
    """Lays out what the runtime's gradients submit."""

    def __init__(self, operations: Operations, plan: Plan, on_last: Callable[[ScheduledUnit], None]) -> None:
        """Args: on_last: Called when the last promised gradient of a unit that is updated early is on its way home."""
        self._operations, self._plan, self._on_last = operations, plan, on_last
        self._reached: dict[int, ScheduledUnit] = {}  # by this backward pass

    def collect(self, unit: ScheduledUnit) -> int:
        """Gradients of one visit go into the unit's bucket; those of the root, and for a home here, stay loose.

        Returns what has to be over before the visit is.
        """
        self._reached[unit.index], unit.is_open = unit, True
        if self._operations.computed is None:
            raise AssertionError("gradients without compute")
        if unit.index == ROOT or unit.plan.gradients == "device":
            return self._operations.computed
        free_after: list[int] = []
        if unit.bucket is None:
            pool = self._operations.pool("device", "bucket", unit.spec.trainable_bytes)
            while pool.is_empty:  # all are held by units that come again: one goes home early, its rest is added there
                self._send(next(u for u in self._reached.values() if u.bucket is not None and u.bucket[0] is pool))
            unit.bucket = pool, pool.take()
            free_after = unit.bucket[1].free_after
        return self._operations.add(COMPUTE, "gradients of", unit, unit.spec.trainable_bytes, free_after)

    def end_visit(self, i: int, visits: Sequence[Visit]) -> None:
        """Send home what is complete: a unit's gradients with its last visit of the pass, the root's with the pass."""
        unit, rest = self._operations.units[visits[i].unit], _rest_of_pass(i, visits)
        if unit.index != ROOT and unit.index not in rest and unit.is_open:
            self._send(unit)
        if not rest:
            root = self._operations.units[ROOT]
            if root.spec.trainable:
                self._send(root)
            for reached in (root, *self._reached.values()):
                reached.is_counted = False
            self._reached.clear()

    def _send(self, unit: ScheduledUnit) -> None:
        unit.is_open = False
        is_first, unit.has_gradients = not unit.has_gradients, True
        unit.num_passes, unit.is_counted = unit.num_passes + (not unit.is_counted), True
        home = unit.gradients
        if unit.plan.gradients == "device":
            after = [home.ready, *home.readers]
            unit.gradients = Home(self._operations.add(COMPUTE, "accumulate", unit, unit.spec.update_bytes, after))
        elif unit.plan.gradients == "host" and is_first:
            unit.gradients = Home(self._copy_out(unit, [home.ready, *home.readers]))
        else:
            self._land(unit, is_first=is_first)
        if unit.plan.early and unit.num_passes == self._plan.accumulation_steps:
            self._on_last(unit)

    def _copy_out(self, unit: ScheduledUnit, after: Iterable[Index]) -> int:
        nbytes = unit.spec.trainable_bytes
        copied = self._operations.add("d2h", "gradients of", unit, nbytes, [self._operations.computed, *after])
        if unit.bucket is not None:
            pool, slot = unit.bucket
            pool.give(slot, [copied])
            unit.bucket = None
        return copied

    def _land(self, unit: ScheduledUnit, *, is_first: bool) -> None:
        """Gradients that are not simply copied to their home pass through a landing slot."""
        pool = self._operations.pool("host", "landing", unit.spec.trainable_bytes)
        slot = pool.take()
        landed = self._copy_out(unit, slot.free_after)
        if is_first:
            written = self._write(unit, unit.spec.trainable_bytes, landed)
            self._operations.give_kept(pool, slot, Kept("gradients", unit.index, "native"), landed, written)
            return
        home, target = unit.gradients, None
        after: list[Index] = [landed, home.ready, *home.readers]
        if unit.plan.gradients == "disk":
            target, ready = self._read(unit)
            after = [landed, ready]
        added = self._operations.add("update", "accumulate", unit, unit.spec.update_bytes, after)
        if target is None:
            unit.gradients = Home(added)
        else:
            written = self._write(unit, unit.spec.update_bytes, added)
            self._operations.give_kept(*target, Kept("gradients", unit.index, "update"), added, written)
        pool.give(slot, [added])

    def _write(self, unit: ScheduledUnit, nbytes: int, made: int) -> int:
        home = unit.gradients
        after = [made, home.ready, *home.readers]
        written = self._operations.add("disk_write", "write gradients of", unit, nbytes, after)
        unit.gradients = Home(written)
        return written

    def bring(self, unit: ScheduledUnit, *, is_early: bool) -> tuple[Taken | None, Index]:
        """Gradients in host memory: in which slot, if in one, and what has them ready.

        Args:
            unit: Of a backward pass that is over.
            is_early: For an update inside backward: what still is in a slot is read all the same.
        """
        if unit.plan.gradients == "host":
            return None, unit.gradients.ready
        if unit.plan.gradients == "disk" and not is_early:
            landed = self._operations.take_kept("landing", Kept("gradients", unit.index, "native"))
            kept = landed or self._operations.take_kept("gradients", Kept("gradients", unit.index, "update"))
            if kept is not None:
                return kept, kept[1].made
        return self._read(unit)

    def _read(self, unit: ScheduledUnit) -> tuple[Taken, int]:
        """Bring gradients from disk or device into a host slot."""
        pool = self._operations.pool("host", "gradients", unit.spec.update_bytes)
        slot = pool.take()
        after, nbytes = [*slot.free_after, unit.gradients.ready], unit.spec.update_bytes
        if unit.plan.gradients == "disk":
            read = self._operations.add("states_read", "read gradients of", unit, nbytes, after)
        else:
            read = self._operations.add("d2h", "gradients of", unit, nbytes, after)
        unit.gradients.readers.append(read)
        slot.free_after = self._operations.newest([*slot.free_after, read])
        return (pool, slot), read

    def give_back(self, unit: ScheduledUnit, slot: Taken | None, done: int) -> None:
        """They were last used by an update."""
        if slot is None:
            unit.gradients.readers.append(done)
        else:
            slot[0].give(slot[1], self._operations.newest([*slot[1].free_after, done]))


def _rest_of_pass(i: int, visits: Sequence[Visit]) -> set[int]:
    """Units that the backward pass of a visit reaches after it."""
    after = itertools.takewhile(lambda visit: visit.phase is Phase.BACKWARD, itertools.islice(visits, i + 1, None))
    return {visit.unit for visit in after}
