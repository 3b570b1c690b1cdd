"""The bound of a step: what no legal order of a plan's operations beats. See docs/internals/overlap.md.

[Note: nodes and edges] Compute goes through its visits in a given order. The starts of visits are the nodes of a graph,
which repeats with every step, without end. An edge from x to y says how many seconds lie between these two moments at
least, whatever the order. It comes from work that cannot begin before x and must be over at y. The work is added up per
link, since a link does one second of work per second. A unit's update, for instance, begins after the last backward,
and is over, with the fetch behind it, before the unit's next forward. A path is as long as its edges together. Steps
repeat, so no step is shorter than a cycle of the graph, divided by the steps that it spans. The bound is the longest
such quotient, or the link with the most work per step if that is longer.

[Note: slack] Slots let some work happen earlier or later than its nodes say: weights may be fetched and states read
before they are due, as many as slots hold. That many of the largest pieces are left out of the sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import LINKS, Rates
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Visit
from planning.bound.jobs import LinkJob, LinkWork, Sweep
from planning.bound.step_work import totals_of, work_of

_PERIODS = 8
MAX_NODES = 160
_Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class StepBound:
    """The least seconds of a step."""

    seconds: float
    parts: Mapping[str, float]
    """The parts of ``seconds``: link, or slots of which there are too few -> seconds of work, or of waiting for it."""
    total_s: Mapping[str, float]
    """Link -> seconds of work in a step."""

    @property
    def binding(self) -> str:
        """The largest of ``parts``."""
        return max(self.parts, key=self.parts.__getitem__, default="compute")


def bound_of(
    model: ModelSpec,
    plan: Plan,
    rates: Rates,
    visits: Sequence[Visit],
    circumstances: Circumstances | None = None,
    *,
    max_nodes: int = MAX_NODES,
) -> StepBound:
    """Work out the bound of a step among equal ones.

    Args:
        model: Units in the plan's order.
        plan: Where they live, and how many slots they share.
        rates: Rates of the machine, with this model.
        visits: Visits of a step.
        circumstances: Circumstances of the run; None for the default.
        max_nodes: With more visits than this, work is placed less finely, and the bound may be lower.

    Cost: 100 units some 80 ms; with 48 nodes 20 ms.
    """
    work = work_of(model, plan, rates, visits, circumstances or Circumstances())
    total_s = {**work.total_s, **{s.name: s.least_s(work.total_s) for s in rates.shared}}
    busiest = max(total_s, key=total_s.__getitem__)
    found = _Graph(work, rates, max_nodes).longest_cycle()
    if found is None or found[0] <= total_s[busiest]:
        return StepBound(total_s[busiest], {busiest: total_s[busiest]}, total_s)
    return StepBound(*found, total_s)


def busiest_s(
    model: ModelSpec, plan: Plan, rates: Rates, visits: Sequence[Visit], circumstances: Circumstances
) -> tuple[float, float]:
    """Return a quick lower bound (seconds of what has most to do), and the seconds of all links, which break ties.

    Both are rounded, since equal sums may be added up in another order.

    Args: As in ``bound_of``.
    """
    total_s = totals_of(model, plan, rates, visits, circumstances)
    most_s = max([*total_s.values(), *(s.least_s(total_s) for s in rates.shared)])
    return float(f"{most_s:.11g}"), float(f"{sum(total_s.values()):.11g}")


class _Places(NamedTuple):
    """Jobs of three steps, each with the nodes between which it lies."""

    row: Any
    column: Any
    seconds: _Matrix
    begins_s: _Matrix
    left_s: _Matrix
    shift: Any


class _Graph:
    """The graph of the bound. Its nodes are at most ``max_nodes`` of the visits; work is placed no finer than that."""

    def __init__(self, work: LinkWork, rates: Rates, max_nodes: int) -> None:
        self._work, self._rates = work, rates
        period = len(work.compute_s)
        step = -(-period // max_nodes)
        self._positions = np.arange(0, period, step)
        self._n = n = len(self._positions)
        shifts = np.repeat(np.arange(3), n) * period
        self._unrolled = np.tile(self._positions, 3) + shifts
        sums = np.concatenate([[0.0], np.cumsum(np.tile(work.compute_s, 4))])
        self._sums = sums
        self._at = sums[self._unrolled]
        """Seconds of compute before each node."""
        self._jobs: defaultdict[str, list[LinkJob]] = defaultdict(list)
        """Jobs by link."""
        for job in work.jobs:
            self._jobs[job.link].append(job)

    def longest_cycle(self) -> tuple[float, dict[str, float]] | None:
        """Return seconds per step of the longest cycle, and its parts; None if no cycle was found."""
        names, edges = self._edges()
        longest, which = edges.max(axis=0), edges.argmax(axis=0)
        n = self._n
        # Row and column of the edge from y - d to y, for every y of a period and every d.
        back, nodes = np.arange(1, 2 * n + 1), np.arange(n)[:, None]
        rows = (nodes - back) % n
        columns = rows + back
        weights = longest[rows, columns]
        labels = which[rows, columns]
        reached = np.full((_PERIODS + 2) * n + 1, -np.inf)
        origin = 2 * n  # so that all edges lead back to somewhere
        reached[origin] = 0.0
        came = np.zeros(len(reached), dtype=int)
        for y in range(origin + 1, len(reached)):
            paths = reached[y - 2 * n : y][::-1] + weights[y % n]
            came[y] = paths.argmax()
            reached[y] = paths[came[y]]
        return self._best(reached, came + 1, labels, names)

    def _best(
        self, reached: _Matrix, came: Any, labels: Any, names: Sequence[str]
    ) -> tuple[float, dict[str, float]] | None:
        """Walk back along the longest path. Where it meets a node twice, a cycle lies between; return the longest."""
        n, path = self._n, [len(reached) - 1]
        while path[-1] > 2 * n:
            path.append(path[-1] - int(came[path[-1]]))
        best: tuple[float, int, int] | None = None
        for i, later in enumerate(path):
            for j in range(i + 1, len(path)):
                earlier = path[j]
                if (later - earlier) % n == 0:
                    mean_s = float(reached[later] - reached[earlier]) * n / (later - earlier)
                    best = max(best, (mean_s, i, j)) if best else (mean_s, i, j)
                    break
        if best is None:
            return None
        seconds, i, j = best
        parts: defaultdict[str, float] = defaultdict(float)
        for later, earlier in zip(path[i:j], path[i + 1 : j + 1], strict=True):
            name = names[int(labels[later % n, later - earlier - 1])]
            parts[name] += float(reached[later] - reached[earlier]) * n / (path[i] - path[j])
        return seconds, dict(sorted(parts.items(), key=lambda item: -item[1]))

    def _edges(self) -> tuple[list[str], _Matrix]:
        """Return for every resource the seconds from a node of the first period (rows) to a later one (columns)."""
        sums: dict[str, _Matrix] = {}
        found: dict[str, _Matrix] = {}
        base = np.maximum(self._at[None, :] - self._at[: self._n, None], 0.0)
        of_sweeps = {sweep.link for sweep in self._work.sweeps}
        for name in sorted(self._jobs.keys() | of_sweeps, key=lambda name: (name not in LINKS, name)):
            others = (False, True) if any([job.instead_of for job in self._jobs.get(name, ())]) else (False,)
            swept = (False, True) if name in of_sweeps else (False,)
            views = [self._view(name, by_others=o, is_swept=s) for o, s in itertools.product(others, swept)]
            sums[name] = np.max([view[0] for view in views], axis=0)
            found[name] = np.max([view[1] for view in views], axis=0)
        sums["compute"] = found["compute"] = sums.get("compute", 0.0) + base
        for shared in self._rates.shared:
            if sums.keys() & shared.parts.keys():
                found[shared.name] = shared.least_s(sums)
        found["chain"] = self._chains()
        names = list(found)
        return names, np.stack([found[name] for name in names])

    def _view(self, link: str, *, by_others: bool, is_swept: bool) -> tuple[_Matrix, _Matrix]:
        """Return seconds of a link's work between nodes, alone and with what must come before and after it.

        Args:
            link: A link, or the name of slots.
            by_others: Whether to count jobs that stand in for others, in place of those.
            is_swept: Whether updated weights count like any others, which slots may hold; else they are jobs of their
                own.
        """
        sweeps = [sweep for sweep in self._work.sweeps if sweep.link == link]
        jobs = self._jobs.get(link, [])
        replaced = {job.instead_of for job in jobs if job.instead_of} if by_others else set()
        jobs = [job for job in jobs if bool(job.instead_of) <= by_others and job.held_by not in replaced]
        if not is_swept:
            jobs += [job for sweep in sweeps for job in sweep.firsts if job is not None]
        shares = [self._swept(sweep, is_swept=is_swept) for sweep in sweeps]
        for slots in sorted({job.held_by for job in jobs}):
            places = self._places([job for job in jobs if job.held_by == slots])
            some = self._held_sums(places, self._work.slack_s[link, slots]) if slots else self._sums_of(places)
            shares.append((some, *self._ends(places)))
        nothing = np.zeros((self._n, len(self._unrolled)))
        return sum((share[0] for share in shares), nothing), _longest(shares, nothing)

    def _held_sums(self, places: _Places, slack_s: float) -> _Matrix:
        """Return seconds of work between two nodes, less what slots may hold, ``slack_s`` in every step."""
        shifts = [self._sums_of(places, places.shift == shift) for shift in range(3)]
        return np.sum([np.maximum(some - slack_s, 0.0) for some in shifts], axis=0)

    def _sums_of(self, places: _Places, chosen: Any = slice(None)) -> _Matrix:
        """Return seconds of the chosen jobs that lie between two nodes."""
        size, n = len(self._unrolled), self._n
        found = np.zeros((size, size))
        np.add.at(found, (places.row[chosen], places.column[chosen]), places.seconds[chosen])
        return found[::-1].cumsum(axis=0)[::-1][:n].cumsum(axis=1)

    def _ends(self, places: _Places) -> tuple[_Matrix, _Matrix]:
        """Return the least before any job between two nodes can begin, and the least after any of them."""
        size, n = len(self._unrolled), self._n
        heads, tails = np.full((size, size), np.inf), np.full((size, size), np.inf)
        np.minimum.at(heads, (places.row, places.column), places.begins_s)
        np.minimum.at(tails, (places.row, places.column), places.left_s)
        heads, tails = (
            np.minimum.accumulate(np.minimum.accumulate(found[::-1], axis=0)[::-1][:n], axis=1)
            for found in (heads, tails)
        )
        return heads - self._at[:n, None], tails + self._at[None, :]

    def _places(self, jobs: Sequence[LinkJob]) -> _Places:
        """Return where the jobs of three steps lie, without those that end outside of the nodes."""
        numbers = np.array([job[1:6] for job in jobs]).reshape(len(jobs), 5)
        seconds, after, head_s, before, tail_s = np.tile(numbers, (3, 1)).T
        shift = np.repeat(np.arange(3), len(jobs))
        first, last = (visits.astype(int) + shift * len(self._work.compute_s) for visits in (after, before))
        row = np.searchsorted(self._unrolled, first, side="right") - 1
        column = np.searchsorted(self._unrolled, last, side="left")
        inside = (column < len(self._unrolled)) & (last < len(self._sums))
        first, last = first[inside], last[inside]
        return _Places(
            row=row[inside],
            column=column[inside],
            seconds=seconds[inside],
            begins_s=head_s[inside] + self._sums[first],
            left_s=tail_s[inside] - self._sums[last],
            shift=shift[inside],
        )

    def _swept(self, sweep: Sweep, *, is_swept: bool) -> tuple[_Matrix, _Matrix, _Matrix]:
        """Return what a sweep's visits between nodes need beyond what slots hold, and the least before and after it."""
        period, n = len(self._work.compute_s), self._n
        seconds = [
            s if first is None or is_swept else 0.0 for s, first in zip(sweep.seconds, sweep.firsts, strict=True)
        ]
        sums = np.concatenate([[0.0], np.cumsum(np.tile(seconds, 3))])
        starts = [start + shift * period for shift in range(3) for start in self._work.starts]
        rows, columns = self._unrolled[:n, None], self._unrolled[None, :]
        found = np.zeros((n, len(self._unrolled)))
        held = [sweep.held_s(seconds, *window) for window in itertools.pairwise((*self._work.starts, period))]
        for start, stop, held_s in zip(starts, [*starts[1:], 3 * period], itertools.cycle(held)):
            low, high = np.maximum(rows, start), np.minimum(columns, stop - 1) + 1
            needed = sums[np.maximum(high, low)] - sums[low]
            found += np.maximum(needed - held_s[np.minimum(low, stop) - start, np.maximum(high, start) - start], 0.0)
        used = np.array([self._work.used_s[i] if seconds[i] else 0.0 for i in self._positions])
        return found, np.broadcast_to(used[:, None], found.shape), np.zeros_like(found)

    def _chains(self) -> _Matrix:
        """Return the seconds between nodes of single chains of operations."""
        found, size = np.zeros((self._n, len(self._unrolled))), len(self._unrolled)
        shifts = np.repeat(np.arange(-1, 2), len(self._work.chains)) * len(self._work.compute_s)
        after, before, seconds = np.tile(np.array(self._work.chains).reshape(-1, 3), (3, 1)).T
        first, last = (visits.astype(int) + shifts for visits in (after, before))
        inside = (first >= 0) & (last < len(self._sums))
        first, last, seconds = first[inside], last[inside], seconds[inside]
        row = np.searchsorted(self._unrolled, first, side="right") - 1
        column = np.searchsorted(self._unrolled, last, side="left")
        inside = (row < self._n) & (column < size)
        first, last, row, column = first[inside], last[inside], row[inside], column[inside]
        between_s = seconds[inside] + self._sums[first] - self._at[row] + self._at[column] - self._sums[last]
        np.maximum.at(found, (row, column), between_s)
        return found


def _longest(shares: Sequence[tuple[_Matrix, _Matrix, _Matrix]], nothing: _Matrix) -> _Matrix:
    """Return the longest work, with the least before and after any of it, of each share and of all up to each."""
    found = sums = nothing
    heads, tails = np.full_like(nothing, np.inf), np.full_like(nothing, np.inf)
    for some, first, last in shares:
        is_any = some > 0
        sums = sums + some
        heads, tails = (
            np.where(is_any, np.minimum(heads, first), heads),
            np.where(is_any, np.minimum(tails, last), tails),
        )
        found = np.maximum(found, np.where(is_any, some + first + last, 0.0))
        found = np.maximum(found, np.where(sums > 0, sums + heads + tails, 0.0))
    return found
