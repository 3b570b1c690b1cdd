"""When work of a unit can begin at the earliest, and how long it takes alone: what bounds are worked out from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from outcore.planning.bound.costs import Costs
from outcore.planning.paper.schedule import Circumstances
from outcore.planning.paper.weight_cache import changed_units
from outcore.planning.timing.rates import Pace, Rates
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, PoolKind, Tier, UnitPlan
from outcore.spec.schedule import ROOT, Phase, Visit


class Moment(NamedTuple):
    """So long after the start of a visit."""

    visit: int
    head_s: float

    def plus(self, seconds: float) -> Moment:
        """So much later."""
        return Moment(self.visit, self.head_s + seconds)


class Trained(NamedTuple):
    """A unit that the step updates."""

    spec: UnitSpec
    plan: UnitPlan
    costs: Costs
    made: list[Moment]
    """Of each backward pass: its gradient is complete."""
    first: int
    """Its first visit in the next step."""
    is_early: bool
    """Or may be, where time decides that."""
    is_read_again: bool
    """Early for sure: gradients that rest on disk are read for it."""
    after: Moment
    """When the update's weights may leave, and a late one begin."""
    num_alike: int = 1
    """Units that are like it, but for their visits."""

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for units that are alike."""
        spec, plan = self.spec, self.plan
        sizes = (not spec.name, spec.weight_bytes, spec.trainable_bytes, spec.bucket_bytes, spec.update_bytes)
        homes = (plan.weights, plan.gradients, plan.states, plan.update, plan.early)
        return self.costs, sizes, homes, len(self.made), self.is_early, self.is_read_again

    @property
    def home(self) -> Moment:
        """When the last gradient is where the update finds it."""
        return self.made[-1].plus(self.costs.home_s)


class Times:
    """Of all units and visits of a step."""

    def __init__(
        self, model: ModelSpec, plan: Plan, rates: Rates, visits: Sequence[Visit], circumstances: Circumstances
    ) -> None:
        self.model, self.plan, self.rates, self.visits = model, plan, rates, visits
        self.pairs = list(zip(model.units, plan.units, strict=True))
        self._pace, self._circumstances = Pace(model, plan, rates, clips=circumstances.clips), circumstances
        names = [unit.name for unit in model.units]
        self._each_s = [list(map(seconds, names)) for seconds in (self._pace.forward_s, self._pace.backward_s)]
        """By whether it is backward, and unit."""
        self._collected_s = [self._collecting_s(*pair) for pair in self.pairs]
        """By unit: of what compute does with its gradients in a backward visit, and in the last one of a pass."""
        self._ends = self._ends_of_passes()
        self.costs = [self._costs(i) for i in range(len(self.pairs))]
        """By unit."""
        self.used_s = [self._used_s(visit) for visit in visits]
        """By visit: of forward or backward."""
        self.compute_s = [self._visit_s(i) for i in range(len(visits))]
        """By visit: the same, and what compute does with gradients then."""
        attempts = any(plan.units[i].early for i in changed_units(model, visits))
        self.is_behind = attempts or not rates.host_runs_ahead
        """Whether all that ``step()`` submits begins behind the last backward."""
        self.pool = functools.cache(self._pool)
        """(Tier, kind, bytes that a unit needs) -> size and number of the slots that it uses."""

    def _costs(self, index: int) -> Costs:
        """See ``Costs``: with these rates many plans are asked about."""
        model, (spec, plan), is_added = self.model, self.pairs[index], len(self._ends.get(index, ())) > 1
        known, key = self.rates.known, (spec, plan, is_added, model.precision, model.state_names)
        if key not in known:
            known[key] = Costs.of(spec, plan, model, self.rates, is_added=is_added)
        return known[key]

    @property
    def waits(self) -> bool:
        """Whether updates in ``step()`` begin behind the last backward."""
        return self.is_behind or self._circumstances.clips

    def host_s(self) -> float:
        """Of the thread that submits, ahead of an accelerator: the engine's visits, and launching their kernels."""
        launched = (self._pace.launch_s(self.plan.units[v.unit].name, v.phase.value) for v in self.visits)
        return self._pace.host_visit_s * len(self.visits) + sum(launched)

    def _ends_of_passes(self) -> dict[int, list[int]]:
        """Unit -> of each backward pass: the visit after which its gradient is complete. The root's is the last."""
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

    def _used_s(self, visit: Visit) -> float:
        return self._each_s[visit.phase is Phase.BACKWARD][visit.unit]

    def _visit_s(self, i: int) -> float:
        """Of a visit, with what compute does with gradients then. The root's are the last in a pass."""
        phase, index = self.visits[i]
        seconds = self._made_s(index, i) if phase is Phase.BACKWARD else self._used_s(self.visits[i])
        is_root_s = index != ROOT and i in self._ends.get(ROOT, ())
        return seconds + (self._collected_s[ROOT][True] if is_root_s else 0.0)

    def _made_s(self, index: int, i: int) -> float:
        """From the start of a backward visit until its gradient is ready to leave, or at home on the device."""
        return self._used_s(self.visits[i]) + self._collected_s[index][i in self._ends.get(index, ())]

    def _collecting_s(self, spec: UnitSpec, plan: UnitPlan) -> tuple[float, float]:
        """Of copying gradients into a bucket, or of adding up those that live on the device."""
        if spec.num_ranks > 1:  # the root's in the last visit of a pass alone
            copied_s = self._pace.collect_s(spec.name, spec.bucket_bytes)
            return (copied_s if spec.name else 0.0), copied_s
        if plan.gradients == "device":
            return 0.0, self.rates.move_s("compute", spec.update_bytes)
        copied_s = self._pace.collect_s(spec.name, spec.bucket_bytes) if spec.name else 0.0
        return copied_s, copied_s

    def is_piece(self, i: int) -> bool:
        """Whether a visit is one more piece of the batch of the visit before."""
        return i > 0 and self.visits[i] == self.visits[i - 1]

    def starts(self) -> list[int]:
        """Visits that begin a sweep: from one to the next no unit comes twice, but for pieces in a row."""
        starts, seen = [0], set[int]()
        for i, visit in enumerate(self.visits):
            if visit.unit in seen and not self.is_piece(i):
                starts.append(i)
                seen = set()
            seen.add(visit.unit)
        return starts

    def passes(self) -> Iterator[list[tuple[int, int]]]:
        """Forward visits whose backward comes, each with its backward visit; where no unit comes twice.

        Pieces of a batch are visits in a row, and backward comes to them in the same order.
        """
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
                    yield [(i, places[call]) for call, i in forward.items() if call in places]
                forward, is_known = {}, True
            elif phase is Phase.FORWARD:
                is_known &= len(places) == len(numbered) and not places.keys() & forward.keys()
                is_known &= all(k < self.model.micro_batches_in_unit for _, k in places)
                forward |= {(unit, k): i for (unit, k), i in places.items() if unit != ROOT}

    def trained(self) -> dict[int, Trained]:
        """The units that the step updates, by index."""
        changed = changed_units(self.model, self.visits)
        if not changed:
            return {}
        period, compute_s = len(self.visits), self.compute_s
        last = max(i for i, visit in enumerate(self.visits) if visit.phase is Phase.BACKWARD)
        firsts: dict[int, int] = {}
        for i, visit in enumerate(self.visits):
            firsts.setdefault(visit.unit, i + period)
        found = {}
        for index in changed:
            spec, plan = self.pairs[index]
            ends = self._ends[index]
            made = [Moment(i, compute_s[i] if index == ROOT else self._made_s(index, i)) for i in ends]
            overtaken = self._circumstances.overtaken
            is_early = plan.early and spec.name not in (overtaken or ())
            after = Moment(last, compute_s[last]) if self.waits else made[-1]
            first = firsts.get(index, last + period)
            is_sure = is_early and overtaken is not None
            found[index] = Trained(spec, plan, self.costs[index], made, first, is_early, is_sure, after)
        return found

    def _pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> tuple[int, int]:
        pools = [p for p in self.plan.pools if (p.tier, p.kind) == (tier, kind) and p.slot_bytes >= nbytes]
        size = min(pool.slot_bytes for pool in pools)
        return size, sum(pool.num_slots for pool in pools if pool.slot_bytes == size)

    def from_gradients_s(self, unit: Trained) -> float:
        """From gradients at home to the unit's next visit."""
        return self.brought_s(unit) + unit.costs.update_s + unit.costs.from_update_s

    def brought_s(self, unit: Trained) -> float:
        """Between gradients at home and an update: what an early one reads again, and one on the device must get."""
        if unit.plan.update == "device":
            return unit.costs.staged_s if unit.plan.gradients == "host" else 0.0
        if unit.is_read_again and unit.plan.gradients == "disk":
            nbytes = unit.spec.update_bytes if len(unit.made) > 1 else unit.spec.bucket_bytes
            return self.rates.move_s("disk_write", nbytes) + self.rates.move_s("disk_read", unit.spec.update_bytes)
        return 0.0

    def asked_for(self, unit: Trained, ready: Moment) -> Moment:
        """When something can begin for an update, of what is ready. Args: ready: Whoever asks."""
        return max(ready, unit.after) if self.is_behind and not unit.is_early else ready
