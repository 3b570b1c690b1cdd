"""What is known of a job's candidates, each worked out once: memory, bounds and simulated seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from outcore.planner.bound.bound import MAX_NODES, StepBound, bound_of, busiest_s
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.placement import place
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.job import Job
from outcore.planner.search.plan_space import Candidate, PlanSpace
from outcore.planner.timing.simulate import PlayedSteps, Simulation, play_steps, simulation_of, steps_until_settled
from outcore.spec.plan import Plan, Pool, Tier, UnitPlan
from outcore.spec.schedule import usual_visits

_Key = tuple[tuple[UnitPlan, ...], tuple[Pool, ...], int, tuple[str, ...], bool, bool, int]


class Simulated(dict[_Key, Simulation]):
    """Simulations of plans, all at the same rates."""

    over: Callable[..., Iterable[Any]] = map
    """Makes several simulations. It works like ``map``, which makes them one after the other."""

    @property
    def at_once(self) -> int:
        """The number of simulations that ``over`` makes at the same time."""
        return 1 if self.over is map else 2


_COARSE = 24
_PLAYED = 4
"""The most micro-batches that are played to compare plans. Steps of 9 micro-batches, extended from 4, were right within
0.1% for 152 of 159 plans of known models, and within 5% for all. Of 287 plans of random models and rates, 276 were
within 0.1%, and one was 17% too short. From 3, disk-bound plans of known models came out up to 14% too short."""
_WEAR = 0.005
"""Seconds that a plan must gain for each second that the drive writes. Writing wears the drive, for nothing where host
memory has room and a step is as short without."""


class Evaluations:
    """What is known of the candidates of one job."""

    def __init__(self, job: Job, simulated: Simulated | None = None) -> None:
        """Args: simulated: Simulations made before, for jobs that differ in limits alone; new ones are added."""
        self.job = job
        steps = job.micro_batches if job.is_promised else None
        self.may_be_early = job.is_promised and not job.clipping
        self.choice = PlanSpace(
            job.model, policy=job.policy, accumulation_steps=steps, may_be_early=self.may_be_early, ways=job.ways
        )
        self._visits = usual_visits(job.model, job.micro_batches)
        self._circumstances = Circumstances(clips=job.clipping)
        self.simulated = Simulated() if simulated is None else simulated
        # Cached per object: functools.cache on the methods would keep every search alive.
        self.plan = functools.cache(self.choice.plan)
        """Candidate -> its plan, without activations that leave."""
        firsts: dict[tuple[_Key, ActivationPolicy | None], Candidate] = {}
        self.same = functools.cache(lambda c: firsts.setdefault((_key(self.plan(c)), c.saves), c))
        """Candidate -> the first candidate that was seen with the same plan."""
        self.busiest = functools.cache(self._busiest)
        self.coarse_s = functools.cache(self._coarse_s)
        self._runs: dict[tuple[int, ActivationPolicy | None], tuple[Plan, Plan]] = {}
        """(id of a plan, way) -> the plan, held so that no other gets its id, and the plan with activations."""
        self.fits = functools.cache(self._fits)
        self.seconds = functools.cache(self._seconds)
        """Candidate -> ``cost_s`` of its plan, as plans are compared: not all micro-batches are played."""
        self.room = functools.cache(lambda away: job.within(away).room)
        self.first_way = job.ways[0]
        """The way with activations of the rule's plan."""

    @functools.cached_property
    def today(self) -> Plan:
        """The plan of the rule (``homes.placement``), beside the first way with activations."""
        job = self.job
        return place(
            job.model,
            job.limits,
            accumulation_steps=job.micro_batches if job.is_promised else None,
            policy=job.policy,
            activations=job.within(job.ways[0]).activations,
        )

    @property
    def num_played(self) -> int:
        """Micro-batches of a step that are played to compare plans. The rest are taken to be like these."""
        return min(self.job.micro_batches, _PLAYED)

    @property
    def num_simulated(self) -> int:
        """The number of simulations. A plan that was also played in full counts twice."""
        return len(self.simulated)

    def missing(self, candidate: Candidate) -> dict[Tier, int]:
        """Return the bytes that a candidate takes above the limits, by tier."""
        taken, room = self.choice.tier_bytes(candidate), self.room(candidate.saves)
        return {tier: taken[tier] - most for tier, most in room.items() if taken[tier] > most}

    def _fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate keeps to the limits."""
        return not self.missing(candidate)

    def run(self, plan: Plan, away: ActivationPolicy | None) -> Plan:
        """Add activations to a plan: see ``Job.as_run``."""
        key = id(plan), away
        if key not in self._runs:
            self._runs[key] = plan, self.job.as_run(plan, away)
        return self._runs[key][1]

    def simulation(self, plan: Plan, away: ActivationPolicy | None, *, in_full: bool = True) -> Simulation:
        """Simulate a plan until steps have settled: the first steps of one that uses the disk may differ greatly.

        Args:
            plan: A plan without activations that leave.
            away: What becomes of its activations.
            in_full: Play all micro-batches; else ``num_played`` of them. The rest are taken to be like these.
        """
        run, num_played = self.run(plan, away), self.job.micro_batches if in_full else self.num_played
        key = _key(run, num_played)
        if key not in self.simulated:
            self.simulated[key] = self._simulated(run, num_played)
        return self.simulated[key]

    def simulate(self, plans: Iterable[tuple[Plan, ActivationPolicy | None]], *, in_full: bool = False) -> None:
        """Simulate several plans ahead of ``simulation``."""
        num_played = self.job.micro_batches if in_full else self.num_played
        runs = [self.run(plan, away) for plan, away in plans]
        new = {key: run for run in runs if (key := _key(run, num_played)) not in self.simulated}
        asked = [(run, num_played) for run in new.values()]
        for (key, run), numbers in zip(new.items(), self.simulated.over(self._numbers, asked), strict=True):
            self.simulated[key] = Simulation(**numbers, again=self._again(run, num_played))

    def _numbers(self, asked: tuple[Plan, int]) -> dict[str, Any]:
        """Return the fields of a simulation without ``again``. Args: asked: A plan, and micro-batches to play."""
        return {name: value for name, value in vars(self._simulated(*asked)).items() if name != "again"}

    def _simulated(self, run: Plan, num_played: int) -> Simulation:
        return simulation_of(self._again(run, num_played), repeats=self.job.micro_batches - num_played)

    def _again(self, run: Plan, num_played: int) -> Callable[[], PlayedSteps]:
        job, warm_up = self.job, steps_until_settled(run)
        if run.accumulation_steps is not None:
            run = replace(run, accumulation_steps=num_played)
        given = (job.model, run, job.rates, usual_visits(job.model, num_played), self._circumstances)
        return functools.partial(play_steps, *given, warm_up=warm_up, says_where=False)

    def __reduce__(self) -> tuple[type[Evaluations], tuple[Job]]:  # for another process, which finds the same
        return Evaluations, (self.job,)

    def bound(self, plan: Plan, away: ActivationPolicy | None, max_nodes: int = MAX_NODES) -> StepBound:
        """Return the bound of a plan."""
        job, run = self.job, self.run(plan, away)
        return bound_of(job.model, run, job.rates, self._visits, self._circumstances, max_nodes=max_nodes)

    def cost_s(self, plan: Plan, away: ActivationPolicy | None, *, in_full: bool = True) -> float:
        """Return what a search minimizes: simulated seconds of a step, and a little for what the drive writes.

        Args: as for ``simulation``.
        """
        found = self.simulation(plan, away, in_full=in_full)
        return found.step_s + _WEAR * found.written_s

    def _seconds(self, candidate: Candidate) -> float:
        return self.cost_s(self.plan(candidate), candidate.saves, in_full=False)

    def _coarse_s(self, candidate: Candidate) -> float:
        """Return a coarse bound: no step is shorter."""
        return self.bound(self.plan(candidate), candidate.saves, _COARSE).seconds

    def _busiest(self, candidate: Candidate) -> tuple[float, float]:
        """Return a bound that is worked out faster, and a sum that tells equal bounds apart: see ``busiest_s``."""
        job, run = self.job, self.run(self.plan(candidate), candidate.saves)
        return busiest_s(job.model, run, job.rates, self._visits, self._circumstances)


def _key(run: Plan, num_played: int = 0) -> _Key:  # without a number: for equal plans
    order = run.updated_first, run.kept_updated_first
    return run.units, run.pools, run.prefetch_depth, *order, run.plain, num_played
