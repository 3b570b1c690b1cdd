"""The plan that is fastest on a machine by the simulator: homes, slots, and where and when updates run.

[Note: how it is found] Fillings come first: the nearest kinds of homes for as many units as fit, farther ones for the
rest. Those with the lowest bounds are simulated, and the best of them is changed step by step while it gets faster. A
change whose bound is above the best time so far cannot be better, and is not simulated. Since this ends where no single
change helps, other starts are changed, too. The rule's plan and uniform ones are simulated in any case: the fastest
plan is never slower than these. Of plans that are about as fast as that, the one that writes least is taken: see [Note:
wear] in ``wear``. All counts are fixed, so the same inputs give the same plan.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outcore.core.collecting import rarely_collecting
from outcore.core.errors import PlanInfeasibleError
from outcore.planner.bound.bound import StepBound
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.search.evaluations import Evaluations, Simulated
from outcore.planner.search.job import Job
from outcore.planner.search.orders import reordered
from outcore.planner.search.plan_space import ALL_DEVICE, ALL_HOST, KINDS, ROOMY, TIGHT, Candidate
from outcore.planner.search.runners_up import SMALLEST_GAIN, RunnerUp, runners_up, uniform
from outcore.planner.search.start_plans import StartPlans
from outcore.planner.search.wear import Named, least_worn, sparing
from outcore.planner.timing.simulate import Simulation
from outcore.spec.plan import Plan

_SIMULATED_UNITS, _MOST_SIMULATED = 1500, 200
"""The most units in all simulated steps together; the most simulated plans. Fillings of several micro-batches, other
orders, other starts, and steps that are played in full come on top."""
_LEAST_SIMULATED, _WITH_VISITS, _MOST_VISITS = 12, 32, 400
"""The fewest plans that may be simulated. Where a step is long only because units are visited several times, more are
needed: the second number, up to so many visits. With 12, steps of 8B with four micro-batches were 6 and 15% longer."""
_FILLED, _FILLED_OF_SEVERAL = 4, 2
"""One in so many plans that may be simulated is a filling; the second number is for several micro-batches. There slots
matter more, since weights are fetched more often, and no bound tells whether they suffice. Updates inside backward
matter less, and are tried by changes alone."""
_FEW = 100
"""If more plans than this may be simulated, several starts are changed, not only the best."""
_STARTS = 3
_FEW_UNITS = 3
"""Units beside the root up to which changes of one or two of them reach every plan; no random changes are made."""
_KICKS, _AFTER_A_KICK = 24, 60
"""Random changes of a small model's plan, and the most plans that are simulated after each."""
_FEWEST, _DRAWN, _PLANS_PER_START, _LEAST_CHANGES = 20, 100, 40, 12
"""If fewer plans than this may be simulated, no other starts are changed. The most random candidates. One start more is
changed for every so many plans that may be simulated, and at least so many changes of it are simulated."""
_FAR, _NEAR = 1.2, 1.05
"""Other starts that are slower than the best one by this factor are not changed, or not brought in order."""
_MOST_WAYS = 2
"""Ways with activations that are looked at closely for a large model: the best ones."""
_BOUNDS = 4
"""Bounds that may be worked out for every plan that may be simulated."""
_FILLINGS, _FILLINGS_OF_SMALL = 30, 160
"""Fillings of each way that are compared by their bounds."""
_ESTIMATED, _SIMULATED_FILLINGS, _IMPROVING = 3, 2, 8
"""For an estimate: candidates like the known ones whose bounds are worked out, of which one is simulated, for each
treatment of activations; fillings that are simulated, for those of the known ones; changes that improve it."""
_MUCH = 0.1
"""A known candidate that leaves a larger part of a tier may be far from what fits, so fillings are tried, too."""
_ROUNDING = 1e-9
_BINDS = 0.03
"""Other orders of updates are tried where gradients and updates each bind a larger part of a step than this."""


@dataclass(frozen=True)
class Found:
    """A plan with what is predicted of it."""

    plan: Plan
    candidate: Candidate
    """The plan in few words; if the rule's plan won, the candidate most like it."""
    simulation: Simulation
    num_simulated: int
    bare: Plan
    """The plan without activations that leave."""
    fastest_s: float
    """Seconds of a step of the fastest plan that was seen. The plan that was found may write less: see ``wear``."""
    looks: Evaluations = field(repr=False, compare=False)
    """For ``bound`` and ``runners_up``, which are worked out when a caller asks."""

    @functools.cached_property
    def bound(self) -> StepBound:
        """The bound of a step of the plan."""
        return self.looks.bound(self.bare, self.candidate.saves)

    @functools.cached_property
    def runners_up(self) -> tuple[RunnerUp, ...]:
        """Simple plans, and why they were not chosen."""
        return tuple(runners_up(self.looks, self.bare, self.candidate.saves, self.simulation.step_s))


@rarely_collecting()
def search(job: Job, simulated: Simulated | None = None) -> Found:
    """Find a plan.

    Args:
        job: What to plan for.
        simulated: Simulations made before for jobs that differ in limits alone; new ones are added.

    Raises:
        PlanInfeasibleError: Nothing fits.

    Cost: 100 units some 3 s.
    """
    return _PlanSearch(job, simulated).found()


@rarely_collecting()
def explain(job: Job, plan: Plan, candidate: Candidate | None = None, simulated: Simulated | None = None) -> Found:
    """Predict the step of a plan that was chosen, beside the simple ones.

    Args:
        job: What it was made for.
        plan: The plan without activations that leave.
        candidate: The same plan as a candidate, if known.
        simulated: As in ``search``.
    """
    search = _PlanSearch(job, simulated)
    return search.explain(plan, candidate or search.like(plan, job.ways[0]))


class Estimate(NamedTuple):
    """An estimate of the fastest step, and the candidate that takes it."""

    step_s: float
    candidate: Candidate


@rarely_collecting()
def estimate(
    job: Job, known: Iterable[Candidate], simulated: Simulated | None = None, enough_s: float = math.inf
) -> Estimate | None:
    """Estimate what ``search`` would find, in less time.

    Args:
        job: Much like one that was searched.
        known: Candidates that are good for jobs like it. The estimate is no slower than any of these that fits (with
            many micro-batches: as they are compared), or, if none fits, than the rule's plan.
        simulated: As in ``search``.
        enough_s: Seconds of a step. Plans that cannot take less are of no use.

    Returns:
        The estimate; None if nothing fits or is of use.

    Cost: 100 units some 1 s.
    """
    return _PlanSearch(job, simulated).estimate(known, enough_s)


@rarely_collecting()
def improve(job: Job, found: Estimate) -> Estimate:
    """Bring an estimate nearer to what ``search`` would find, by a few changes. Cost: 100 units some 1 s."""
    return _PlanSearch(job).improve(found)


class _Counts(NamedTuple):
    """How many changes were simulated, bounded and seen up to and including one."""

    simulated: int
    bounded: int
    seen: int


class _PlanSearch:
    """Finds good candidates for one job."""

    def __init__(self, job: Job, simulated: Simulated | None = None) -> None:
        self._job, self._looks = job, Evaluations(job, simulated)
        self._choice, self._fits = self._looks.choice, self._looks.fits
        self._fillings = StartPlans(job, self._looks)
        self._compared: dict[Candidate, None] = {}
        """Candidates that were simulated and compared, in this order; however many are simulated at once."""
        units, visits = len(job.model.units), self._looks.num_played * job.model.micro_batches_in_unit
        least = min(_WITH_VISITS, _SIMULATED_UNITS // units) if units * visits <= _MOST_VISITS else _LEAST_SIMULATED
        self._budget = max(_LEAST_SIMULATED, least, min(_SIMULATED_UNITS // (units * visits), _MOST_SIMULATED))

    def __reduce__(self) -> tuple[type[_PlanSearch], tuple[Job]]:  # for another process, which finds the same
        return _PlanSearch, (self._job,)

    def found(self) -> Found:
        """Return the best plan, as the module says."""
        looks, today = self._looks, (self._looks.today, self.like(self._looks.today, self._job.ways[0]))
        everything = self._choice.uniform(ALL_DEVICE, saves=self._job.ways[0])
        if self._fits(everything) and self._keeps_all(everything):  # nothing is moved where nothing must be
            return self.explain(looks.plan(everything), everything)
        is_small = self._fillings.is_small
        firsts = [] if is_small else self._firsts()
        ways = self._job.ways if is_small else [candidate.saves for candidate in firsts]
        filled = self._budget // (_FILLED if self._job.micro_batches == 1 else _FILLED_OF_SEVERAL)
        fillings = self._lowest(set(map(looks.same, self._starts(ways))), filled)
        best = self._fastest(dict.fromkeys(map(looks.same, [*firsts, *fillings])), _STARTS)
        rest, units = self._budget - self._budget // _FILLED, len(self._job.model.units) - 1
        turns = (rest // 2, rest // 4, rest // 4) if rest > _FEW else (rest,)
        changed = [self._descend(start, most) for start, most in zip(best, turns, strict=False)]
        if is_small and changed and units > _FEW_UNITS:
            changed.append(self._kick(min(changed, key=looks.seconds)))
        if changed:
            changed.append(reordered(min(changed, key=looks.seconds), looks, self._job))
            if not is_small and self._budget >= _FEWEST:
                changed += self._again(min(changed, key=looks.seconds), best, max(rest // 3, _LEAST_CHANGES))
        best = self._fastest(dict.fromkeys(map(looks.same, changed)), _STARTS)
        plans = [*((looks.plan(candidate), candidate) for candidate in best), today]
        looks.simulate(((plan, candidate.saves) for plan, candidate in plans), in_full=True)
        enough_s = min(looks.cost_s(plan, candidate.saves) for plan, candidate in plans)
        simple = filter(self._fits, uniform(looks, None).values())
        plans += [(looks.plan(other), other) for other in simple if looks.coarse_s(other) < enough_s]
        chosen, fastest_s = least_worn([*plans, *sparing(plans, self._compared, looks, self._spared)], looks)
        return replace(self.explain(*chosen), fastest_s=fastest_s)

    def _spared(self, job: Job) -> Named:
        """Search again, for other limits."""
        found = _PlanSearch(job, self._looks.simulated).found()
        return found.bare, found.candidate

    def _lowest(self, candidates: Iterable[Candidate], most: int) -> list[Candidate]:
        """Return those with the lowest bounds. The quick bound, which is no higher, tells where to stop."""
        looks, found = self._looks, list[Candidate]()

        def rank(candidate: Candidate) -> tuple[float, tuple[float, float], tuple[object, ...]]:
            return looks.coarse_s(candidate), looks.busiest(candidate), candidate.order

        for candidate in sorted(candidates, key=lambda c: (looks.busiest(c), c.order)):
            if len(found) == most and looks.busiest(candidate)[0] > looks.coarse_s(found[-1]) * (1 + _ROUNDING):
                break
            found = sorted([*found, candidate], key=rank)[:most]
        return found

    def _fastest(self, ordered: Iterable[Candidate], most: int) -> list[Candidate]:
        """Return the fastest. Args: ordered: Ordered by their bounds, so that most need not be simulated."""
        looks, found = self._looks, list[Candidate]()
        open_ones = (c for c in ordered if len(found) < most or looks.coarse_s(c) < looks.seconds(found[-1]))
        while several := list(itertools.islice(open_ones, looks.simulated.at_once)):
            looks.simulate((looks.plan(candidate), candidate.saves) for candidate in several)
            for candidate in several:  # compared one by one: how many are simulated at once makes no difference
                if len(found) < most or looks.coarse_s(candidate) < looks.seconds(found[-1]):
                    self._compared[candidate] = None
                    found = sorted([*found, candidate], key=looks.seconds)[:most]
        return found

    def _keeps_all(self, candidate: Candidate) -> bool:
        """Return whether all units keep their activations, or there is only one way with them."""
        units = self._looks.run(self._looks.plan(candidate), candidate.saves).units
        return len(self._job.ways) == 1 or all(unit.policy == "keep" for unit in units)

    def like(self, plan: Plan, away: ActivationPolicy | None) -> Candidate:
        """Return the candidate most like a plan: see ``Choice.of``."""
        return replace(self._choice.of(plan), saves=away)

    def explain(self, plan: Plan, candidate: Candidate) -> Found:
        """Return what is predicted of a plan. Args: candidate: The plan in few words."""
        looks = self._looks
        simulation = looks.simulation(plan, candidate.saves)
        return Found(plan, candidate, simulation, looks.num_simulated, plan, simulation.step_s, looks)

    def estimate(self, known: Iterable[Candidate], enough_s: float) -> Estimate | None:
        """Return the best of a few: known candidates, candidates like them, and fillings."""
        looks, known = self._looks, list(known)
        everything = self._choice.uniform(ALL_DEVICE, saves=self._job.ways[0])
        if self._fits(everything) and self._keeps_all(everything):
            return Estimate(looks.simulation(looks.plan(everything), everything.saves).step_s, everything)
        fitting = list(filter(self._fits, known))
        best = self._fastest(self._open(fitting, enough_s), 1)
        enough_s = min([enough_s, *map(looks.seconds, best)])
        others = [near for away in self._job.ways for near in self._soonest(away, known, enough_s)]
        for away in dict.fromkeys(c.saves for c in known) if any(map(self._leaves_room, known)) else ():
            open_ones = (c for c in self._best_filled(away) if looks.busiest(c)[0] < enough_s)
            others += self._lowest(open_ones, _SIMULATED_FILLINGS)
        ordered = sorted(self._open(others, enough_s), key=looks.coarse_s)
        plans = [(looks.plan(c), c) for c in self._fastest([*best, *ordered], 1)]
        if not fitting:
            with suppress(PlanInfeasibleError):  # the first way may have no room where another has
                plans.append((looks.today, self.like(looks.today, self._job.ways[0])))
        if not plans:
            return None
        plan, candidate = min(plans, key=lambda pair: looks.cost_s(pair[0], pair[1].saves))
        return Estimate(looks.simulation(plan, candidate.saves).step_s, candidate)

    def _leaves_room(self, candidate: Candidate) -> bool:
        """Return whether a candidate is far from what fits: it needs more than there is, or leaves much of it."""
        taken, room = self._choice.tier_bytes(candidate), self._looks.room(candidate.saves)
        return not self._fits(candidate) or any(
            room[tier] - taken[tier] > _MUCH * room[tier] for tier in ("device", "host")
        )

    def improve(self, found: Estimate) -> Estimate:
        """Take a few changes that make an estimate's candidate faster."""
        looks, best = self._looks, found.candidate
        if not self._fits(best):  # it is the rule's plan, which is not changed
            return found
        best = self._descend(best, _IMPROVING)
        return min(found, Estimate(looks.simulation(looks.plan(best), best.saves).step_s, best), key=lambda e: e.step_s)

    def _open(self, candidates: Iterable[Candidate], enough_s: float) -> list[Candidate]:
        """Return those whose bounds are below so many seconds."""
        looks = self._looks
        return [c for c in candidates if looks.busiest(c)[0] < enough_s and looks.coarse_s(c) < enough_s]

    def _soonest(
        self, away: ActivationPolicy | None, known: Iterable[Candidate] = (), enough_s: float = math.inf
    ) -> list[Candidate]:
        """Return the filling with the lowest bound of a few, for one way with activations.

        Args:
            away: The way.
            known: Candidates that are good for jobs like it.
            enough_s: Seconds of a step. Fillings that cannot take less are left out, so there may be none.
        """
        looks, fillings = self._looks, self._fillings
        starts = [replace(candidate, saves=away) for candidate in known]
        starts += [replace(start, share=fillings.share) for start in starts or fillings.far(away)]
        starts += fillings.far(away)
        filled = {fillings.fill(start, near) for start in starts for near in KINDS[:4]}
        others = sorted(filter(self._fits, filled), key=lambda c: (looks.busiest(c), c.order))[:_ESTIMATED]
        return self._lowest((other for other in others if looks.busiest(other)[0] < enough_s), 1)

    def _firsts(self) -> list[Candidate]:
        """Return one filling for each of the ways with activations that are fastest."""
        ways = list(dict.fromkeys(self._job.ways))
        first = [best for several in self._looks.simulated.over(self._soonest, ways) for best in several]
        return self._fastest(sorted(first, key=self._looks.coarse_s), _MOST_WAYS)

    def _starts(self, ways: Iterable[ActivationPolicy | None]) -> Iterator[Candidate]:
        """Yield the starts of the search that fit: see [Note: how it is found]."""
        today = self.like(self._looks.today, self._job.ways[0])
        yield from filter(self._fits, [today])
        early = (0.5, 1.0) if self._looks.may_be_early and self._job.micro_batches == 1 else ()
        for several in self._looks.simulated.over(self._best_filled, list(dict.fromkeys(ways))):
            for filled in several:
                yield from (filled, *filter(self._fits, (replace(filled, early=part) for part in early)))

    def _best_filled(self, away: ActivationPolicy | None) -> list[Candidate]:
        """Return the fillings of one way with activations that are to be compared by their bounds."""
        fitting = filter(self._fits, dict.fromkeys(self._fillings.of(away)))
        ordered = sorted(fitting, key=lambda c: (self._looks.busiest(c), c.order))
        return ordered[: _FILLINGS_OF_SMALL if self._fillings.is_small else _FILLINGS]

    def _descend(self, best: Candidate, most: int, *, alone: bool = False) -> Candidate:
        """Take changes that make it faster, until none does or enough were tried. Args: alone: No pairs."""
        seen, tried = {self._looks.same(best): None}, _Counts(0, 0, 1)
        while True:
            enough_s = self._looks.seconds(best) * (1 - SMALLEST_GAIN)
            faster = self._first_faster(self._open_around(best, enough_s, most, seen, tried, alone=alone), enough_s)
            if faster is None:
                return best
            best, tried = faster
            for ahead in list(seen)[tried.seen :]:  # simulated at once with the one taken, and not compared
                del seen[ahead]

    def _first_faster(
        self, open_ones: Iterator[tuple[Candidate, _Counts]], enough_s: float
    ) -> tuple[Candidate, _Counts] | None:
        """Return the first that is faster. Several are simulated at once; how many makes no difference."""
        looks, at_once = self._looks, 1 if self._fillings.is_small else self._looks.simulated.at_once
        while several := list(itertools.islice(open_ones, at_once)):
            looks.simulate((looks.plan(other), other.saves) for other, _ in several)
            for other, tried in several:
                self._compared[other] = None
                if looks.seconds(other) < enough_s:
                    return other, tried
        return None

    def _open_around(
        self, best: Candidate, enough_s: float, most: int, seen: dict[Candidate, None], tried: _Counts, *, alone: bool
    ) -> Iterator[tuple[Candidate, _Counts]]:
        """Yield changes that may take less than ``enough_s``. Args: tried: The counts so far."""
        looks, (simulated, bounded, _) = self._looks, tried
        for other in self._around(best, alone=alone):
            if simulated >= most or bounded >= _BOUNDS * most:
                return
            if not self._fits(other) or (same := looks.same(other)) in seen:
                continue
            seen[same] = None
            if looks.busiest(same)[0] >= enough_s:
                continue
            bounded += 1
            if looks.coarse_s(same) >= enough_s:
                continue
            simulated += 1
            yield other, _Counts(simulated, bounded, len(seen))

    def _again(self, best: Candidate, starts: Sequence[Candidate], most: int) -> Iterator[Candidate]:
        """Change starts again, in other orders, and other ones, unless they are far slower than the best candidate."""
        looks, best_s = self._looks, self._looks.seconds(best)
        yield from (self._descend(reordered(start, looks, self._job), most) for start in self._open(starts[:1], best_s))
        twins = [replace(start, woven=not start.woven) for start in starts[:2]]
        drawn = self._fillings.drawn(best, min(_DRAWN, self._budget))
        others = dict.fromkeys(map(looks.same, [*starts[1:], *twins, *drawn]))
        others.pop(starts[0], None)  # was changed already
        ordered = sorted(self._open(others, best_s), key=looks.coarse_s)
        for start in self._fastest(ordered, 1 + self._budget // _PLANS_PER_START):
            if looks.seconds(start) < _FAR * best_s:
                found = self._descend(start, most)
                yield reordered(found, looks, self._job) if looks.seconds(found) < _NEAR * best_s else found

    def _kick(self, best: Candidate) -> Candidate:
        """Change several things at once, at random with a fixed seed, and descend from there."""
        chance, count = random.Random(len(best.kinds)), len(best.kinds)
        for i in range(_KICKS):
            kinds = list(best.kinds)
            if i % 2:  # an entirely different plan
                first, last, border = chance.choice(KINDS), chance.choice(KINDS), chance.randrange(count)
                kinds = [first] * border + [last] * (count - border)
            for j in chance.sample(range(count), min(count, chance.randint(1, 3))):
                kinds[j] = chance.choice(KINDS)
            comfort, saves = chance.choice([best.comfort, ROOMY, TIGHT]), chance.choice([best.saves, *self._job.ways])
            share = chance.choice([best.share, 0.0, self._fillings.share, 0.5, 1.0])
            kicked = replace(best, kinds=tuple(kinds), comfort=comfort, share=share, saves=saves)
            start = self._fillings.fitted(kicked)
            if start is not None:
                found = self._descend(start, _AFTER_A_KICK, alone=True)
                best = min(best, found, key=self._looks.seconds)
        return self._descend(best, _AFTER_A_KICK)

    def _around(self, best: Candidate, *, alone: bool) -> Iterator[Candidate]:
        """Yield changes. If one leaves room, also fill it; if one does not fit, move units farther instead."""
        is_small, fill = self._fillings.is_small, self._fillings.fill
        binding = self._looks.simulation(self._looks.plan(best), best.saves, in_full=False).binding
        if min(binding.get("d2h", 0.0), binding.get("update", 0.0)) > _BINDS:  # updates may wait for gradients
            yield from self._choice.other_orders(best)
        yield from self._choice.turned(best) if is_small else ()
        near = (ALL_DEVICE, *KINDS[1:4]) if is_small else (ALL_DEVICE,)
        yield from (fill(best, kind) for kind in sorted(set(best.kinds), key=self._choice.rank)[:-1])  # room left
        for other in self._choice.neighbours(best):
            if self._fits(other):
                yield other
                yield from (fill(other, kind) for kind in near)
            else:
                far = KINDS[2:] if is_small else sorted({*other.kinds, ALL_HOST}, key=self._choice.rank)[1:]
                yield from (self._fillings.shed(other, kind) for kind in far)
        yield from self._choice.pairs(best) if is_small and not alone else ()
