"""Candidates of one job, each looked at once: what they take, how fast they could be, how fast they are simulated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from outcore.planning.bound.bound import MAX_NODES, Bound, bound_of, busiest_s
from outcore.planning.homes.placement import place
from outcore.planning.homes.sending import Away
from outcore.planning.paper.schedule import Circumstances, usual_visits
from outcore.planning.search.candidates import Candidate, Choice
from outcore.planning.search.job import Job
from outcore.planning.timing.simulate import PlayedSteps, Simulation, play_steps, simulation_of, steps_until_settled
from outcore.spec.plan import Plan, Pool, Tier, UnitPlan

_Key = tuple[tuple[UnitPlan, ...], tuple[Pool, ...], int, int, bool]


class Simulated(dict[_Key, Simulation]):
    """Simulations of plans, at the same rates."""

    over: Callable[..., Iterable[Any]] = map
    """With which several are made: as ``map``, which makes one after the other."""

    @property
    def at_once(self) -> int:
        """How many."""
        return 1 if self.over is map else 2


_COARSE = 24
_WEAR = 0.005
"""Of the time that the drive writes: a plan must gain so much by it. What is written wears the drive, for nothing where
host memory has room and a step is as short without."""


class Looks:
    """What is known of candidates."""

    def __init__(self, job: Job, simulated: Simulated | None = None) -> None:
        """Args: simulated: Before, for jobs that differ in limits alone; grows."""
        self._job = job
        steps = job.micro_batches if job.is_promised else None
        self.may_be_early = job.is_promised and not job.clipping
        self.choice = Choice(
            job.model, policy=job.policy, accumulation_steps=steps, may_be_early=self.may_be_early, ways=job.ways
        )
        self._visits = usual_visits(job.model, job.micro_batches)
        self._circumstances = Circumstances(clips=job.clipping)
        self.simulated = Simulated() if simulated is None else simulated
        # Cached per object: functools.cache on the methods would keep every search alive.
        self.plan = functools.cache(self.choice.plan)
        """The candidate written down, without activations that leave."""
        firsts: dict[tuple[_Key, Away | None], Candidate] = {}
        self.same = functools.cache(lambda c: firsts.setdefault((_key(self.plan(c)), c.saves), c))
        """The first candidate that was seen with the same plan."""
        self.busiest = functools.cache(self._busiest)
        self.coarse_s = functools.cache(self._coarse_s)
        self._runs: dict[tuple[int, Away | None], tuple[Plan, Plan]] = {}  # by the plan's id, with the plan
        self.fits = functools.cache(self._fits)
        self.seconds = functools.cache(self._seconds)
        """See ``cost_s``."""
        self.room = functools.cache(lambda away: job.within(away).room)
        self.first_way = job.ways[0]
        """With activations: that of the rule's plan."""

    @functools.cached_property
    def today(self) -> Plan:
        """The rule's, with the first way."""
        job, within = self._job, self._job.within(self._job.ways[0])
        return place(
            job.model,
            within.limits,
            accumulation_steps=job.micro_batches if job.is_promised else None,
            policy=job.policy,
            activation_reserve_bytes=within.activations.nbytes,
            activation_share=within.activations.share,
        )

    @property
    def num_simulated(self) -> int:
        """Plans."""
        return len(self.simulated)

    def missing(self, candidate: Candidate) -> dict[Tier, int]:
        """Bytes above the limits, by tier."""
        taken, room = self.choice.tier_bytes(candidate), self.room(candidate.saves)
        return {tier: taken[tier] - most for tier, most in room.items() if taken[tier] > most}

    def _fits(self, candidate: Candidate) -> bool:
        """Within the limits."""
        return not self.missing(candidate)

    def run(self, plan: Plan, away: Away | None) -> Plan:
        """With activations: see ``Job.as_run``."""
        key = id(plan), away
        if key not in self._runs:
            self._runs[key] = plan, self._job.as_run(plan, away)
        return self._runs[key][1]

    def simulation(self, plan: Plan, away: Away | None) -> Simulation:
        """When steps have settled: the first ones of plans that use the disk may be far longer, or shorter."""
        run = self.run(plan, away)
        key = _key(run)
        if key not in self.simulated:
            self.simulated[key] = simulation_of(self._again(run))
        return self.simulated[key]

    def simulate(self, plans: Iterable[tuple[Plan, Away | None]]) -> None:
        """Several that will be asked for."""
        runs = [self.run(plan, away) for plan, away in plans]
        new = {key: run for run in runs if (key := _key(run)) not in self.simulated}
        for (key, run), numbers in zip(new.items(), self.simulated.over(self._numbers, new.values()), strict=True):
            self.simulated[key] = Simulation(**numbers, again=self._again(run))

    def _numbers(self, run: Plan) -> dict[str, Any]:
        """Of a simulation, without what it is of."""
        found = vars(simulation_of(self._again(run)))
        return {name: value for name, value in found.items() if name != "again"}

    def _again(self, run: Plan) -> Callable[[], PlayedSteps]:
        job, warm_up = self._job, steps_until_settled(run)
        given = (job.model, run, job.rates, self._visits, self._circumstances)
        return functools.partial(play_steps, *given, warm_up=warm_up, says_where=False)

    def __reduce__(self) -> tuple[type[Looks], tuple[Job]]:  # for another process, which finds the same
        return Looks, (self._job,)

    def bound(self, plan: Plan, away: Away | None, max_nodes: int = MAX_NODES) -> Bound:
        """Of a plan."""
        job, run = self._job, self.run(plan, away)
        return bound_of(job.model, run, job.rates, self._visits, self._circumstances, max_nodes=max_nodes)

    def cost_s(self, plan: Plan, away: Away | None) -> float:
        """What a search makes least: seconds of a step, simulated, and a little for what the drive writes."""
        found = self.simulation(plan, away)
        return found.step_s + _WEAR * found.written_s

    def _seconds(self, candidate: Candidate) -> float:
        return self.cost_s(self.plan(candidate), candidate.saves)

    def _coarse_s(self, candidate: Candidate) -> float:
        """No step is shorter."""
        return self.bound(self.plan(candidate), candidate.saves, _COARSE).seconds

    def _busiest(self, candidate: Candidate) -> tuple[float, float]:
        """A bound that is sooner worked out."""
        job, run = self._job, self.run(self.plan(candidate), candidate.saves)
        return busiest_s(job.model, run, job.rates, self._visits, self._circumstances)


def _key(run: Plan) -> _Key:
    return run.units, run.pools, run.prefetch_depth, run.last_updated_first, run.kept_updated_first
