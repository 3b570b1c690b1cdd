"""Pieces of work of a step: which link does them, and between which visits each must lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outcore.planning.bound.times import Moment

_TOLD_APART = 40
"""Visits of a sweep at most, of which it is worked out what slots may hold when each of them begins."""


class Job(NamedTuple):
    """Work of a link. It begins ``head_s`` after the start of one visit, and is over ``tail_s`` before another's."""

    link: str
    """Or slots of which there are too few: what they are held for is their work."""
    seconds: float
    after: int
    head_s: float
    before: int
    """Counted on into the next step."""
    tail_s: float
    held_by: str = ""
    """Slots that may let it lie elsewhere: the work is counted without what ``Work.slack_s`` says of them."""
    instead_of: str = ""
    """Stands in for the work that these slots hold, counted otherwise."""


@dataclass(frozen=True)
class Sweep:
    """Weights that visits need, of units that use the same slots."""

    link: str
    seconds: Sequence[float]
    """By visit: of bringing the weights; 0 where they need not come."""
    firsts: Sequence[Job | None]
    """By visit: the unit has just been updated, so that they must come."""
    slots: int
    """That hold the weights of so many units when any visit begins; those of the visit are among them."""

    def held_s(self, seconds: Sequence[float], start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """At most, of the weights that visits need: what was brought before the first of these visits began.

        Args:
            seconds: By visit, of those that count.
            start: A sweep begins.
            stop: It is over.

        Returns:
            By the first visit and the one behind the last, counted from ``start``.
        """
        size, mine = stop - start, seconds[start:stop]
        if size > _TOLD_APART or len({s for s in mine if s}) <= 1:
            return np.full((size + 1, size + 1), most_of(mine, self.slots))
        held = np.zeros((size + 1, size + 1))
        for low in range(size):
            most, own, others = self.slots - bool(self.seconds[start + low]), mine[low], list[float]()
            for i in range(low, size):
                others = sorted([*others, mine[i]])[-most:] if i > low and most else others
                held[low, i + 1] = own + sum(others)
        return held


@dataclass
class Work:
    """All of a step."""

    used_s: list[float]
    """By visit: of forward or backward."""
    compute_s: list[float]
    """By visit: the same, and what compute does with gradients then."""
    jobs: list[Job] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Visits that begin a sweep: from one to the next no unit comes twice."""
    slack_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Link and slots -> seconds of their work that may lie elsewhere, in every step."""
    total_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    chains: list[tuple[int, int, float]] = field(default_factory=list)
    """From the start of one visit to that of another, at least so much."""
    count: int = 1
    """Equal units, for each of which ``total_s`` grows by what is added."""

    def add(self, link: str, seconds: float, begin: Moment, before: int, tail_s: float) -> None:
        """Add a job that takes place in every step."""
        self.jobs.append(Job(link, seconds, *begin, before, tail_s))
        self.total_s[link] += self.count * seconds


def most_of(seconds: Iterable[float], number: int) -> float:
    """What so many of these come to at most."""
    return sum(sorted(seconds)[-number:]) if number else 0.0
