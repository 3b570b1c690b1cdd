"""The plan that is fastest on a machine, as far as the simulator can tell: homes, slots, and who updates when.

[Note: how it is found] Fillings come first: the nearest kinds of homes for as many units as fit, farther ones for the
rest. Those with the lowest bounds are simulated, and the best of them is changed step by step while it gets faster. A
change whose bound is above the best time so far cannot be better, and is not simulated. The rule's plan and uniform
ones are simulated in any case: what is found is never slower than these. All counts are fixed, so the same inputs give
the same plan.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outcore.core.collecting import rarely_collecting
from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.planning.bound.bound import Bound, bound_of, busiest_s
from outcore.planning.homes.placement import Room, place
from outcore.planning.homes.sending import Sending
from outcore.planning.homes.share import balanced_share
from outcore.planning.paper.schedule import Circumstances, usual_visits
from outcore.planning.search.candidates import (
    ALL_DEVICE,
    ALL_DISK,
    ALL_HOST,
    KINDS,
    ROOMY,
    SMALL,
    TIGHT,
    Candidate,
    Choice,
    Kind,
)
from outcore.planning.timing.rates import Rates
from outcore.planning.timing.simulate import Simulation, simulate, steps_until_settled
from outcore.planning.units.footprint import Saved, as_run
from outcore.spec.budget import Limits
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Policy, Pool, Tier, UnitPlan

_SIMULATED_UNITS, _MOST_SIMULATED = 1500, 200
"""Units in all steps that are simulated; plans that are, at most."""
_BOUNDS = 4
"""For every plan that is simulated, so many bounds are worked out."""
_COARSE = 24
_FILLINGS = 40
"""That are told apart by their bounds."""
_ESTIMATED = 2
"""Plans that are simulated for an estimate, beside those that are known."""
_GAIN = 1e-4
"""Smaller ones are not worth another plan."""
_BINDS = 0.03
"""Other orders of updates are tried where gradients and updates each bind a larger part of a step."""
_BALANCED_BYTES = (16.0, 14.0)  # fp32 master, moments and gradient there; master, moments and a bf16 weight back


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen."""

    name: str
    step_s: float | None
    """None: it does not fit."""
    reason: str


@dataclass(frozen=True)
class Found:
    """A plan with what is predicted of it."""

    plan: Plan
    candidate: Candidate
    """The plan in few words; where the rule's plan won, what is most like it."""
    simulation: Simulation
    bound: Bound
    runners_up: tuple[RunnerUp, ...]
    num_simulated: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, within what, and how."""

    model: ModelSpec
    limits: Limits
    rates: Rates
    micro_batches: int = 1
    is_promised: bool = False
    """The number of micro-batches is: updates inside backward are allowed."""
    clipping: bool = True
    policy: Policy = "recompute"
    activation_reserve_bytes: int = 0
    activation_share: float = 0.0
    saved: Mapping[str, Saved] = field(default_factory=dict)
    """What a call of each unit saves, where that is known: what there is room for is kept."""
    sending: Sending | None = None
    """Which activations leave the device. The limits are without what they take."""


@rarely_collecting()
def search(job: Job) -> Found:
    """Find a plan.

    Raises:
        PlanInfeasibleError: Nothing fits.

    Cost: 100 units some 4 s.
    """
    return _Search(job).found()


def simulated(job: Job, plan: Plan) -> Simulation:
    """Steps of a plan. Args: job: What it was made for. plan: Without the activations that leave."""
    visits, circumstances = usual_visits(job.model, job.micro_batches), Circumstances(clips=job.clipping)
    run = _as_run(job, plan)
    return simulate(job.model, run, job.rates, visits, circumstances, warm_up=steps_until_settled(run))


def _as_run(job: Job, plan: Plan) -> Plan:
    """With the activations that leave, and those that there is room to keep."""
    left = job.limits.device_bytes - job.activation_reserve_bytes - plan.tier_bytes["device"]
    room = max(left, 0) // job.model.micro_batches_in_unit
    return as_run(plan if job.sending is None else job.sending.applied(plan), job.saved, room)


@rarely_collecting()
def explain(job: Job, plan: Plan, candidate: Candidate | None = None) -> Found:
    """What is predicted of a plan that was chosen, beside the simple ones.

    Args:
        job: What it was made for.
        plan: Without the activations that leave.
        candidate: The same in few words, if that is known.
    """
    search = _Search(job)
    return search.explain(plan, candidate or search.like(plan))


class Estimate(NamedTuple):
    """About the fastest step."""

    step_s: float
    candidate: Candidate


_Key = tuple[tuple[UnitPlan, ...], tuple[Pool, ...], int, int]
Simulated = dict[_Key, Simulation]
"""Simulations of plans, at the same rates."""


@rarely_collecting()
def estimate(job: Job, known: Iterable[Candidate], simulated: Simulated | None = None) -> Estimate | None:
    """About what ``search`` would find, sooner.

    Args:
        job: Much like one that was searched.
        known: What is good for jobs like it. The estimate is no slower than any of these that fits, or, where none
            fits, than the rule's plan.
        simulated: What was simulated before for jobs that differ in limits alone; grows.

    Returns:
        None: Nothing fits.

    Cost: 100 units some 0.5 s.
    """
    try:
        return _Search(job, simulated).estimate(known)
    except PlanInfeasibleError:
        return None


def _key(plan: Plan) -> _Key:
    return plan.units, plan.pools, plan.prefetch_depth, plan.last_updated_first


class _Search:
    """Candidates of one job, each looked at once."""

    def __init__(self, job: Job, simulated: Simulated | None = None) -> None:
        self._job = job
        steps = job.micro_batches if job.is_promised else None
        self._today = place(
            job.model,
            job.limits,
            accumulation_steps=steps,
            policy=job.policy,
            activation_reserve_bytes=job.activation_reserve_bytes,
            activation_share=job.activation_share,
        )
        self._may_be_early = job.is_promised and not job.clipping
        self._choice = Choice(
            job.model,
            policy=job.policy,
            accumulation_steps=steps,
            may_be_early=self._may_be_early,
        )
        self._visits = usual_visits(job.model, job.micro_batches)
        self._circumstances = Circumstances(clips=job.clipping)
        beside = Room(job.activation_reserve_bytes, job.activation_share).beside(job.limits.device_bytes)
        self._room: dict[Tier, int] = {
            "device": beside,
            "host": job.limits.host_bytes,
            "disk": job.limits.disk_bytes or 0,
        }
        units = len(job.model.units) * job.micro_batches
        self._budget = max(8, min(_SIMULATED_UNITS // units, _MOST_SIMULATED))
        self._share = round(balanced_share(job.rates, there=_BALANCED_BYTES[0], back=_BALANCED_BYTES[1]), 2)
        self._plans: dict[Candidate, Plan] = {}
        self._simulated: Simulated = {}
        self._final: Simulated = {} if simulated is None else simulated
        self._bounds: dict[Candidate, float] = {}
        self._sums: dict[Candidate, tuple[float, float]] = {}

    def found(self) -> Found:
        """The best of all."""
        everything = self._choice.uniform(ALL_DEVICE)
        if self._fits(everything):  # nothing is to be moved where nothing must be
            return self.explain(self._plan(everything), everything)
        fillings = sorted(set(self._fillings()), key=lambda c: (self._coarse(c), repr(c)))
        best = sorted(fillings[: self._budget // 4], key=self._seconds)
        changed = [self._descend(start, most) for start, most in zip(best, self._turns(), strict=False)]
        uniform = [candidate for candidate in self._uniform().values() if self._fits(candidate)]
        plans = [
            (self._plan(candidate), candidate) for candidate in sorted([*changed, *uniform], key=self._seconds)[:1]
        ]
        plans.append((self._today, self._choice.of(self._today)))
        return self.explain(*min(plans, key=lambda pair: self._settled(pair[0]).step_s))

    def like(self, plan: Plan) -> Candidate:
        """See ``Choice.of``."""
        return self._choice.of(plan)

    def explain(self, plan: Plan, candidate: Candidate) -> Found:
        """Args: candidate: The plan in few words."""
        bound, runners_up = self._bound(plan), tuple(self._runners_up(plan))
        return Found(plan, candidate, self._settled(plan), bound, runners_up, len(self._simulated))

    def estimate(self, known: Iterable[Candidate]) -> Estimate:
        """Of what is known, what is like it, and fillings: the best of a few."""
        everything = self._choice.uniform(ALL_DEVICE)
        if self._fits(everything):
            return Estimate(self._settled(self._plan(everything)).step_s, everything)
        known = list(known)
        fitting = [candidate for candidate in known if self._fits(candidate)]
        starts = [*known, *self._far()]
        starts += [replace(start, share=self._share) for start in starts]
        filled = {self._fill(start, near) for start in starts for near in KINDS[:4]}
        others = sorted(filter(self._fits, filled), key=lambda c: (self._busiest(c), repr(c)))
        others = sorted(
            others[:_ESTIMATED], key=lambda c: max(self._simulation(self._plan(c)).step_s, self._busiest(c)[0])
        )
        plans = [(self._plan(candidate), candidate) for candidate in (*fitting, *others[:1])]
        plans += [] if fitting else [(self._today, self._choice.of(self._today))]
        best, candidate = min(plans, key=lambda pair: self._settled(pair[0]).step_s)
        return Estimate(self._settled(best).step_s, candidate)

    def _busiest(self, candidate: Candidate) -> tuple[float, float]:
        """A bound that is sooner worked out."""
        if candidate not in self._sums:
            plan, job = _as_run(self._job, self._plan(candidate)), self._job
            self._sums[candidate] = busiest_s(job.model, plan, job.rates, self._visits, self._circumstances)
        return self._sums[candidate]

    def _turns(self) -> tuple[int, ...]:
        """Changes to try from the best start, and from the next ones."""
        rest = self._budget - self._budget // 4
        return (rest // 2, rest // 4, rest // 4) if rest > 100 else (rest,)

    # Looking at one.

    def _plan(self, candidate: Candidate) -> Plan:
        if candidate not in self._plans:
            self._plans[candidate] = self._choice.plan(candidate)
        return self._plans[candidate]

    def _missing(self, candidate: Candidate) -> dict[Tier, int]:
        """Bytes above the limits, by tier."""
        taken = self._choice.tier_bytes(candidate)
        return {tier: taken[tier] - room for tier, room in self._room.items() if taken[tier] > room}

    def _fits(self, candidate: Candidate) -> bool:
        return not self._missing(candidate)

    def _simulation(self, plan: Plan) -> Simulation:
        """Few steps: enough to tell plans apart."""
        plan = _as_run(self._job, plan)
        key = _key(plan)
        if key not in self._simulated:
            self._simulated[key] = self._simulate(plan, warm_up=1)
        return self._simulated[key]

    def _settled(self, plan: Plan) -> Simulation:
        """After as many steps as it takes."""
        run = _as_run(self._job, plan)
        key, warm_up = _key(run), steps_until_settled(run)
        if key not in self._final:
            self._final[key] = self._simulate(run, warm_up) if warm_up > 1 else self._simulation(plan)
        return self._final[key]

    def _simulate(self, run: Plan, warm_up: int) -> Simulation:
        job = self._job
        return simulate(job.model, run, job.rates, self._visits, self._circumstances, warm_up=warm_up)

    def _bound(self, plan: Plan, max_nodes: int | None = None) -> Bound:
        nodes = {} if max_nodes is None else {"max_nodes": max_nodes}
        run, job = _as_run(self._job, plan), self._job
        return bound_of(job.model, run, job.rates, self._visits, self._circumstances, **nodes)

    def _seconds(self, candidate: Candidate) -> float:
        """Of a step, simulated; what has not settled yet may be too short."""
        return max(self._simulation(self._plan(candidate)).step_s, self._coarse(candidate))

    def _coarse(self, candidate: Candidate) -> float:
        """No step is shorter."""
        if candidate not in self._bounds:
            self._bounds[candidate] = self._bound(self._plan(candidate), _COARSE).seconds
        return self._bounds[candidate]

    # Finding some.

    def _fillings(self) -> Iterator[Candidate]:
        """See [Note: how it is found]."""
        yield from filter(self._fits, [self._choice.of(self._today)])
        for filled in sorted(set(self._filled()), key=lambda c: (self._busiest(c), repr(c)))[:_FILLINGS]:
            yield from self._eager(filled)

    def _filled(self) -> Iterator[Candidate]:
        """One or two kinds of near homes for as many units as fit, far ones for the rest."""
        is_small = len(self._job.model.units) <= SMALL
        for far in self._far():
            starts = [far, replace(far, share=self._share), replace(far, share=self._share, comfort=TIGHT)]
            starts += [self._with_root(far, kind) for kind in (ALL_DEVICE, KINDS[2], ALL_DISK) if is_small]
            starts += [replace(far, comfort=TIGHT)] if self._job.saved else []  # leaves room to keep activations
            for start in filter(self._fits, starts):
                for middle in (start, *(self._fill(start, kind) for kind in KINDS[1:4])):
                    nearer = (
                        self._fill(middle, kind, first=first) for kind in KINDS[:3] for first in range(1 + is_small)
                    )
                    yield from (middle, *nearer)

    def _with_root(self, candidate: Candidate, kind: Kind) -> Candidate:
        return replace(candidate, kinds=(kind, *candidate.kinds[1:]))

    def _eager(self, candidate: Candidate) -> Iterator[Candidate]:
        yield candidate
        if self._may_be_early:
            yield from filter(self._fits, (replace(candidate, early=early) for early in (0.5, 1.0)))

    def _far(self) -> Iterator[Candidate]:
        """Nothing but the root on the device; as much as fits in host memory, the rest on disk."""
        for kind in KINDS[3:]:
            for comfort in (ROOMY, TIGHT):
                uniform = self._choice.uniform(kind, comfort)
                if self._fits(uniform):
                    yield uniform
                    if kind == ALL_HOST:  # then nothing gains from the disk
                        return
                    break
                filled = self._fill(uniform, ALL_HOST)
                if self._fits(filled):
                    yield filled
                    break

    def _fill(self, candidate: Candidate, kind: Kind, *, first: int = 0) -> Candidate:
        """Give a kind to as many units as fit, from the first one on."""
        count, kinds = len(candidate.kinds) - first, candidate.kinds

        def filled(number: int) -> Candidate:
            return replace(candidate, kinds=(*kinds[:first], *(kind,) * number, *kinds[first + number :]))

        if kind == ALL_HOST:  # from a start that need not fit: more of them takes the disk's load off
            numbers = range(count + 1)
            least = bisect.bisect_left(numbers, 1, key=lambda n: "disk" not in self._missing(filled(n)))
            most = bisect.bisect_right(numbers, 0, key=lambda n: "host" in self._missing(filled(n))) - 1
            return filled(min(max(least, most), count))
        fitting = bisect.bisect_right(range(count + 1), 0, key=lambda n: not self._fits(filled(n)))
        return filled(max(fitting - 1, 0))

    def _descend(self, best: Candidate, most: int) -> Candidate:
        """Take every change that makes it faster, until none does or enough were tried."""
        simulated, bounded, seen = 0, 0, {best}
        is_better = True
        while is_better:
            is_better = False
            for other in self._around(best):
                if simulated >= most or bounded >= _BOUNDS * most:
                    return best
                if other in seen or not self._fits(other):
                    continue
                seen.add(other)
                enough_s = self._seconds(best) * (1 - _GAIN)
                if self._busiest(other)[0] >= enough_s:
                    continue
                bounded += 1
                if self._coarse(other) >= enough_s:
                    continue
                simulated += 1
                if self._seconds(other) < enough_s:
                    best, is_better = other, True
                    break
        return best

    def _around(self, best: Candidate) -> Iterator[Candidate]:
        """Changes, and what they make room for."""
        binding = self._simulation(self._plan(best)).binding
        if min(binding.get("d2h", 0.0), binding.get("update", 0.0)) > _BINDS:  # updates may wait for gradients
            yield from self._choice.other_orders(best)
        for other in self._choice.neighbours(best):
            yield other
            if other.kinds != best.kinds and self._fits(other):
                yield self._fill(other, ALL_DEVICE)

    # Saying why.

    def _uniform(self) -> dict[str, Candidate]:
        named = {"everything on the device": ALL_DEVICE, "all in host memory": ALL_HOST, "all on disk": ALL_DISK}
        named["states on disk, the rest in host memory"] = Kind("host", "host", "disk")
        return {name: self._choice.uniform(kind) for name, kind in named.items()}

    def _runners_up(self, plan: Plan) -> Iterator[RunnerUp]:
        step_s = self._settled(plan).step_s  # of others few steps are enough
        others: Iterable[tuple[str, Plan]] = [("filled tier by tier", self._today)]
        for name, candidate in self._uniform().items():
            missing = self._missing(candidate)
            if missing:
                needs = ", ".join(f"{format_bytes(nbytes)} of {tier}" for tier, nbytes in missing.items())
                yield RunnerUp(name, None, f"does not fit: it lacks {needs}")
            else:
                others = itertools.chain(others, [(name, self._plan(candidate))])
        for name, other in others:
            simulation = self._final.get(_key(_as_run(self._job, other))) or self._simulation(other)
            simulation = self._settled(other) if simulation.step_s < step_s else simulation
            binds = max(simulation.binding, key=simulation.binding.__getitem__, default="compute")
            slower = simulation.step_s / step_s - 1 if step_s else 0.0
            same = "equally fast" if slower > -_GAIN else f"predicted {-slower:.1%} faster"
            reason = f"{slower:.1%} slower: {binds} binds" if slower > _GAIN else same
            if _key(other) != _key(plan):
                yield RunnerUp(name, simulation.step_s, reason)
