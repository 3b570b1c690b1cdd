"""Orders in which ``step()`` updates units.

[Note: orders] An update waits for its gradients, and the next forward waits for its weights. In between it takes its
turn on the processor, the device or the drive, beside all other updates. Orders that follow a rule come near the best
one for most plans. For the rest, updates are moved about at random, with fixed seeds, as long as a simulated step gets
shorter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.job import Job
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.runners_up import SMALLEST_GAIN
from outcore.spec.model import ModelSpec

_TRIED, _SIMULATED_UNITS = 120, 750
"""The most orders that are tried, and the most units in all simulated steps together."""

T = TypeVar("T")


def reordered(best: Candidate, looks: Evaluations, job: Job) -> Candidate:
    """Try other orders of a candidate's updates: see [Note: orders]. Returns the candidate in the fastest one."""

    def seconds(others: list[Candidate]) -> list[float]:
        looks.simulate((looks.plan(other), other.saves) for other in others)
        return [looks.seconds(other) for other in others]

    best = min([best, *looks.choice.turned(best)], key=looks.seconds)
    if looks.coarse_s(best) >= looks.seconds(best) * (1 - SMALLEST_GAIN):
        return best
    most = num_tried(job.model, looks.num_played)
    return climb(best, looks.seconds(best), looks.choice.moved, seconds, most, looks.simulated.at_once)


def num_tried(model: ModelSpec, micro_batches: int) -> int:
    """Return how many orders are tried: fewer, the longer a simulation takes."""
    return min(_TRIED, _SIMULATED_UNITS // (len(model.units) * micro_batches * model.micro_batches_in_unit))


def climb(
    now: T,
    now_s: float,
    change: Callable[[T, random.Random], T],
    seconds: Callable[[list[T]], Sequence[float]],
    most: int,
    at_once: int = 1,
) -> T:
    """Change something at random; keep each change that takes fewer seconds.

    Args:
        now: What to begin with.
        now_s: Its seconds.
        change: Makes a change.
        seconds: Returns the seconds of several.
        most: How many changes are tried.
        at_once: How many changes ``seconds`` gets at once. It makes no difference to what is found.
    """
    tried = 0
    while tried < most:
        others = [change(now, random.Random(number)) for number in range(tried, min(tried + at_once, most))]
        for other, other_s in zip(others, seconds(others), strict=True):
            tried += 1
            if other_s < now_s * (1 - SMALLEST_GAIN):
                now, now_s = other, other_s
                break
    return now
