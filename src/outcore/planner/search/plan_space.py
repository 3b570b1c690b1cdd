"""Plans that a search tries: the kind of homes of every unit, slots, and where and when updates run.

A candidate is small and can be compared; ``PlanSpace.plan`` turns it into a plan. Units with the same kind of homes
mostly stand side by side, since units in a row differ in when they are needed and in little else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.pools import Comfort, Placement, Placer, TierBytes, UnitHomes, with_slots
from outcore.planner.homes.share import can_be_staged, spread
from outcore.spec.budget import can_be_early
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Policy, Pool, Tier
from outcore.spec.schedule import ROOT

KINDS = (
    UnitHomes("device", "device", "device"),
    UnitHomes("device", "device", "host"),
    UnitHomes("device", "host", "host"),
    UnitHomes("host", "host", "host"),
    UnitHomes("device", "host", "disk"),
    UnitHomes("host", "host", "disk"),
    UnitHomes("host", "disk", "disk"),
    UnitHomes("disk", "disk", "disk"),
)
"""The kinds of homes that are tried, from near to far."""
ALL_DEVICE, ALL_HOST, ALL_DISK = KINDS[0], KINDS[3], KINDS[-1]
ROOMY = Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3)
LEAN = Comfort(prefetch_depth=1, num_buckets=1, max_slots_host=1)
TIGHT = Comfort(prefetch_depth=0, num_buckets=1, max_slots_host=1)
SMALL = 8
"""In models of at most this many units beside the root, changes of single units are tried, too."""
_MOST = {"prefetch_depth": 5, "num_buckets": 6, "max_slots_host": 4}


@dataclass(frozen=True)
class Candidate:
    """A plan in few words."""

    kinds: tuple[UnitHomes, ...]
    """The kind of every unit, the root first."""
    comfort: Comfort = ROOMY
    share: float = 0.0
    """The fraction that the device updates of the units with states in host memory."""
    early: float = 0.0
    """The fraction updated inside backward of the remaining units that can be."""
    first: tuple[int, ...] = ()
    """Units whose updates ``step()`` begins with, in this order, by their places in the model."""
    woven: bool = False
    """Of the other updates, those with states on disk are spread among the rest, so that drive and host both work."""
    in_turn: bool = False
    """Units whose states are still in slots are updated in their turn, not first."""
    saves: ActivationPolicy | None = None
    """What some units save beyond their arguments, or off the device; None if all save their arguments only."""

    @functools.cached_property
    def order(self) -> tuple[object, ...]:
        """Sort key among equally good candidates."""
        return self.kinds, repr(self._rest)

    @property
    def _rest(self) -> tuple[object, ...]:
        return self.comfort, self.share, self.early, self.first, self.woven, self.in_turn, self.saves

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kinds, self._rest))

    def __hash__(self) -> int:  # kept: kinds can be hundreds, and the hash is asked for again and again
        return self._hash


class PlanSpace:
    """Turns candidates of one model into plans, and lists the candidates near one."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        policy: Policy = "recompute",
        accumulation_steps: int | None,
        may_be_early: bool,
        ways: Sequence[ActivationPolicy | None] = (None,),
    ) -> None:
        """Set what may be chosen.

        Args:
            model: Units in the plan's order.
            policy: Activation policy of all units but the root.
            accumulation_steps: Micro-batches of a step if their number is promised, else None.
            may_be_early: Whether updates inside backward are allowed.
            ways: What may become of activations.
        """
        self._model, self._ways, self._may_be_early = model, ways, may_be_early
        self._placer = Placer(model, policy=policy, accumulation_steps=accumulation_steps)
        self.alike = self._placer.alike
        usual = range(len(model.units)) if model.units[ROOT].num_ranks > 1 else (*range(1, len(model.units)), ROOT)
        self._trained = [i for i in usual if model.units[i].trainable]
        """Units in the usual order of updates: see ``weight_cache.update_order``."""
        self._can_be = functools.cache(self._tell_one)
        self._placements, self._taken = functools.cache(self._tell), functools.cache(self._take)
        # A staging slot holds all states of a unit, so embeddings would make every slot as large as they need.
        sizes = Counter(u.update_bytes for u in model.units[1:] if u.update_bytes)
        self._most_staged_bytes = 2 * max(sizes, key=lambda nbytes: (sizes[nbytes], nbytes), default=0)

    def plan(self, candidate: Candidate) -> Plan:
        """Turn a candidate into a plan."""
        pools, taken = self._taken(candidate)
        plan = self._placer.plan(self._placements(candidate), candidate.comfort, pools)
        return replace(
            plan,
            updated_first=tuple(plan.units[i].name for i in self._updated_first(candidate)),
            kept_updated_first=not candidate.in_turn,
            tier_bytes=taken._asdict(),
        )

    def tier_bytes(self, candidate: Candidate) -> dict[Tier, int]:
        """Bytes that a candidate takes on each tier, slots included."""
        return self._taken(candidate)[1]._asdict()  # type: ignore[return-value]

    def _take(self, candidate: Candidate) -> tuple[tuple[Pool, ...], TierBytes]:
        counts = Counter(zip(self.alike, self._placements(candidate), strict=True)).items()
        return with_slots(self._placer.homes_bytes(counts), self._placer.needs(counts), candidate.comfort)

    def _updated_first(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the units whose updates come first; the others follow in the usual order."""
        named = [i for i in candidate.first if i in self._trained]
        rest = [i for i in self._trained if i not in set(named)] if candidate.woven else []
        slow = [i for i in rest if candidate.kinds[i].states == "disk"]
        if not 0 < len(slow) < len(rest):
            return candidate.first
        fast = [i for i in rest if candidate.kinds[i].states != "disk"]
        spread_out = [((place + 0.5) / len(group), i) for group in (slow, fast) for place, i in enumerate(group)]
        return _shortest([*named, *(i for _, i in sorted(spread_out))], self._trained)

    def _tell(self, candidate: Candidate) -> list[Placement]:
        """Return of every unit its homes, whether the device updates it, and whether its update is early."""
        if not candidate.share and not candidate.early:
            return list(map(Placement, candidate.kinds))
        able = [self._can_be(i, kind) for i, kind in zip(self.alike, candidate.kinds, strict=True)]
        staged = spread([i for i, (can_be_staged, _) in enumerate(able) if can_be_staged], candidate.share)
        others = [i for i, (_, can_be_early) in enumerate(able) if can_be_early and i not in staged]
        early = spread(others, candidate.early)
        return [Placement(kind, i in staged, i in early) for i, kind in enumerate(candidate.kinds)]

    def _tell_one(self, index: int, kind: UnitHomes) -> tuple[bool, bool]:
        """Return whether a unit can be updated on the device, and whether inside backward."""
        spec, unit = self._model.units[index], self._placer.unit(index, Placement(kind))
        return spec.update_bytes <= self._most_staged_bytes and can_be_staged(unit), can_be_early(spec, unit)

    def uniform(
        self, kind: UnitHomes, comfort: Comfort = ROOMY, *, saves: ActivationPolicy | None = None, woven: bool = False
    ) -> Candidate:
        """Return the candidate in which all units have the same kind."""
        return Candidate((kind,) * len(self._model.units), comfort, saves=saves, woven=woven)

    def of(self, plan: Plan) -> Candidate:
        """Return the candidate that is most like a plan, with ``share`` and ``early`` left at 0."""
        kinds = tuple(UnitHomes(unit.weights, unit.gradients, unit.states) for unit in plan.units)
        slots = {(pool.tier, pool.kind): pool.num_slots for pool in plan.pools}
        most = max((n for (tier, _), n in slots.items() if tier == "host"), default=ROOMY.max_slots_host)
        buckets = slots.get(("device", "bucket"), ROOMY.num_buckets)
        depth = max(plan.prefetch_depth, slots.get(("device", "weights"), 1) - 1)
        comfort = Comfort(prefetch_depth=depth, num_buckets=buckets, max_slots_host=most)
        names = [unit.name for unit in plan.units]
        first = tuple(map(names.index, plan.updated_first))
        return Candidate(kinds, comfort, first=first, in_turn=not plan.kept_updated_first)

    def neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that are one change away, in a fixed order, large changes first."""
        yield from self._other_updates(candidate)
        yield from (replace(candidate, saves=saves) for saves in self._other_ways(candidate.saves))
        yield from self._other_slots(candidate)
        yield from self._other_homes(candidate)

    def _other_updates(self, candidate: Candidate) -> Iterator[Candidate]:
        yield from (replace(candidate, share=share) for share in (0.0, 1.0) if share != candidate.share)
        for by in (0.5, 0.25, 1 / 16):
            for share in (candidate.share - by, candidate.share + by):
                if 0 <= share <= 1:
                    yield replace(candidate, share=share)
            for early in (candidate.early - by, candidate.early + by) if self._may_be_early else ():
                if 0 <= early <= 1:
                    yield replace(candidate, early=early)

    def turned(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with ``woven`` or, if it has slots for states, ``in_turn`` changed, or the root first."""
        other = replace(candidate, woven=not candidate.woven)
        if self._updated_first(other) != self._updated_first(candidate):
            yield other
        if any(pool.kind == "states" for pool in self._taken(candidate)[0]):
            yield replace(candidate, in_turn=not candidate.in_turn)
        if self._trained[-1:] == [ROOT] and ROOT not in candidate.first:
            yield replace(candidate, first=(ROOT, *candidate.first))

    def other_orders(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates whose updates begin with more or fewer of the last units, whose gradients come first."""
        root = candidate.first[:1] if candidate.first[:1] == (ROOT,) else ()
        last, now = len(candidate.kinds) - 1, len(candidate.first) - len(root)
        for by in dict.fromkeys((round(last / 2), round(last / 4), round(last / 8), 1)):
            for number in (now + by, now - by) if by else ():
                if 0 <= number <= last:
                    yield replace(candidate, first=(*root, *range(last, last - number, -1)))

    def _other_ways(self, now: ActivationPolicy | None) -> Iterator[ActivationPolicy | None]:
        """Yield other ways with activations, and the same way for more or fewer units."""
        by = (0.5, 0.25, 1 / 8, 1 / len(self._model.units))
        for way in self._ways if len(self._ways) > 1 else ():
            if way is None or now is None or way._replace(share=now.share) != now:
                yield way
                shares = by[:2] if now is None else (now.share,)
                yield from (way._replace(share=share) for share in shares if way is not None)
        if now is not None and len(self._ways) > 1:
            changed = (now.share + sign * step for step in by for sign in (-1, 1))
            yield from (now._replace(share=share) for share in changed if 0 < share <= 1)

    def _other_slots(self, candidate: Candidate) -> Iterator[Candidate]:
        if candidate.comfort != TIGHT:  # leaves room for activations
            yield replace(candidate, comfort=TIGHT)
        for name, most in _MOST.items():
            number = getattr(candidate.comfort, name)
            for other in (number + 1, number - 1):
                if (0 if name == "prefetch_depth" else 1) <= other <= most:
                    yield replace(candidate, comfort=replace(candidate.comfort, **{name: other}))

    def _other_homes(self, candidate: Candidate) -> Iterator[Candidate]:
        """Move borders between kinds; give units at one end, or single ones of a small model, another kind."""
        kinds, count = candidate.kinds, len(candidate.kinds)
        steps = sorted({1, 2, count // 16, count // 6} - {0}, reverse=True)
        border = 0
        for _, group in list(groupby(kinds))[:-1]:
            border += len(list(group))
            for step in steps:
                left, right = max(border - step, 0), min(border + step, count)
                yield replace(candidate, kinds=_filled(kinds, left, border, kinds[border]))
                yield replace(candidate, kinds=_filled(kinds, border, right, kinds[border - 1]))
        ends = {(1, min(1 + step, count)) for step in steps} | {(count - step, count) for step in steps} | {(0, 1)}
        singles = {(i, i + 1) for i in range(count)} if count - 1 <= SMALL else set()
        for start, stop in sorted(ends | singles):
            for kind in KINDS:
                yield replace(candidate, kinds=_filled(kinds, start, stop, kind))

    def rank(self, kind: UnitHomes) -> int:
        """Return how far a kind is. A kind that is not in ``KINDS`` ranks as the first with its tier of states."""
        alike = (i for i, known in enumerate(KINDS) if known.states == kind.states)
        return KINDS.index(kind) if kind in KINDS else next(alike)


def _filled(kinds: Sequence[UnitHomes], start: int, stop: int, kind: UnitHomes) -> tuple[UnitHomes, ...]:
    return (*kinds[:start], *((kind,) * (stop - start)), *kinds[stop:])


def _shortest(order: Sequence[int], trained: Sequence[int]) -> tuple[int, ...]:
    """Leave out the last ones of an order which follow the others as in the usual order, ``trained``, anyway."""
    place_of = {unit: place for place, unit in enumerate(trained)}
    number = len(order) - 1
    while number > 0 and place_of[order[number - 1]] < place_of[order[number]]:
        number -= 1
    return tuple(order[:number])
