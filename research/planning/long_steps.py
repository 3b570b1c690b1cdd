"""Steps of several micro-batches: plans are compared by a few of them. How near that is, and which plans it finds.

All treatments of activations are allowed, as for ``outcore plan``.

    python -m planning.long_steps near          (in the folder research)
    python -m planning.long_steps found

``near`` draws plans of three models and prints seconds of a step that was extended over those of one that was played
in full. ``found`` prints the plans that a search finds for 4, 8 and 16 micro-batches; run it at two commits.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from outcore.command.plan.answer import answer_for, machine_for
from outcore.command.plan.known_models import known_models
from outcore.planner.homes.activation_policies import ActivationPolicy, ways_to
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import search
from outcore.planner.search.start_plans import StartPlans

from .fixed_policies import EXPERTS, HUGE, LARGE, MIDDLE, SERVER, SMALL, Asked

SETTINGS = {
    "8B": (MIDDLE, "rtx-4090", "21GiB", "120GiB", 2),
    "1B": (SMALL, "rtx-4090", "8GiB", "16GiB", 1),
    "experts": (EXPERTS, "rtx-4090", "21GiB", "300GiB", 2),
    "32B": (LARGE, "a100-80gb", "43GiB", "400GiB", 2),
    "70B": (HUGE, "a100-80gb", "72GiB", "400GiB", 2),
}
DRAWN = ("8B", "1B", "experts")


def settings(names: Iterable[str], micro_batches: Iterable[int]) -> Iterator[tuple[list[object], PlanQuestion]]:
    """Yield the first cells of a row, and its setting."""
    for name, clipping in itertools.product(names, (True, False)):
        model, machine, device, host, rows = SETTINGS[name]
        question = Asked(model, machine + SERVER, device, host, rows, clipping=clipping).question()
        source = next(each.source for each in known_models() if each.name == model)
        one = answer_for(question, source, machine_for(question)).setting
        footprint = one.footprint
        assert footprint is not None
        ways = [way for tier in ("host", "disk") for way in ways_to(tier, footprint)]
        one = replace(one, ways=(None, ActivationPolicy("device", "select"), *ways))
        for number in micro_batches:
            yield [name, "yes" if clipping else "no", number], replace(one, micro_batches=number)


def candidates(
    looks: Evaluations, fillings: StartPlans, ways: Sequence[ActivationPolicy | None]
) -> Iterator[Candidate]:
    """Some fillings, and random candidates."""
    filled = [each for way in ways[:6] for each in list(fillings.of(way))[:40:6]]
    yield from filter(looks.fits, filled[:6])
    several = (fillings.drawn(filled[0], random.Random(number)) for number in range(16))
    for seed, drawn in enumerate(filter(None, several)):
        candidate = replace(drawn, saves=random.Random(seed).choice(ways))
        if looks.fits(candidate):
            yield candidate


def show(cells: Iterable[object]) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def near() -> None:
    """Print how near extended steps are to those that are played in full."""
    show(["model", "clips", "micro-batches", "plans", "least", "most", "within 0.1%"])
    show(["---"] * 7)
    for cells, job in settings(DRAWN, (6, 9)):
        looks = Evaluations(job)
        plans = list(candidates(looks, StartPlans(job, looks), job.ways))
        ratios = [looks.seconds(c) / looks.cost_s(looks.plan(c), c.saves) for c in plans]
        exact = sum(abs(ratio - 1) <= 1e-3 for ratio in ratios)
        show([*cells, len(ratios), f"{min(ratios):.4f}", f"{max(ratios):.4f}", exact])


def found() -> None:
    """Print what a search finds."""
    show(["model", "clips", "micro-batches", "step", "simulated", "seconds of the search"])
    show(["---"] * 6)
    for cells, setting in settings(SETTINGS, (4, 8, 16)):
        start_s = time.process_time()
        plan = search(setting)
        took_s = time.process_time() - start_s
        show([*cells, f"{plan.simulation.step_s:.4g} s", plan.num_simulated, f"{took_s:.1f}"])


if __name__ == "__main__":
    {"near": near, "found": found}[sys.argv[1]]()
