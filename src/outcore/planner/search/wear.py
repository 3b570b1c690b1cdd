"""Of plans that are about equally fast, the one that writes least to the drive.

[Note: wear] Writing wears the drive. So of all plans that take at most ``WORTH`` longer than the fastest one, the plan
that writes least is taken, and of those that write about as much, the fastest. Times are always compared with the
fastest plan, so that small losses do not add up. Where a plan that was found writes, plans with more states in host
memory and plans without the disk are tried as well: as they are no faster, a search for speed alone may miss them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from outcore.core.errors import PlanInfeasibleError
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import ALL_HOST, Candidate
from outcore.planner.timing.simulate import Simulation
from outcore.spec.plan import Plan

WORTH = 0.01
"""Predictions are off by some percent. Least gain in time that counts, as a fraction of a step."""
_AS_MUCH = 1.01
"""Plans write about as much if one writes no more than this times as much as the other."""

_MOST_SPARING = 3
"""The most plans that write less and are simulated in full."""

Named = tuple[Plan, Candidate]
"""A plan without activations that leave, and the candidate most like it."""


def takes_more(one: Simulation, other: Simulation) -> bool:
    """Return whether one plan writes more than another that is about as fast."""
    return one.written_s > _AS_MUCH * other.written_s


def least_worn(plans: Sequence[Named], looks: Evaluations) -> tuple[Named, float]:
    """Return the plan to take, and the seconds of a step of the fastest one. See [Note: wear]."""
    found = [(looks.simulation(plan, candidate.saves), (plan, candidate)) for plan, candidate in plans]
    fastest_s = min(simulation.step_s for simulation, _ in found)
    near = [each for each in found if each[0].step_s <= (1 + WORTH) * fastest_s]
    least = min((simulation for simulation, _ in near), key=lambda simulation: simulation.written_s)
    spared = [named for simulation, named in near if not takes_more(simulation, least)]
    return min(spared, key=lambda named: looks.cost_s(named[0], named[1].saves)), fastest_s


def sparing(
    plans: Sequence[Named], compared: Iterable[Candidate], looks: Evaluations, search: Callable[[PlanQuestion], Named]
) -> list[Named]:
    """Return plans that write less than the best one and are about as fast: see [Note: wear].

    Args:
        plans: What a search found.
        compared: Candidates that it has simulated.
        looks: What is known of them.
        search: Finds a plan for another job.
    """
    plan, candidate = min(plans, key=lambda named: looks.cost_s(named[0], named[1].saves))
    best = looks.simulation(plan, candidate.saves, in_full=False)
    if not best.written_s:
        return []
    nearer = [looks.same(other) for other in _off_the_disk(candidate, looks)]
    others = dict.fromkeys([*compared, *nearer])
    known = [(looks.simulation(looks.plan(other), other.saves, in_full=False), other) for other in others]
    near = [each for each in known if each[0].step_s <= (1 + WORTH) * best.step_s and takes_more(best, each[0])]
    near.sort(key=lambda each: (each[0].written_s, each[0].step_s))
    found = [(looks.plan(other), other) for _, other in near[:_MOST_SPARING]]
    job = _without_disk(looks.job) if not near or near[0][0].written_s else None
    if job is not None:
        with suppress(PlanInfeasibleError):
            found.append(search(job))
    return found


def _off_the_disk(candidate: Candidate, looks: Evaluations) -> Iterator[Candidate]:
    """Yield the candidate with as many of its units as fit in host memory, not on disk; also with their weights there.

    Args:
        candidate: One with states on disk.
        looks: What is known of the job's candidates.
    """
    kinds = candidate.kinds
    away = [i for i, kind in enumerate(kinds) if kind.states == "disk"]
    for far, ordered in ((False, away), (False, away[::-1]), (True, away)):

        def moved(number: int, far: bool = far, ordered: Sequence[int] = ordered) -> Candidate:  # noqa: FBT001
            nearer = set(ordered[:number])
            home = [ALL_HOST if far or k.gradients == "disk" else k._replace(states="host") for k in kinds]
            return replace(candidate, kinds=tuple(home[i] if i in nearer else k for i, k in enumerate(kinds)))

        number = len(ordered)
        while number and not looks.fits(moved(number)):
            number -= 1
        if number:
            yield moved(number)


def _without_disk(job: PlanQuestion) -> PlanQuestion | None:
    """Return the job without a disk; None if it has none, or all its ways with activations need one."""
    ways = tuple(way for way in job.ways if way is None or way.tier != "disk")
    limits = replace(job.limits, disk_bytes=None)
    return replace(job, limits=limits, ways=ways) if job.limits.disk_bytes and ways else None
