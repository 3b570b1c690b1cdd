"""What every lane has to do in a step, added up unit by unit: a quick estimate that ranks plans before simulations.

A unit's work is read off the paper schedule of a few equal units with one slot of each kind. So it follows the order of
a step wherever that is written. More slots hold weights that then need not be fetched, which is accounted for as a
whole. No lane can do its work in less time; what operations wait for is left out.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outcore.order.weight_cache import nothing_held
from outcore.planner.homes.pools import pools_for
from outcore.planner.paper.paper_schedule import Circumstances, consecutive
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.timing.rates import LINK_OF, OperationTimes
from outcore.spec.lane_names import Lane
from outcore.spec.plan import Plan, Policy, UnitPlan
from outcore.spec.schedule import Phase, usual_visits
from outcore.spec.timeline import HOST

_EQUAL_UNITS, _MEASURED = 5, 1
"""Units that are laid out, and the one that counts. The last ones differ: slots keep what they need."""
_STEPS = 2
_VISITS = {phase.value for phase in Phase}
_FETCHES = {Lane.H2D.value, Lane.WEIGHTS_READ.value}
_FOR_UPDATES = {"compute", "update", "device_update", "h2d", "disk_read"}
"""Links whose work for updates is over before the next forward comes to the unit; others may lag behind."""
_HOME = UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")


class LaneWork:
    """Adds up the work of plans of one job."""

    def __init__(self, job: PlanQuestion, alike: Sequence[int], micro_batches: int) -> None:
        """Args: alike: Unit -> the first unit with the same bytes. micro_batches: That are played in a step."""
        self._job, self._alike, self._micro_batches = job, alike, micro_batches
        self._laid_out = functools.cache(self._lay_out)
        self._visits_s = functools.cache(self._visit_s)

    def busiest_s(self, plan: Plan) -> tuple[float, float]:
        """Return the seconds of the lane with most to do, and those of all lanes, which tell equal plans apart.

        Both are rounded, since equal sums may be added up in another order. Args: plan: As it runs.
        """
        total_s: defaultdict[str, float] = defaultdict(float)
        fetched_s: defaultdict[str, float] = defaultdict(float)
        updated_s: defaultdict[str, float] = defaultdict(float)
        leaving_s: defaultdict[str, float] = defaultdict(float)
        forward_s = 0.0
        counts: defaultdict[tuple[int, UnitPlan], int] = defaultdict(int)
        for index, unit in enumerate(plan.units):
            visits_s, visit_s = self._visits_s(index, unit.policy)
            total_s["compute"] += visits_s
            forward_s += visit_s
            for part in _parts(unit):
                counts[self._alike[index], part] += 1
        num_fetched = 0
        for (index, unit), count in counts.items():
            fetches_s, others_s, updates_s, leaves_s = self._laid_out(index, unit)
            num_fetched += count if fetches_s else 0
            pairs = ((fetched_s, fetches_s), (total_s, others_s), (updated_s, updates_s), (leaving_s, leaves_s))
            for sums, found in pairs:
                for link, seconds in found.items():
                    sums[link] += count * seconds
        slots, buckets = (
            sum(pool.num_slots for pool in plan.pools if (pool.tier, pool.kind) == ("device", kind))
            for kind in ("weights", "bucket")
        )
        turns = 2 * self._micro_batches - 1  # where a sweep turns, slots hold what comes next
        held = turns * min(slots, num_fetched) / (2 * self._micro_batches * max(num_fetched, 1))
        for link, seconds in fetched_s.items():
            total_s[link] += (1 - held) * seconds
        most_s = max([*total_s.values(), *(shared.least_s(total_s) for shared in self._job.rates.shared)])
        in_turn_s = total_s["compute"]  # with one slot or bucket, compute waits for each fetch, or for each gradient
        in_turn_s += (1 - held) * fetched_s["h2d"] if slots == 1 else 0.0
        in_turn_s += sum(leaving_s.values()) if buckets == 1 else 0.0
        most_s = max(most_s, in_turn_s)
        if self._job.clipping and updated_s:  # updates begin when the last backward is over
            most_s = max(most_s, total_s["compute"] - forward_s + max(updated_s.values()))
        return float(f"{most_s:.11g}"), float(f"{sum(total_s.values()):.11g}")

    def _visit_s(self, index: int, policy: Policy) -> tuple[float, float]:
        """Return the seconds in which a unit computes, and those of one micro-batch's forward."""
        model = self._job.model
        name = model.units[index].name
        unit = replace(_HOME, name=name, policy=policy)
        alone = Plan(precision=model.precision, units=(unit,), pools=(), prefetch_depth=0)
        pace = OperationTimes(replace(model, units=(model.units[index],)), alone, self._job.rates)
        pieces = model.micro_batches_in_unit if name else 1
        forward_s = pieces * pace.forward_s(name)
        return self._micro_batches * (forward_s + pieces * pace.backward_s(name)), forward_s

    def _lay_out(self, index: int, unit: UnitPlan) -> tuple[Mapping[str, float], ...]:
        """Return by link the seconds of one unit's fetches, and of its other operations but visits.

        Of the others follow, once more, those of its update, and those with which gradients leave.
        """
        job, spec = self._job, self._job.model.units[index]
        root = replace(job.model.units[0], params=(), buffer_bytes=0)
        if unit.saved_bytes:  # its activations alone count
            spec = replace(spec, params=(), buffer_bytes=0)
        names = [f"unit {number}" for number in range(_EQUAL_UNITS)] if spec.name else []
        specs = [root if names else spec, *(replace(spec, name=name) for name in names)]
        units = [_HOME if names else unit, *(replace(unit, name=name) for name in names)]
        model = replace(job.model, units=tuple(specs))
        plan = Plan(
            precision=model.precision,
            units=tuple(units),
            pools=pools_for(model, units),
            prefetch_depth=0,
            accumulation_steps=None if job.clipping else self._micro_batches,
            micro_batches_in_unit=model.micro_batches_in_unit,
        )
        visits, circumstances = usual_visits(model, self._micro_batches), Circumstances(clips=job.clipping)
        pace = OperationTimes(model, plan, job.rates, clips=job.clipping)
        steps = consecutive(model, plan, visits, nothing_held(plan), circumstances, says_where=False)
        *_, step = itertools.islice(steps, _STEPS)
        fetches: defaultdict[str, float] = defaultdict(float)
        others: defaultdict[str, float] = defaultdict(float)
        updates: defaultdict[str, float] = defaultdict(float)
        leaves: defaultdict[str, float] = defaultdict(float)
        counted = names[_MEASURED] if names else ""
        last_visit = max(i for i, op in enumerate(step.operations) if op.kind in _VISITS)
        for i, op in enumerate(step.operations):
            if op.unit != counted or op.lane == HOST or op.kind in _VISITS:
                continue
            link, seconds = LINK_OF[op.lane], pace.seconds(op)
            (fetches if op.lane in _FETCHES and not unit.saved_bytes else others)[link] += seconds
            if i > last_visit and link in _FOR_UPDATES:
                updates[link] += seconds
            if i < last_visit and link in ("d2h", "disk_write") and not unit.saved_bytes:
                leaves[link] += seconds
        return fetches, others, updates, leaves


@functools.lru_cache(4096)
def _parts(unit: UnitPlan) -> tuple[UnitPlan, ...]:
    """Return a unit with its homes alone and, if activations leave it, with these alone; names make no difference."""
    if not unit.name:
        return (unit,)
    homes = replace(unit, name="unit", policy="keep", activations="device", saved_bytes=0)
    if not unit.saved_bytes:
        return (homes,)
    return homes, replace(_HOME, name="unit", policy="keep", activations=unit.activations, saved_bytes=unit.saved_bytes)
