"""The work of gradients: into a bucket, home, added to what is there, and back for an update.

[Note: gradients on disk] They pass through a landing slot or, where they are added to earlier ones, through a slot for
gradients. The slot is free when they are written. So when a bucket is filled, all earlier gradients have been written
but for those in buckets and slots. A slot keeps what it wrote until it is taken again. So a step's updates read all
gradients but those in slots, and only these may be written later. As many are read ahead as there are slots; all others
come when a slot has been used.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outcore.spec.layout import sums_on_device
from outcore.spec.plan import PoolKind
from planning.bound.jobs import LinkJob, LinkWork, most_of
from planning.bound.times import Times, UpdatedUnit, VisitMoment

_KEPT = "slots that keep gradients"


class _PassGradients(NamedTuple):
    """Gradients of one backward pass."""

    unit: UpdatedUnit
    made: VisitMoment
    left: VisitMoment
    """The earliest moment at which they can be in host memory."""
    at_hand: VisitMoment
    """The earliest moment at which their sum with those of earlier passes can be complete."""
    left_s: float
    added_s: float
    read_s: float
    """Seconds to read from disk the sum to which they are added."""
    write_s: float
    rest_s: float
    """Seconds from ``at_hand`` until the unit's next visit."""


def list_gradients(times: Times, work: LinkWork, trained: Sequence[UpdatedUnit]) -> None:
    """List the work of gradients.

    Args:
        times: Times of the plan.
        work: The jobs are added to it.
        trained: Units that the step updates.
    """
    gradients = _GradientTimes(times, work)
    if any(unit.spec.num_ranks > 1 for unit in trained):
        gradients.exchange(trained)
    else:
        gradients.list_all([unit for unit in trained if unit.plan.gradients != "device"])


class _GradientTimes:
    def __init__(self, times: Times, work: LinkWork) -> None:
        self._times, self._work = times, work

    def list_all(self, units: Sequence[UpdatedUnit]) -> None:
        """List gradients on one rank. Args: units: The units whose gradients leave the device."""
        passes = {unit.spec.name: self._passes(unit) for unit in units}
        for each in passes.values():
            self._leave(each)
        on_disk = [each for each in passes.values() if each[0].unit.plan.gradients == "disk"]
        for each in on_disk:
            self._go_on(each)
        self._write_last([each[-1] for each in on_disk])
        self._read_for_update([each[-1] for each in on_disk])
        self._wait_for_buckets([p for name, each in passes.items() if name for p in each])

    def exchange(self, units: Sequence[UpdatedUnit]) -> None:
        """List gradients of several ranks: they arrive, go home, and are added up there or before, pass by pass.

        Slots on the way to disk are not counted.
        """
        for unit in units:
            self._work.count = unit.num_alike
            exchange_s, left_s, added_s = unit.costs.exchanged_s
            is_there, tail_s = sums_on_device(unit.spec, unit.plan), self._times.from_gradients_s(unit)
            round_s = added_s + (left_s if is_there else 0.0)  # sums follow one another
            for i, made in enumerate(unit.made):
                after_s, arrived = round_s * (len(unit.made) - 1 - i) + tail_s, made.plus(exchange_s)
                self._work.add("reduce", exchange_s, made, unit.first, left_s + added_s + after_s)
                if is_there:
                    self._work.add("device_update", added_s, arrived, unit.first, left_s + after_s)
                    self._work.add("d2h", left_s, arrived.plus(added_s), unit.first, after_s)
                    continue
                if left_s:
                    self._work.add("d2h", left_s, arrived, unit.first, added_s + after_s)
                self._work.add(unit.costs.adder, added_s, arrived.plus(left_s), unit.first, after_s)
        exchanged = [
            _PassGradients(u, m, m, m, u.costs.left_s, 0, 0, 0, 0) for u in units if u.spec.name for m in u.made
        ]
        for name, number, filled in self._filled(exchanged):
            self._wait(f"reduce with {name}", [(p.left_s, p.made, then) for p, then in filled], number - 1)

    def _passes(self, unit: UpdatedUnit) -> list[_PassGradients]:
        spec, rates, found = unit.spec, self._times.rates, list[_PassGradients]()
        left_s, rest_s = rates.move_s("d2h", spec.bucket_bytes), self._times.from_gradients_s(unit)
        for i, made in reversed(list(enumerate(unit.made))):
            added_s = rates.move_s("update", spec.update_bytes) if i else 0.0
            read_s = write_s = 0.0
            if unit.plan.gradients == "disk":
                read_s = rates.move_s("disk_read", spec.update_bytes) if i else 0.0
                write_s = rates.move_s("disk_write", spec.update_bytes if i else spec.bucket_bytes)
            if found:
                rest_s += write_s + found[0].read_s + found[0].added_s
            left = made.plus(left_s)
            found.insert(
                0, _PassGradients(unit, made, left, left.plus(added_s), left_s, added_s, read_s, write_s, rest_s)
            )
        return found

    def _leave(self, passes: Sequence[_PassGradients]) -> None:
        unit = passes[0].unit
        self._work.count = unit.num_alike
        landing, num_slots = self._slots("landing", unit)
        for i, each in enumerate(passes):
            self._work.add("d2h", each.left_s, each.made, unit.first, each.added_s + each.rest_s)
            if i:
                self._work.add("update", each.added_s, each.left, unit.first, each.rest_s)
                held_s = (each.left_s + each.added_s) / num_slots
                self._work.add(landing, held_s, each.made, unit.first, each.rest_s)
            elif each.write_s:
                self._work.total_s[landing] += unit.num_alike * (each.left_s + each.write_s) / num_slots

    def _go_on(self, passes: Sequence[_PassGradients]) -> None:
        """List gradients that go to disk and, for the next pass, come back."""
        unit = passes[0].unit
        self._work.count = unit.num_alike
        slots, num_slots = self._slots("gradients", unit)
        for each, after in itertools.pairwise(passes):
            written = each.at_hand.plus(each.write_s)
            self._work.add("disk_write", each.write_s, each.at_hand, unit.first, each.rest_s - each.write_s)
            self._work.add("disk_read", after.read_s, written, unit.first, after.added_s + after.rest_s)
            self._work.total_s[slots] += unit.num_alike * (after.read_s + after.added_s + after.write_s) / num_slots

    def _write_last(self, passes: Sequence[_PassGradients]) -> None:
        kept_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for each in passes:
            unit, slots = each.unit, ""
            self._work.total_s["disk_write"] += unit.num_alike * each.write_s
            if not unit.is_read_again:
                kind: PoolKind = "gradients" if len(unit.made) > 1 else "landing"
                slots, number = self._slots(kind, unit)
                kept_s[slots, number].append(each.write_s)
            rest_s = self._read_s(unit) + self._rest_s(unit)
            self._work.jobs.append(LinkJob("disk_write", each.write_s, *each.at_hand, unit.first, rest_s, slots))
        for (slots, number), found in kept_s.items():
            self._work.slack_s["disk_write", slots] = most_of(found, number)

    def _read_for_update(self, passes: Sequence[_PassGradients]) -> None:
        late = [each.unit for each in passes if not each.unit.is_read_again]
        freed_s = min((unit.costs.update_s for unit in late), default=math.inf)
        late_s = [seconds for unit in late for seconds in [self._read_s(unit)] * unit.num_alike]
        for each in passes:
            unit, read_s = each.unit, self._read_s(each.unit)
            self._work.count = unit.num_alike
            written, rest_s = each.at_hand.plus(each.write_s), self._rest_s(unit)
            if unit.is_read_again:
                self._work.add("disk_read", read_s, written, unit.first, rest_s)
                continue
            waits = self._times.waits and not unit.is_early
            ready = max(unit.after.plus(freed_s), written) if waits else written
            self._work.jobs.append(LinkJob("disk_read", read_s, *ready, unit.first, rest_s, _KEPT))
        number = sum(p.num_slots for p in self._times.plan.pools if p.kind in ("landing", "gradients"))
        self._work.slack_s["disk_read", _KEPT] = kept_s = most_of(late_s, number)
        self._work.total_s["disk_read"] += sum(late_s) - kept_s

    def _rest_s(self, unit: UpdatedUnit) -> float:
        """Return the seconds from the beginning of an update until the unit's next visit."""
        return unit.costs.update_s + unit.costs.from_update_s

    def _read_s(self, unit: UpdatedUnit) -> float:
        return self._times.rates.move_s("disk_read", unit.spec.update_bytes)

    def _slots(self, kind: PoolKind, unit: UpdatedUnit) -> tuple[str, int]:
        """Return the name of the slots in host memory that a unit uses, and how many there are."""
        nbytes = unit.spec.bucket_bytes if kind == "landing" else unit.spec.update_bytes
        size, number = self._times.pool("host", kind, nbytes)
        return f"{number} slots for {kind} of {size} bytes", number

    def _filled(self, passes: Sequence[_PassGradients]) -> Iterator[tuple[str, int, list[tuple[_PassGradients, int]]]]:
        """Yield buckets of one size, their number, and what fills them, with the visit that fills the next one."""
        pools = [self._times.pool("device", "bucket", each.unit.spec.bucket_bytes) for each in passes]
        for size, number in sorted(set(pools)):
            mine = [each for each, other in zip(passes, pools, strict=True) if other == (size, number)]
            mine.sort(key=lambda each: each.made)
            following = [each.made.visit for each in mine[1:]] + [mine[0].made.visit + len(self._times.visits)]
            yield f"{number} buckets of {size} bytes", number, list(zip(mine, following, strict=True))

    def _wait_for_buckets(self, passes: Sequence[_PassGradients]) -> None:
        """List waits for buckets: when one is filled, all earlier gradients but some have left buckets and slots."""
        for name, number, filled in self._filled(passes):
            self._wait(f"d2h with {name}", [(p.left_s, p.made, then) for p, then in filled], number - 1)
            on_disk = [(self._slots("landing", p.unit), p, then) for p, then in filled if p.write_s]
            for slots, landing in sorted({found for found, _, _ in on_disk}):
                these = [(p, then) for found, p, then in on_disk if found == (slots, landing)]
                most, added = number - 1 + landing, [(p, then) for p, then in these if p.read_s]
                held = [((p.left_s + (p.added_s or p.write_s)) / landing, p.made, then) for p, then in these]
                self._wait(f"{slots}, with {name}", held, most)
                self._wait(f"disk_read with {name}, {slots}", [(p.read_s, p.left, then) for p, then in added], most)
                if added:
                    most += max(self._slots("gradients", p.unit)[1] for p, _ in these)
                written = [(p.write_s, p.at_hand, then) for p, then in these]
                self._wait(f"disk_write with {name}, {slots}", written, most)

    def _wait(self, name: str, work: Sequence[tuple[float, VisitMoment, int]], most: int) -> None:
        """List work that a bucket waits for. Args: most: Pieces that need not be over when the next one is filled."""
        for seconds, begin, then in work:
            self._work.jobs.append(LinkJob(name, seconds, *begin, then + 1, 0.0, name))
        self._work.slack_s[name, name] = most_of((seconds for seconds, _, _ in work), most)
