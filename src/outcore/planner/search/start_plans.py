"""Fillings: near kinds of homes for as many units as fit, and farther ones for the rest."""

from __future__ import annotations

import bisect
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.pools import UnitHomes
from outcore.planner.homes.share import balanced_share
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import (
    ALL_DEVICE,
    ALL_DISK,
    ALL_HOST,
    KINDS,
    LEAN,
    ROOMY,
    SMALL,
    TIGHT,
    Candidate,
)
from outcore.spec.schedule import ROOT

_ENTIRELY = 0.5
"""The part of candidates that are drawn without regard to the best one's homes."""
_STRETCHES = (1, 2, 2, 3)
"""Numbers of stretches of units that get another kind in a candidate that is drawn."""
_BALANCED_BYTES = (16.0, 14.0)  # fp32 master, moments and gradient there; master, moments and a bf16 weight back


class StartPlans:
    """Makes fillings for one job."""

    def __init__(self, job: PlanQuestion, looks: Evaluations) -> None:
        """Args: looks: What is known of the job's candidates."""
        self._ways, self._saved, self._looks, self._choice = job.ways, job.saved, looks, looks.choice
        self.shed, self.fill = functools.cache(self._shedding), functools.cache(self._filling)
        # With the fewest slots compute waits for every fetch. That is cheap only where there are few of them.
        self._tight = LEAN if job.micro_batches > 1 else TIGHT
        self.is_small = len(job.model.units) - 1 <= SMALL
        self.share = round(balanced_share(job.rates, there=_BALANCED_BYTES[0], back=_BALANCED_BYTES[1]), 2)
        """The share at which host and device take equally long for their updates."""

    def fitted(self, candidate: Candidate) -> Candidate | None:
        """Move units farther until a candidate fits; None if it does not even then."""
        roomier = (candidate, *(self.shed(candidate, kind) for kind in KINDS[2:]))
        return next(filter(self._looks.fits, roomier), None)

    def drawn(self, best: Candidate, chance: random.Random) -> Candidate | None:
        """Draw a candidate that fits: stretches of units with other kinds, or an entirely different plan.

        Args:
            best: The best candidate so far.
            chance: Draws.

        Returns:
            The candidate, which fills the room that it leaves on the device; None if it cannot be made to fit.
        """
        count = len(best.kinds)
        kinds = [chance.choice(KINDS)] * count if chance.random() < _ENTIRELY else list(best.kinds)
        for _ in range(chance.choice(_STRETCHES)):
            first = chance.randrange(count)
            length = chance.choice((1, 1 + chance.randrange(count - first)))
            kinds[first : first + length] = [chance.choice(KINDS)] * length
        fitted = self.fitted(
            replace(
                best,
                kinds=tuple(kinds),
                comfort=chance.choice([best.comfort, ROOMY, self._tight]),
                share=chance.choice([best.share, 0.0, self.share, 1.0]),
                early=chance.choice([best.early, 0.0, 0.5, 1.0]) if not self._looks.job.clipping else 0.0,
                first=chance.choice([best.first, (), (ROOT,)]),
                woven=chance.choice([best.woven, True]),
                saves=chance.choice([best.saves, best.saves, *self._ways]),
            )
        )
        return None if fitted is None else self.fill(fitted, ALL_DEVICE)

    def of(self, away: ActivationPolicy | None) -> Iterator[Candidate]:
        """Yield candidates with one or two near kinds for as many units as fit, and a far kind for the rest."""
        is_small = self.is_small
        for far in self.far(away):
            starts = [far, replace(far, share=self.share), replace(far, share=self.share, comfort=self._tight)]
            roots = (ALL_DEVICE, KINDS[2], ALL_DISK) if is_small else ()
            starts += [replace(far, kinds=(kind, *far.kinds[1:])) for kind in roots]
            starts += [replace(far, share=1.0)] if is_small else []
            starts += [replace(far, comfort=self._tight)] if self._saved or is_small else []  # leaves room
            for start in starts:
                for middle in (None, *KINDS[1:4]):
                    yield from self._nearer(start if middle is None else self.fill(start, middle), middle)

    def _nearer(self, filled: Candidate, middle: UnitHomes | None) -> Iterator[Candidate]:
        """Yield a filling, and fillings with a near kind for the first units. Their room goes to the next units."""
        yield filled
        for kind, first in itertools.product(KINDS[:3], range(1 + self.is_small)):
            yield (nearer := self.fill(filled, kind, first=first))
            if middle is not None:
                count = sum(1 for _ in itertools.takewhile(kind.__eq__, nearer.kinds[first:]))
                yield self.fill(nearer, middle, first=first + count)

    def far(self, away: ActivationPolicy | None) -> Iterator[Candidate]:
        """Yield candidates with only the root on the device, as much as fits in host memory, and the rest on disk.

        Some fit only once units have moved nearer.
        """
        for kind in KINDS[3:] if self._looks.room(away)["disk"] else (ALL_HOST,):
            for comfort in dict.fromkeys((ROOMY, self._tight, TIGHT)):
                uniform = self._choice.uniform(kind, comfort, saves=away, woven=True)
                if self._looks.fits(uniform):
                    yield uniform
                    if kind == ALL_HOST:  # then the disk gains nothing
                        return
                    break
                yield uniform if kind == ALL_HOST else self.fill(uniform, ALL_HOST)

    def _filling(self, candidate: Candidate, kind: UnitHomes, *, first: int = 0) -> Candidate:
        """Give a kind to as many units, from ``first`` on, as there is room for on the tiers that this fills."""
        count, kinds, looks = len(candidate.kinds) - first, candidate.kinds, self._looks

        def filled(number: int) -> Candidate:
            return replace(candidate, kinds=(*kinds[:first], *(kind,) * number, *kinds[first + number :]))

        before, after = (looks.choice.tier_bytes(filled(number)) for number in (0, count))
        room, grows = looks.room(candidate.saves), [tier for tier in before if after[tier] > before[tier]]

        def lacks(number: int) -> bool:
            missing = looks.missing(filled(number))
            return any(tier in grows for tier in missing)

        near = min((count * max(room[t] - before[t], 0) // (after[t] - before[t]) for t in grows), default=count)
        return filled(max(_first_true(lacks, count + 1, near) - 1, 0))

    def _shedding(self, candidate: Candidate, kind: UnitHomes) -> Candidate:
        """Move nearer units to a kind that is farther, the last units first, and only as many as must be."""
        kinds, rank = candidate.kinds, self._choice.rank
        nearer = [i for i, now in enumerate(kinds) if rank(now) < rank(kind)][::-1]

        def shed(number: int) -> Candidate:
            farther = frozenset(nearer[:number])
            return replace(candidate, kinds=tuple(kind if i in farther else now for i, now in enumerate(kinds)))

        return shed(bisect.bisect_left(range(len(nearer)), 1, key=lambda n: self._looks.fits(shed(n))))


def _first_true(test: Callable[[int], bool], count: int, near: int) -> int:
    """Return the first number below ``count`` from which on all pass a test, else ``count``. Args: near: A guess."""
    low, high, number, step = 0, count, min(near, count - 1), 1
    while low < high and not (low and high < count):
        if test(number):
            high, number = number, max(number - step, low)
        else:
            low, number = number + 1, min(number + step, high - 1)
        step *= 2
    return bisect.bisect_left(range(count), 1, low, high, key=test)
