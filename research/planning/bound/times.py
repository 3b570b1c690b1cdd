"""The earliest moments at which a unit's work can begin, and how long it takes alone: the input of bounds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import OperationTimes, Rates
from outcore.spec.layout import in_slot
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, PoolKind, Tier, UnitPlan
from outcore.spec.schedule import ROOT, Visit
from planning.bound.costs import Costs
from planning.bound.course import Course


class VisitMoment(NamedTuple):
    """A moment so many seconds after the start of a visit."""

    visit: int
    head_s: float

    def plus(self, seconds: float) -> VisitMoment:
        """Return a moment so much later."""
        return VisitMoment(self.visit, self.head_s + seconds)


class UpdatedUnit(NamedTuple):
    """A unit that the step updates."""

    spec: UnitSpec
    plan: UnitPlan
    costs: Costs
    made: list[VisitMoment]
    """For each backward pass, the moment when its gradient is complete."""
    first: int
    """Its first visit in the next step."""
    is_early: bool
    """It is updated inside backward, or may be where time decides that."""
    is_read_again: bool
    """It is early for sure: gradients that rest on disk are read for it."""
    after: VisitMoment
    """The earliest moment at which a late update can begin, and new weights of any update can leave."""
    num_alike: int = 1
    """The number of units that it stands for: they differ in their visits only."""

    @property
    def home(self) -> VisitMoment:
        """The moment when the last gradient is where the update finds it."""
        return self.made[-1].plus(self.costs.home_s)


class _Alone(NamedTuple):
    """The times of one unit by itself, under its plan."""

    used_s: tuple[float, float, float]
    """By ``Part``: seconds of forward or backward."""
    visit_s: tuple[float, float, float]
    """By ``Part``: the same, with what compute then does with its gradients."""
    collected_s: float
    """Seconds that compute spends on its gradients in the last visit of a pass."""
    submit_s: float
    """Seconds of the engine for a visit."""
    launch_s: tuple[float, float, float]
    """By ``Part``: seconds in which the host thread launches its kernels."""
    costs: Costs
    slot_bytes: int
    """Bytes that its weights need in a slot; 0 if they are not fetched."""
    kind: int
    """A number, equal for units that are alike."""


class Times:
    """The times of all units and visits of a step."""

    def __init__(
        self, model: ModelSpec, plan: Plan, rates: Rates, visits: Sequence[Visit], circumstances: Circumstances
    ) -> None:
        self.model, self.plan, self.rates, self.visits = model, plan, rates, visits
        self.pairs = list(zip(model.units, plan.units, strict=True))
        self._circumstances, self.course = circumstances, _course(model, visits, rates)
        self._alone = self._all_alone()
        self.costs = [alone.costs for alone in self._alone]
        """Costs by unit."""
        self.used_s = [self._alone[unit].used_s[part] for unit, part in self.course.parts]
        """By visit: seconds of forward or backward."""
        self.compute_s = [self._alone[unit].visit_s[part] for unit, part in self.course.parts]
        """By visit: the same, with what compute then does with gradients. The root's are the last in a pass."""
        for i in self.course.root_ends:
            self.compute_s[i] += self._alone[ROOT].collected_s
        attempts = any(plan.units[i].early for i in self.course.changed)
        self.is_behind = attempts or not rates.host_runs_ahead
        """Whether all that ``step()`` submits begins after the last backward."""
        self.pool = functools.cache(self._pool)
        """(tier, kind, bytes that a unit needs) -> size and number of the slots that it uses."""

    def _all_alone(self) -> list[_Alone]:
        """Return every unit by itself. Results are kept with the rates, at which many plans are compared."""
        model, clips, ends = self.model, self._circumstances.clips, self.course.ends
        context = model.precision, model.state_names, model.micro_batches_in_unit, clips, self.plan.plain
        known, found = self.rates.known.setdefault(context, {}), list[_Alone]()
        for i, pair in enumerate(self.pairs):
            key = pair, len(ends.get(i, ()))
            alone = known.get(key)
            if alone is None:
                alone = known[key] = self._of_unit(*key)
            found.append(alone)
        return found

    @functools.cached_property
    def _pace(self) -> OperationTimes:
        return OperationTimes(self.model, self.plan, self.rates, clips=self._circumstances.clips)

    def _of_unit(self, pair: tuple[UnitSpec, UnitPlan], num_passes: int) -> _Alone:
        (spec, plan), pace = pair, self._pace
        costs = Costs.of(spec, plan, self.model, self.rates, is_added=num_passes > 1)
        forward_s, backward_s = pace.forward_s(spec.name), pace.backward_s(spec.name)
        each_s, last_s = self._collecting_s(spec, plan)
        sizes = (not spec.name, spec.weight_bytes, spec.trainable_bytes, spec.bucket_bytes, spec.update_bytes)
        homes = (plan.weights, plan.gradients, plan.states, plan.update, plan.early)
        kinds = self.rates.known.setdefault("kinds", {})
        return _Alone(
            used_s=(forward_s, backward_s, backward_s),
            visit_s=(forward_s, backward_s + each_s, backward_s + last_s),
            collected_s=last_s,
            submit_s=pace.host_visit_s(spec.name),
            launch_s=(pace.launch_s(spec.name, "forward"), *(2 * (pace.launch_s(spec.name, "backward"),))),
            costs=costs,
            slot_bytes=in_slot(spec, plan, "device"),
            kind=kinds.setdefault((costs, sizes, homes, num_passes), len(kinds)),
        )

    @property
    def waits(self) -> bool:
        """Whether updates in ``step()`` begin after the last backward."""
        return self.is_behind or self._circumstances.clips

    @property
    def streamed(self) -> dict[int, int]:
        """Unit -> bytes that its weights need in a slot, for units that are fetched."""
        return {i: alone.slot_bytes for i, alone in enumerate(self._alone) if alone.slot_bytes}

    def host_s(self) -> float:
        """Return seconds of the host thread that runs ahead of an accelerator: engine code, and launching kernels."""
        alone = self._alone
        return sum([alone[unit].submit_s + alone[unit].launch_s[part] for unit, part in self.course.parts])

    def _collecting_s(self, spec: UnitSpec, plan: UnitPlan) -> tuple[float, float]:
        """Return seconds to copy gradients into a bucket, or to add up those that live on the device.

        The first is what compute spends in a backward visit, the second in the last one of a pass.
        """
        if spec.num_ranks > 1:  # the root's in the last visit of a pass alone
            copied_s = self._pace.collect_s(spec.name, spec.bucket_bytes)
            return (copied_s if spec.name else 0.0), copied_s
        if self.plan.plain:
            return 0.0, 0.0  # they stay where autograd makes them; sums of later passes are not counted
        if plan.gradients == "device":
            return 0.0, self.rates.move_s("compute", spec.update_bytes)
        copied_s = self._pace.collect_s(spec.name, spec.bucket_bytes) if spec.name else 0.0
        return copied_s, copied_s

    def trained(self) -> dict[int, UpdatedUnit]:
        """Return the units that the step updates, by index."""
        return {index: self._trained(index, 1) for index in self.course.changed}

    def alike(self) -> list[UpdatedUnit]:
        """Return the units that the step updates, one for all that are alike."""
        overtaken, found = self._circumstances.overtaken or (), dict[object, list[int]]()
        for index in self.course.changed:
            key = self._alone[index].kind, overtaken and self.model.units[index].name in overtaken
            found.setdefault(key, []).append(index)
        return [self._trained(indices[-1], len(indices)) for indices in found.values()]

    def _trained(self, index: int, num_alike: int) -> UpdatedUnit:
        (spec, plan), course, overtaken = self.pairs[index], self.course, self._circumstances.overtaken
        made_s = self._alone[index].visit_s[2]
        made = [VisitMoment(i, self.compute_s[i] if index == ROOT else made_s) for i in course.ends[index]]
        is_early = plan.early and spec.name not in (overtaken or ())
        last = course.last_backward
        after = VisitMoment(last, self.compute_s[last]) if self.waits else made[-1]
        first = course.firsts.get(index, last) + len(self.visits)
        is_sure = is_early and overtaken is not None
        return UpdatedUnit(spec, plan, self.costs[index], made, first, is_early, is_sure, after, num_alike)

    def _pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> tuple[int, int]:
        pools = [p for p in self.plan.pools if (p.tier, p.kind) == (tier, kind) and p.slot_bytes >= nbytes]
        size = min(pool.slot_bytes for pool in pools)
        return size, sum(pool.num_slots for pool in pools if pool.slot_bytes == size)

    def from_gradients_s(self, unit: UpdatedUnit) -> float:
        """Return the seconds from gradients at home to the unit's next visit."""
        return self.brought_s(unit) + unit.costs.update_s + unit.costs.from_update_s

    def brought_s(self, unit: UpdatedUnit) -> float:
        """Return the seconds from gradients at home to an update: to read them again, or to stage what it needs."""
        if unit.plan.update == "device":
            return unit.costs.staged_s if unit.plan.gradients == "host" else 0.0
        if unit.is_read_again and unit.plan.gradients == "disk":
            nbytes = unit.spec.update_bytes if len(unit.made) > 1 else unit.spec.bucket_bytes
            return self.rates.move_s("disk_write", nbytes) + self.rates.move_s("disk_read", unit.spec.update_bytes)
        return 0.0

    def asked_for(self, unit: UpdatedUnit, ready: VisitMoment) -> VisitMoment:
        """Return when work for an update can begin. Args: ready: When its input is ready, whenever it is asked for."""
        return max(ready, unit.after) if self.is_behind and not unit.is_early else ready


def _course(model: ModelSpec, visits: Sequence[Visit], rates: Rates) -> Course:
    """Return the course of these visits. It is cached by object identity: it holds both, so ids are not reused."""
    known, key = rates.known, (id(model), id(visits))
    if key not in known:
        known[key] = Course(model, visits)
    course: Course = known[key]
    return course
