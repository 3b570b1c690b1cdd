"""How much of what a plan reserves is in use, at every moment of a step.

Homes and slots are reserved for the whole run. A slot is in use from the moment at which something begins to be written
there until its last reader is done. Activations and workspace are what a step on shapes has alive, visit by visit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import PlayedSteps, play_steps
from outcore.spec.budget import reservations
from outcore.spec.lane_names import Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import TIERS, Plan, Pool, Tier
from outcore.spec.schedule import Operation, Visit

_BEGINS = {
    "fetch",
    "read weights of",
    "read old weights of",
    "read states of",
    "read gradients of",
    "stage",
    "bring activations of",
}
"""Operations that fill a slot anew, even for the unit that had it before."""
_Interval = tuple[float, float]


@dataclass(frozen=True)
class TierLoad:
    """Part of a tier's memory, and how much of it is in use when."""

    tier: Tier
    label: str
    """``homes``, ``activations``, or ``slots for`` a kind."""
    reserved_bytes: int
    moments: tuple[tuple[float, int], ...]
    """(seconds since the window began, bytes in use from then on), in order."""

    @property
    def peak_bytes(self) -> int:
        """The most that is in use at once."""
        return max((nbytes for _, nbytes in self.moments), default=0)


def peak_of(loads: Iterable[TierLoad]) -> int:
    """Return the most that several loads have in use at once."""
    changes: defaultdict[float, int] = defaultdict(int)
    for load in loads:
        before = 0
        for moment_s, nbytes in load.moments:
            changes[moment_s] += nbytes - before
            before = nbytes
    return max(itertools.accumulate(changes[moment_s] for moment_s in sorted(changes)), default=0)


def occupancy(
    model: ModelSpec,
    plan: Plan,
    rates: Rates,
    visits: Sequence[Visit],
    circumstances: Circumstances | None = None,
    *,
    alive: Mapping[tuple[str, bool], int],
    warm_up: int = 2,
) -> tuple[TierLoad, ...]:
    """Play steps and say what is in use when, over the window of ``simulate``'s timeline.

    Args:
        model: Units in the plan's order.
        plan: A plan that was checked against the model.
        rates: Rates of the machine, with this model.
        visits: Visits of each step.
        circumstances: Circumstances of the run; None for the default.
        alive: (unit, whether it is visited by backward) -> device bytes beside the plan's own, until the next visit.
        warm_up: Steps played before those that count.
    """
    steps = play_steps(model, plan, rates, visits, circumstances, warm_up=warm_up)
    window = (steps.start_s, steps.end_s)
    loads = [*_homes(model, plan), *_slots(plan, steps, window)]
    saved = _load("device", "activations", plan.workspace_bytes, _activations(steps, alive), window)
    return tuple(sorted([*loads, saved], key=lambda load: TIERS.index(load.tier)))


def _homes(model: ModelSpec, plan: Plan) -> Iterator[TierLoad]:
    for tier in TIERS:
        nbytes = sum(
            r.nbytes for r in reservations(model, plan) if r.tier == tier and r.kind not in ("slot", "workspace")
        )
        if nbytes:
            yield TierLoad(tier, "homes", nbytes, ((0.0, nbytes),))


def _slots(plan: Plan, steps: PlayedSteps, window: _Interval) -> Iterator[TierLoad]:
    used = _tenancies(steps)
    pools: dict[tuple[Tier, str], list[Pool]] = defaultdict(list)
    for pool in plan.pools:
        pools[pool.tier, pool.kind].append(pool)
    for (tier, kind), mine in pools.items():
        intervals: list[tuple[_Interval, int]] = []
        for nbytes in {pool.slot_bytes for pool in mine}:
            end = f" of {nbytes} bytes on {tier}"
            names = [name for name in used if name.startswith(f"{kind} slot ") and name.endswith(end)]
            intervals += [(interval, nbytes) for name in names for interval in used[name]]
        if kind == "temporary":  # no operation names it: what an update makes is there while it runs
            intervals = [(interval, max(pool.slot_bytes for pool in mine)) for interval in _updates(steps, tier)]
        yield _load(tier, f"slots for {kind}", sum(pool.total_bytes for pool in mine), intervals, window)


def _tenancies(steps: PlayedSteps) -> Mapping[str, list[_Interval]]:
    """Return slot -> intervals in which it is in use."""
    found: defaultdict[str, list[_Interval]] = defaultdict(list)
    tenant: dict[str, str] = {}
    for op, place in zip(steps.operations, steps.laid.places, strict=True):
        start_s, end_s = steps.played.start[place], steps.played.end[place]
        written = {access.where for access in op.writes}
        for where in {*written, *(access.where for access in op.reads)}:
            if where in written and (op.kind in _BEGINS or tenant.get(where) != op.unit):
                found[where].append((start_s, end_s))
                tenant[where] = op.unit
            elif found[where]:
                begun_s, until_s = found[where][-1]
                found[where][-1] = (begun_s, max(until_s, end_s))
    return found


def _updates(steps: PlayedSteps, tier: Tier) -> Iterator[_Interval]:
    """Yield when updates run on the host or the device."""
    for op, place in zip(steps.operations, steps.laid.places, strict=True):
        if op.kind in ("update", "update early") and (op.lane == Lane.UPDATE.value) == (tier == "host"):
            yield steps.played.start[place], steps.played.end[place]


def _activations(steps: PlayedSteps, alive: Mapping[tuple[str, bool], int]) -> Iterator[tuple[_Interval, int]]:
    """Yield bytes from one visit to the next. A visit missing in ``alive``, as the root's, keeps those before it."""
    visits, nbytes = [*_visits(steps)], 0
    begun = [start_s for _, start_s in visits]
    for (op, start_s), next_s in zip(visits, [*begun[1:], steps.end_s], strict=True):
        nbytes = alive.get((op.unit, op.kind == "backward"), nbytes)
        yield (start_s, next_s), nbytes


def _visits(steps: PlayedSteps) -> Iterator[tuple[Operation, float]]:
    for op, place in zip(steps.operations, steps.laid.places, strict=True):
        if op.kind in ("forward", "backward"):
            yield op, steps.played.start[place]


def _load(
    tier: Tier, label: str, reserved: int, intervals: Iterable[tuple[_Interval, int]], window: _Interval
) -> TierLoad:
    """Add intervals up to one line of moments."""
    start_s, end_s = window
    changes: defaultdict[float, int] = defaultdict(int)
    changes[start_s] = 0
    for (since_s, until_s), nbytes in intervals:
        if since_s < end_s and until_s > start_s:
            changes[max(since_s, start_s)] += nbytes
            changes[min(until_s, end_s)] -= nbytes
    times = [moment for moment in sorted(changes) if moment < end_s]
    sums = itertools.accumulate(changes[moment] for moment in times)
    return TierLoad(tier, label, reserved, tuple((t - start_s, n) for t, n in zip(times, sums, strict=True)))
