"""What is known of a job's candidates, each worked out once: memory, work of lanes and simulated seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.placement import place
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.lane_work import LaneWork
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import Candidate, PlanSpace
from outcore.planner.timing.simulate import PlayedSteps, Simulation, play_steps, simulation_of, steps_until_settled
from outcore.spec.plan import Plan, Pool, Tier, UnitPlan
from outcore.spec.schedule import usual_visits

_Key = tuple[tuple[UnitPlan, ...], tuple[Pool, ...], int, tuple[str, ...], bool, bool, int]
Simulated = dict[_Key, Simulation]
"""Simulations of plans, all at the same rates."""

_PLAYED = 4
"""The most micro-batches that are played to compare plans. Steps of 9 micro-batches, extended from 4, were right within
0.1% for 152 of 159 plans of known models, and within 5% for all. Of 287 plans of random models and rates, 276 were
within 0.1%, and one was 17% too short. From 3, disk-bound plans of known models came out up to 14% too short."""
_WEAR = 0.005
"""Seconds that a plan must gain for each second that the drive writes. Writing wears the drive, for nothing where host
memory has room and a step is as short without."""


class Evaluations:
    """What is known of the candidates of one job."""

    def __init__(self, job: PlanQuestion, simulated: Simulated | None = None) -> None:
        """Args: simulated: Simulations made before, for jobs that differ in limits alone; new ones are added."""
        self.job = job
        self.choice = PlanSpace(
            job.model, accumulation_steps=job.promised_steps, may_be_early=not job.clipping, ways=job.ways
        )
        self.simulated: Simulated = {} if simulated is None else simulated
        self._work = LaneWork(job, self.choice.alike, self.num_played)
        # Cached per object: functools.cache on the methods would keep every search alive.
        self.plan = functools.cache(self.choice.plan)
        """Candidate -> its plan, without activations that leave."""
        firsts: dict[tuple[_Key, ActivationPolicy | None], Candidate] = {}
        self.same = functools.cache(lambda c: firsts.setdefault((_key(self.plan(c)), c.saves), c))
        """Candidate -> the first candidate that was seen with the same plan."""
        self.busiest = functools.cache(lambda c: self._work.busiest_s(job.as_run(self.plan(c), c.saves)))
        """Candidate -> seconds of its busiest lane, and of all lanes: see ``LaneWork``."""
        self.fits = functools.cache(lambda c: not self.missing(c))
        """Candidate -> whether it keeps to the limits."""
        self.seconds = functools.cache(lambda c: self.cost_s(self.plan(c), c.saves, in_full=False))
        """Candidate -> ``cost_s`` of its plan, as plans are compared: not all micro-batches are played."""
        self.room = functools.cache(lambda away: job.room(away))

    @functools.cached_property
    def today(self) -> Plan:
        """The plan of the rule (``homes.placement``), beside the first way with activations."""
        job = self.job
        return place(
            job.model,
            job.limits,
            accumulation_steps=job.promised_steps,
            activations=job.activations(job.ways[0]),
        )

    @property
    def num_played(self) -> int:
        """Micro-batches of a step that are played to compare plans. The rest are taken to be like these."""
        return min(self.job.micro_batches, _PLAYED)

    def missing(self, candidate: Candidate) -> dict[Tier, int]:
        """Return the bytes that a candidate takes above the limits, by tier."""
        taken, room = self.choice.tier_bytes(candidate), self.room(candidate.saves)
        return {tier: taken[tier] - most for tier, most in room.items() if taken[tier] > most}

    def simulation(self, plan: Plan, away: ActivationPolicy | None, *, in_full: bool = True) -> Simulation:
        """Simulate a plan until steps have settled: the first steps of one that uses the disk may differ greatly.

        Args:
            plan: A plan without activations that leave.
            away: What becomes of its activations.
            in_full: Play all micro-batches; else ``num_played`` of them. The rest are taken to be like these.
        """
        run, num_played = self.job.as_run(plan, away), self.job.micro_batches if in_full else self.num_played
        key = _key(run, num_played)
        if key not in self.simulated:
            again = self._again(run, num_played)
            self.simulated[key] = simulation_of(again, repeats=self.job.micro_batches - num_played)
        return self.simulated[key]

    def _again(self, run: Plan, num_played: int) -> Callable[[], PlayedSteps]:
        job, warm_up = self.job, steps_until_settled(run)
        if run.accumulation_steps is not None:
            run = replace(run, accumulation_steps=num_played)
        circumstances = Circumstances(clips=job.clipping)
        given = (job.model, run, job.rates, usual_visits(job.model, num_played), circumstances)
        return functools.partial(play_steps, *given, warm_up=warm_up, says_where=False)

    def cost_s(self, plan: Plan, away: ActivationPolicy | None, *, in_full: bool = True) -> float:
        """Return what a search minimizes: simulated seconds of a step, and a little for what the drive writes.

        Args: as for ``simulation``.
        """
        found = self.simulation(plan, away, in_full=in_full)
        return found.step_s + _WEAR * found.written_s


def _key(run: Plan, num_played: int = 0) -> _Key:  # without a number: for equal plans
    order = run.updated_first, run.kept_updated_first
    return run.units, run.pools, run.prefetch_depth, *order, run.plain, num_played
