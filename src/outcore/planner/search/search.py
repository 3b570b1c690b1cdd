"""The plan that is fastest on a machine by the simulator: homes, slots, and where and when updates run.

[Note: how it is found] Fillings come first: the nearest kinds of homes for as many units as fit, farther ones for the
rest. Those whose busiest lanes have least to do are simulated, and the best of them is changed step by step while it
gets faster. Since this ends where no single change helps, it begins again from other candidates: of the fillings that
are left and of some that are drawn with fixed seeds, the fastest one is changed next. The rule's plan and uniform ones
are simulated in any case: the fastest plan is never slower than these. Of plans that are about as fast as that, the one
that writes least is taken: see [Note: wear] in ``wear``. All counts are fixed, so the same inputs give the same plan.

[Note: worth it] Predictions are off by some percent. So another plan replaces the usual one only if the fastest one is
predicted to be faster by more than a threshold (``WORTH``), or if the plan that was found writes less to the drive.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from outcore.core.collecting import rarely_collecting
from outcore.core.errors import PlanInfeasibleError
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.search.evaluations import Evaluations, Simulated
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import ALL_DEVICE, ALL_HOST, KINDS, Candidate
from outcore.planner.search.runners_up import SMALLEST_GAIN, RunnerUp, runners_up, uniform
from outcore.planner.search.start_plans import StartPlans
from outcore.planner.search.wear import WORTH, Named, least_worn, sparing, takes_more
from outcore.planner.timing.simulate import Simulation
from outcore.spec.plan import Plan

_SIMULATED_UNITS, _MOST_SIMULATED = 1500, 200
"""The most units in all simulated steps together, and the most simulated plans, of the first starts and changes. Each
restart takes a part of these again. Steps that are played in full come on top."""
_LEAST_SIMULATED, _WITH_VISITS = 12, 32
"""The fewest plans that may be simulated, and the fewest where a step is long only because units are visited several
times. With 12, steps of 8B with four micro-batches were 6 and 15% longer."""
_RESTARTED_UNITS, _RESTARTS_OF_SMALL, _PART = 200, 32, 6
"""The most units in all restarts together, and the restarts of a small model; each may simulate one in so many plans
again. For a large model no more come when half of them in a row have gained nothing."""
_DRAWN, _KEPT_OF_DRAWN = 12, 2
"""The candidates that are drawn for a restart, and those of them that are simulated."""
_PROMISE = 0.002
"""The least part of a step that a plan must promise to gain, by the work of its busiest lane, to be simulated."""
_COMPARED_IN_FULL = 3
"""The most plans of which all micro-batches are played."""
_MOST_WAYS = 2
"""Ways with activations that are looked at closely for a large model: the most promising ones."""


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
    """For ``runners_up``, which are worked out when a caller asks."""

    @functools.cached_property
    def runners_up(self) -> tuple[RunnerUp, ...]:
        """Simple plans, and why they were not chosen."""
        return tuple(runners_up(self.looks, self.bare, self.candidate.saves, self.simulation.step_s))


@rarely_collecting()
def search(
    job: PlanQuestion, simulated: Simulated | None = None, *, known: Iterable[Candidate] = (), effort: float = 1.0
) -> Found:
    """Find a plan.

    Args:
        job: What to plan for.
        simulated: Simulations made before for jobs that differ in limits alone; new ones are added.
        known: Candidates that are good for jobs like it. What is found is no slower than any of these that fits.
        effort: The fraction of the usual number of simulations.

    Raises:
        PlanInfeasibleError: Nothing fits.

    Cost: 66 units some 3 s.
    """
    return _PlanSearch(job, simulated, effort).found(known)


@rarely_collecting()
def explain(job: PlanQuestion, plan: Plan, candidate: Candidate | None = None) -> Found:
    """Predict the step of a plan that was chosen, beside the simple ones.

    Args:
        job: What it was made for.
        plan: The plan without activations that leave.
        candidate: The same plan as a candidate, if known.
    """
    search = _PlanSearch(job)
    return search.explain(plan, candidate or search.like(plan, job.ways[0]))


def better_than(usual: Plan, question: PlanQuestion) -> tuple[Plan, Candidate | None]:
    """Return a plan that is predicted to be faster, with its candidate; or the usual one. See [Note: worth it].

    Args:
        usual: The usual plan within the limits of the question.
        question: What is asked.
    """
    if not any(unit.trainable for unit in question.model.units):
        return usual, None
    other = usual
    if not question.clipping and not usual.rests_on_device:
        promised = replace(usual, accumulation_steps=question.micro_batches)
        left = question.activations(question.ways[0]).left(question.limits)
        other = with_early_updates(question.model, promised, left)
    found = search(question)
    now = found.looks.simulation(other, question.ways[0])
    if found.fastest_s >= (1 - WORTH) * now.step_s and not takes_more(now, found.simulation):
        return other, None
    promises = not question.clipping and not found.plan.rests_on_device
    steps = question.micro_batches if promises else usual.accumulation_steps
    return replace(found.plan, accumulation_steps=steps), found.candidate


class _PlanSearch:
    """Finds good candidates for one job."""

    def __init__(self, job: PlanQuestion, simulated: Simulated | None = None, effort: float = 1.0) -> None:
        self._job, self._looks, self._effort = job, Evaluations(job, simulated), effort
        self._choice, self._fits = self._looks.choice, self._looks.fits
        self._fillings = StartPlans(job, self._looks)
        self._compared: dict[Candidate, None] = {}
        """Candidates that were simulated and compared, in this order."""
        self._begun: set[Candidate] = set()
        """Candidates from which changes began."""
        units, visits = len(job.model.units), self._looks.num_played * job.model.micro_batches_in_unit
        most = min(_SIMULATED_UNITS // (units * visits), _MOST_SIMULATED)
        self._restarts = _RESTARTS_OF_SMALL if self._fillings.is_small else max(_RESTARTED_UNITS // units, 4)
        self._budget = max(_LEAST_SIMULATED, int(effort * max(most, min(_SIMULATED_UNITS // units, _WITH_VISITS))))

    def found(self, known: Iterable[Candidate] = ()) -> Found:
        """Return the best plan, as the module says. Args: known: As in ``search``."""
        looks = self._looks
        everything = self._choice.uniform(ALL_DEVICE, saves=self._job.ways[0])
        if self._fits(everything) and self._keeps_all(everything):  # nothing is moved where nothing must be
            return self.explain(looks.plan(everything), everything)
        rule, known = self._rule(), list(known)
        firsts = list(map(looks.same, [*filter(self._fits, known), *self._firsts()]))
        ways = list(dict.fromkeys(first.saves for first in firsts))
        best = self._simulated(firsts, map(looks.same, self._starts(rule, known, ways)))
        changed = [self._descend(start, self._budget // 2) for start in best[:1]]
        most, idle = round(self._effort * self._restarts), 0
        for number in range(most if changed else 0):
            now = min(changed, key=looks.seconds)
            start = self._restart(now, best, number)
            changed += [] if start is None else [self._descend(start, self._budget // _PART)]
            idle = 0 if looks.seconds(changed[-1]) < looks.seconds(now) else idle + 1
            if idle > most // 2 and not self._fillings.is_small:
                break
        chosen = sorted(dict.fromkeys(map(looks.same, [*changed, *best])), key=looks.seconds)[:_COMPARED_IN_FULL]
        plans = [(looks.plan(candidate), candidate) for candidate in chosen] + rule
        if not plans:
            _ = looks.today  # says what would do
        if self._effort == 1:
            enough_s = min(looks.cost_s(plan, candidate.saves) for plan, candidate in plans)
            simple = filter(self._fits, uniform(looks, None).values())
            plans += [(looks.plan(other), other) for other in simple if looks.busiest(other)[0] < enough_s]
            plans += sparing(plans, self._compared, looks, self._spared)
        named, fastest_s = least_worn(plans, looks)
        return replace(self.explain(*named), fastest_s=fastest_s)

    def _rule(self) -> list[Named]:
        """Return the rule's plan; none if nothing fits with the first way, as others may do."""
        with suppress(PlanInfeasibleError):
            return [(self._looks.today, self.like(self._looks.today, self._job.ways[0]))]
        return []

    def _starts(
        self, rule: Iterable[Named], known: Iterable[Candidate], ways: Iterable[ActivationPolicy | None]
    ) -> Iterator[Candidate]:
        """Yield the starts of the search: see [Note: how it is found]. All fit."""
        known = [*known, *(candidate for _, candidate in rule)]
        fitted = list(filter(None, map(self._fillings.fitted, known)))
        yield from fitted
        yield from (self._fillings.fill(each, ALL_DEVICE) for each in fitted)
        early = (0.5, 1.0) if not self._job.clipping and self._job.micro_batches == 1 else ()
        for way in ways:
            for filled in filter(self._fits, dict.fromkeys(self._fillings.of(way))):
                yield filled
                yield from filter(self._fits, (replace(filled, early=part) for part in early))

    def _firsts(self) -> list[Candidate]:
        """Return a filling for each of the ways with activations to look at closely, the fastest first."""
        looks, firsts = self._looks, list[Candidate]()
        for way in dict.fromkeys(self._job.ways):
            filled = (self._fillings.fill(far, near) for far in self._fillings.far(way) for near in KINDS[:4])
            firsts += sorted(filter(self._fits, filled), key=lambda c: (looks.busiest(c), c.order))[:1]
        firsts.sort(key=looks.seconds)
        return firsts if self._fillings.is_small else firsts[:_MOST_WAYS]

    def _simulated(self, firsts: Iterable[Candidate], others: Iterable[Candidate]) -> list[Candidate]:
        """Simulate some candidates, and the most promising of others. Returns them, the fastest first.

        Of all that consist of the same kinds of homes the most promising one comes first, then the next of each.
        """
        looks, counts = self._looks, Counter[tuple[object, ...]]()
        places = dict[Candidate, int]()
        lowest = sorted(dict.fromkeys(others), key=lambda c: (looks.busiest(c), c.order))
        for candidate in lowest:
            alike = frozenset(candidate.kinds), candidate.saves
            places[candidate] = counts[alike]
            counts[alike] += 1
        lowest.sort(key=places.__getitem__)
        some = dict.fromkeys([*firsts, *lowest[: max(self._budget // 4, 1)]])
        self._compared |= some
        return sorted(some, key=looks.seconds)

    def _restart(self, now: Candidate, left: list[Candidate], number: int) -> Candidate | None:
        """Return where to begin again: the fastest of what is left, and of candidates that are drawn.

        Args:
            now: The best candidate so far.
            left: Candidates that were simulated, the best first. What is drawn is added.
            number: How often the search has begun again.
        """
        looks, chance = self._looks, random.Random(number)
        drawn = filter(None, (self._fillings.drawn(now, chance) for _ in range(_DRAWN)))
        new = [c for c in dict.fromkeys(map(looks.same, drawn)) if self._promises(c, looks.seconds(now))]
        left += [c for c in sorted(new, key=lambda c: (looks.busiest(c), c.order)) if c not in self._compared][
            :_KEPT_OF_DRAWN
        ]
        self._compared |= dict.fromkeys(left)
        left.sort(key=looks.seconds)
        return next((c for c in left if c not in self._begun), None)

    def _promises(self, candidate: Candidate, enough_s: float) -> bool:
        """Return whether a candidate may take less than so many seconds."""
        return self._looks.busiest(candidate)[0] < (1 - _PROMISE) * enough_s

    def _keeps_all(self, candidate: Candidate) -> bool:
        """Return whether all units keep their activations, or there is only one way with them."""
        units = self._job.as_run(self._looks.plan(candidate), candidate.saves).units
        return len(self._job.ways) == 1 or all(unit.policy == "keep" for unit in units)

    def like(self, plan: Plan, away: ActivationPolicy | None) -> Candidate:
        """Return the candidate most like a plan: see ``PlanSpace.of``."""
        return replace(self._choice.of(plan), saves=away)

    def explain(self, plan: Plan, candidate: Candidate) -> Found:
        """Return what is predicted of a plan. Args: candidate: The plan in few words."""
        looks = self._looks
        simulation = looks.simulation(plan, candidate.saves)
        return Found(plan, candidate, simulation, len(looks.simulated), plan, simulation.step_s, looks)

    def _spared(self, job: PlanQuestion) -> Named:
        """Search again, for other limits."""
        found = _PlanSearch(job, self._looks.simulated, self._effort).found()
        return found.bare, found.candidate

    def _descend(self, best: Candidate, most: int) -> Candidate:
        """Take changes that make it faster, until none does or enough were simulated."""
        looks, seen, number = self._looks, {self._looks.same(best)}, 0
        self._begun.add(best)
        while True:
            enough_s = looks.seconds(best) * (1 - SMALLEST_GAIN)
            for other in self._around(best):
                if not self._fits(other) or (same := looks.same(other)) in seen:
                    continue
                seen.add(same)
                if not self._promises(same, enough_s):
                    continue
                if number >= most:
                    return best
                number += 1
                self._compared[same] = None
                if looks.seconds(same) < enough_s:
                    best = same
                    break
            else:
                return best

    def _around(self, best: Candidate) -> Iterator[Candidate]:
        """Yield changes. If one leaves room, also fill it; if one does not fit, move units farther instead."""
        is_small, fill = self._fillings.is_small, self._fillings.fill
        yield from self._choice.turned(best)
        yield from self._choice.other_orders(best)
        near = (ALL_DEVICE, *KINDS[1:4]) if is_small else (ALL_DEVICE, ALL_HOST)
        yield from (fill(best, kind) for kind in sorted(set(best.kinds), key=self._choice.rank)[:-1])  # room left
        for other in self._choice.neighbours(best):
            if self._fits(other):
                yield other
                yield from (fill(other, kind) for kind in near)
            else:
                far = KINDS[2:] if is_small else sorted({*other.kinds, ALL_HOST}, key=self._choice.rank)[1:]
                yield from (self._fillings.shed(other, kind) for kind in far)
