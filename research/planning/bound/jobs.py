"""Pieces of a step's work: which link does each, and between which visits it must lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from planning.bound.times import VisitMoment

_TOLD_APART = 40
"""In sweeps of at most this many visits, what slots may hold is worked out for each visit; in longer ones for all."""


class LinkJob(NamedTuple):
    """Work of a link between two visits.

    It begins at least ``head_s`` after the start of one, and is over at least ``tail_s`` before the start of the other.
    """

    link: str
    """A link, or slots of which there are too few: the time that they are held is their work."""
    seconds: float
    after: int
    head_s: float
    before: int
    """The other visit, counted on into the next step."""
    tail_s: float
    held_by: str = ""
    """Slots that may let the work lie elsewhere: it is counted less what ``LinkWork.slack_s`` says of them."""
    instead_of: str = ""
    """Slots whose jobs this one stands in for: another way to count the same work."""


@dataclass(frozen=True)
class Sweep:
    """The weights that visits need, of units that use the same slots."""

    link: str
    seconds: Sequence[float]
    """By visit: seconds to bring its weights; 0 where they need not come."""
    firsts: Sequence[LinkJob | None]
    """By visit: the job that brings its weights, if its unit has just been updated, so that they must come."""
    slots: int
    """The most units whose weights slots hold when a visit begins, the visit's own among them."""

    def held_s(self, seconds: Sequence[float], start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return for each range of visits the most seconds of bringing their weights that may lie before it begins.

        Args:
            seconds: By visit: seconds to bring its weights, 0 where they do not count.
            start: The first visit of a sweep.
            stop: The visit behind its last.

        Returns:
            A matrix by the first visit and the one behind the last, both counted from ``start``.
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
class LinkWork:
    """All work of a step."""

    used_s: list[float]
    """By visit: seconds of forward or backward."""
    compute_s: list[float]
    """By visit: the same, with what compute then does with gradients."""
    jobs: list[LinkJob] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Visits that begin a sweep: see ``Course.starts``."""
    slack_s: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(link, slots) -> seconds of their work in every step that may lie elsewhere."""
    total_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    chains: list[tuple[int, int, float]] = field(default_factory=list)
    """(visit, later visit, the least seconds between their starts)."""
    count: int = 1
    """Number of equal units for which work is added: ``total_s`` grows by so many times the seconds."""

    def add(self, link: str, seconds: float, begin: VisitMoment, before: int, tail_s: float) -> None:
        """Add a job that takes place in every step."""
        self.jobs.append(LinkJob(link, seconds, *begin, before, tail_s))
        self.total_s[link] += self.count * seconds


def most_of(seconds: Iterable[float], number: int) -> float:
    """Return the sum of the largest ``number`` of these."""
    return sum(sorted(seconds)[-number:]) if number else 0.0
