"""Whether more memory makes the predicted step longer: known models on known machines, and small random ones.

    python -m planning.more_memory          (in the folder research)

For each job one tier grows in steps. A training step may take at most 1% longer than any with less memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterator, Sequence

from outcore.command.plan.answer import answer_for, machine_for
from outcore.command.plan.known_models import known_models
from outcore.core.errors import PlanInfeasibleError
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import search
from outcore.spec.plan import POLICIES

from .fixed_policies import Asked, settings
from .near_best import random_job

FACTORS = (1.0, 1.03, 1.1, 1.3, 2.0)
TIERS = ("device_bytes", "host_bytes", "disk_bytes")
WAYS = (
    None,
    ActivationPolicy("device", "select"),
    *(ActivationPolicy("host", p) for p in POLICIES),
    *(ActivationPolicy("disk", p) for p in POLICIES),
)


def losses(job: PlanQuestion) -> Iterator[tuple[str, Sequence[float | None]]]:
    """Tier -> seconds of a step as that tier grows; None: it does not fit."""
    first = _step_s(job)
    for tier in TIERS:
        now = getattr(job.limits, tier)
        if now:
            larger = (dataclasses.replace(job.limits, **{tier: int(factor * now)}) for factor in FACTORS[1:])
            yield tier, [first, *(_step_s(dataclasses.replace(job, limits=limits)) for limits in larger)]


def _step_s(job: PlanQuestion) -> float | None:
    try:
        return search(job).simulation.step_s
    except PlanInfeasibleError:
        return None


def worst(seconds: Sequence[float | None]) -> float:
    """The largest ratio of a step to the shortest step with less memory."""
    least, found = float("inf"), 1.0
    for step_s in seconds:
        if step_s is not None:
            found, least = max(found, step_s / least), min(least, step_s)
        elif least < float("inf"):
            return float("inf")
    return found


def known_jobs(count: int) -> Iterator[tuple[str, PlanQuestion]]:
    """The settings of ``fixed_policies``."""
    for asked in list(settings())[:count]:
        yield f"{asked.model} on {asked.hardware}, {asked.device_memory} and {asked.host_memory}", job_of(asked)


def job_of(asked: Asked) -> PlanQuestion:
    """The job of a setting, with all ways to treat activations."""
    source = next(each.source for each in known_models() if each.name == asked.model)
    question = asked.question()
    return dataclasses.replace(answer_for(question, source, machine_for(question)).setting, ways=WAYS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--known", type=int, default=8, help="settings of fixed_policies")
    parser.add_argument("--random", type=int, default=40, help="small random models")
    given = parser.parse_args()
    ratios: list[float] = []
    for i in range(given.random):
        for tier, seconds in losses(random_job(random.Random(10_000 + i))):
            ratios.append(worst(seconds))
            print(f"- small {10_000 + i}; {_row(tier, seconds)}", flush=True)
    print(f"small: {_said(ratios)}", flush=True)
    whole: list[float] = []
    for name, job in known_jobs(given.known):
        for tier, seconds in losses(job):
            whole.append(worst(seconds))
            print(f"- {name}; {_row(tier, seconds)}", flush=True)
    print(f"known: {_said(whole)}")


def _row(tier: str, seconds: Sequence[float | None]) -> str:
    steps = ", ".join("-" if s is None else f"{s:.4g}" for s in seconds)
    return f"more {tier.removesuffix('_bytes')}: {steps} s; {worst(seconds):.4f}"


def _said(ratios: Sequence[float]) -> str:
    most, longer = max(ratios, default=1.0), sum(ratio > 1.01 for ratio in ratios)
    return f"{len(ratios)} rows, {longer} with a step more than 1% longer, at most {most:.4f}"


if __name__ == "__main__":
    main()
