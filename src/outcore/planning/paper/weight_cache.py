"""Which weights stand in which slot, and when they come: Belady's rule over the visits of a step.

Slots on the device are a cache of units; host slots for weights whose home is disk are a cache behind it, used by every
fetch. Both follow the same rule: what is missing takes the slot whose content is used again last (L. A. Belady, "A
study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966); no other rule loads
less. The future is known: steps repeat, so this step's visits come again after it. Units that the step changes are
worth nothing beyond its end.

*When* is another question than *what*. A load may begin as soon as compute is done with what it replaces, however long
before its use, and loads are made in that order. Units may also be used in turn, over and over. Then the one used last
is needed last, and what replaces it cannot be loaded ahead. So ``Plan.prefetch_depth`` asks for time: where possible, a
unit takes a slot that is free so many visits before its use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from outcore.core.errors import ConfigError
from outcore.spec.cut import in_slot
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Tier
from outcore.spec.schedule import ROOT, Phase, Visit

NEVER = 2**62
STEPS_AHEAD = 3  # this one, the next one, whose first loads may be made in this one, and what that one is followed by


class Held(NamedTuple):
    """Which unit's weights each slot holds, in the order of ``slot_sizes``; None: nobody's."""

    device: tuple[int | None, ...]
    host: tuple[int | None, ...]


class Move(NamedTuple):
    """Bring a unit's weights into a slot."""

    tier: Literal["device", "host"]
    """``host`` reads from disk; ``device`` fetches from the host, or from the host slot that was read into."""
    unit: int
    slot: int
    evicts: int | None
    """The unit whose weights are in the slot until then."""
    due: int
    """Before which visit it can be made first: by then nobody uses what the slot holds."""
    use: int
    """Which visit needs it; counted on into the next step."""


class Moves(NamedTuple):
    """What a step moves, in order, and what the slots hold when its updates have been submitted."""

    moves: tuple[Move, ...]
    held: Held


class Use(NamedTuple):
    """A cache is asked for a unit."""

    at: int
    """Position in time."""
    unit: int
    step: int


class Load(NamedTuple):
    """A use that found nothing, and the slot that was filled for it."""

    use: Use
    slot: int
    evicts: int | None
    free: int
    """The first position at which the slot is not in use."""


@dataclass(frozen=True)
class Cache:
    """Slots, and who may use them."""

    slots_of: Mapping[int, Sequence[int]]
    """Unit -> its slots."""
    changed: frozenset[int]
    """Units whose weights another step must not use again."""
    depth: int = 0
    """Positions between the moment a slot is free and the use that it is filled for, where a slot allows that."""


@dataclass(slots=True)
class _Slot:
    """What stands in a slot while time passes."""

    unit: int | None
    next_use: int
    free: int = 0
    step: int = 0


def belady(uses: Sequence[Use], cache: Cache, held: Sequence[int | None]) -> Iterator[Load]:
    """Load what uses miss, evicting what is used again last, of equals what has been free for longest.

    Args:
        uses: In order of time.
        cache: Slots.
        held: What they hold at first.

    Cost: O(uses + loads * slots).
    """
    next_uses, first_uses = _next_uses(uses, cache.changed)
    slots = [_Slot(unit, NEVER if unit is None else first_uses.get(unit, NEVER)) for unit in held]
    for use, next_use in zip(uses, next_uses, strict=True):
        mine = [(i, slots[i]) for i in cache.slots_of[use.unit]]
        is_lost = use.unit in cache.changed
        index = next((i for i, s in mine if s.unit == use.unit and not (is_lost and s.step != use.step)), None)
        if index is None:
            index = _victim(use.at, cache, mine)
            yield Load(use, index, slots[index].unit, slots[index].free)
        slots[index] = _Slot(use.unit, next_use, use.at + 1, use.step)


def _victim(at: int, cache: Cache, slots: Sequence[tuple[int, _Slot]]) -> int:
    in_time = max(at - cache.depth, min(slot.free for _, slot in slots))
    candidates = [(i, slot) for i, slot in slots if slot.free <= in_time]
    return max(candidates, key=lambda pair: (pair[1].next_use, -pair[1].free, -pair[0]))[0]


def _next_uses(uses: Sequence[Use], changed: frozenset[int]) -> tuple[list[int], dict[int, int]]:
    """When each use's unit is used next, and when each unit is used first."""
    next_uses: list[int] = []
    seen: dict[int, Use] = {}
    for use in reversed(uses):
        coming = seen.get(use.unit)
        is_lost = coming is None or (coming.step != use.step and use.unit in changed)
        next_uses.append(NEVER if coming is None or is_lost else coming.at)
        seen[use.unit] = use
    return next_uses[::-1], {unit: use.at for unit, use in seen.items()}


def slot_sizes(plan: Plan, tier: Tier) -> list[int]:
    """Bytes of every slot for weights on a tier, smallest first."""
    pools = sorted((p for p in plan.pools if (p.tier, p.kind) == (tier, "weights")), key=lambda p: p.slot_bytes)
    return [pool.slot_bytes for pool in pools for _ in range(pool.num_slots)]


def slots_for(sizes: Sequence[int], nbytes: int) -> list[int]:
    """The slots that weights of a size use: the smallest that hold them. None may."""
    size = min((size for size in sizes if size >= nbytes), default=None)
    return [i for i, other in enumerate(sizes) if other == size]


def nothing_held(plan: Plan) -> Held:
    """Slots as a run finds them."""
    return Held((None,) * len(slot_sizes(plan, "device")), (None,) * len(slot_sizes(plan, "host")))


def changed_units(model: ModelSpec, visits: Iterable[Visit]) -> frozenset[int]:
    """The units that a step updates, as far as its visits tell: those that backward reaches, and with them the root."""
    reached = {visit.unit for visit in visits if visit.phase is Phase.BACKWARD}
    return frozenset(unit for unit in reached | {0} if reached and model.units[unit].trainable)


def weight_moves(model: ModelSpec, plan: Plan, visits: Sequence[Visit], held: Held) -> Moves:
    """Decide what a step moves into slots for weights.

    A step begins when the updates of the step before have been submitted. Before that, no unit is moved that these
    updates change. Other units' weights may be moved ahead of the next step.

    Args:
        model: Units in the plan's order.
        plan: Homes, slots and ``prefetch_depth``.
        visits: Of the step, and of those that follow.
        held: What the slots hold when the step begins.
    """
    changed, period = changed_units(model, visits), len(visits)
    all_fetches = _fetches(_streamed(model, plan, "device"), visits, changed, plan.prefetch_depth, held.device)
    fetches = list(_without_copies(sorted(all_fetches, key=lambda move: (move.due, move.use)), period, held.device))
    mine = [move for move in fetches if move.due < period]
    depth = min(plan.prefetch_depth, 1)  # all that a read must not wait for is the copy of the one before
    reads = _reads(_streamed(model, plan, "host"), fetches, period, changed, depth, held.host)
    moves = tuple(_merged(mine, [(due, move) for due, move in reads if due < len(mine)]))
    return Moves(moves, Held(*(_after(getattr(held, tier), tier, moves, changed) for tier in Held._fields)))


def _without_copies(fetches: Iterable[Move], period: int, held: Sequence[int | None]) -> Iterator[Move]:
    """Leave out what would be fetched ahead of the next step although it is still held when this one ends.

    It was to be evicted early in the next step; that step decides anew.
    """
    slots = list(held)
    for fetch in fetches:
        if fetch.due < period <= fetch.use and fetch.unit in slots:
            continue
        slots[fetch.slot] = fetch.unit
        yield fetch


def _streamed(model: ModelSpec, plan: Plan, tier: Tier) -> dict[int, list[int]]:
    """Unit -> its slots on a tier, for units that use any."""
    sizes = slot_sizes(plan, tier)
    pairs = enumerate(zip(model.units, plan.units, strict=True))
    streamed = {i: nbytes for i, (spec, unit) in pairs if (nbytes := in_slot(spec, unit, tier))}
    by_size = {nbytes: slots_for(sizes, nbytes) for nbytes in set(streamed.values())}
    homeless = [nbytes for nbytes, slots in by_size.items() if not slots]
    if homeless:
        raise ConfigError(
            f"schedule: expected slots for weights of {max(homeless)} bytes on {tier}, but the plan has none"
        )
    return {i: by_size[nbytes] for i, nbytes in streamed.items()}


def _fetches(
    slots_of: Mapping[int, Sequence[int]],
    visits: Sequence[Visit],
    changed: frozenset[int],
    depth: int,
    held: Sequence[int | None],
) -> Iterator[Move]:
    period = len(visits)
    uses = [
        Use(step * period + i, visit.unit, step)
        for step in range(STEPS_AHEAD)
        for i, visit in enumerate(visits)
        if visit.unit in slots_of
    ]
    for load in belady(uses, Cache(slots_of, changed, depth), held):
        begin = load.use.step * period if load.use.unit in changed else 0
        yield Move("device", load.use.unit, load.slot, load.evicts, max(load.free, begin), load.use.at)


def _reads(
    slots_of: Mapping[int, Sequence[int]],
    fetches: Sequence[Move],
    period: int,
    changed: frozenset[int],
    depth: int,
    held: Sequence[int | None],
) -> Iterator[tuple[int, Move]]:
    """Reads from disk, each with the number of fetches that must have been made before."""
    uses = [Use(i, fetch.unit, fetch.due // period) for i, fetch in enumerate(fetches) if fetch.unit in slots_of]
    begins = {
        step: next(group)[0] for step, group in groupby(enumerate(fetches), key=lambda pair: pair[1].due // period)
    }
    for load in belady(uses, Cache(slots_of, changed, depth), held):
        begin = begins[load.use.step] if load.use.unit in changed else 0
        fetch, after = fetches[load.use.at], max(load.free, begin)
        due = fetches[after - 1].due if after else 0
        yield after, Move("host", fetch.unit, load.slot, load.evicts, due, fetch.use)


def _merged(fetches: Sequence[Move], reads: Iterable[tuple[int, Move]]) -> Iterator[Move]:
    waiting = sorted(reads, key=lambda pair: pair[0])
    for i, fetch in enumerate(fetches):
        while waiting and waiting[0][0] <= i:
            yield waiting.pop(0)[1]
        yield fetch


def _after(
    held: Sequence[int | None], tier: str, moves: Iterable[Move], changed: frozenset[int]
) -> tuple[int | None, ...]:
    slots = list(held)
    for move in moves:
        if move.tier == tier:
            slots[move.slot] = move.unit
    return tuple(None if unit in changed else unit for unit in slots)


def update_order(visits: Iterable[Visit] | None, num_units: int, last_first: int = 0) -> list[int]:
    """In which order ``step()`` updates units: first used, first updated. The root comes first if it is not visited.

    Args:
        visits: Of the step before. None: of several ranks, which may visit different units and must go the same way:
            in module order.
        num_units: The root among them.
        last_first: So many of those used last come before all others, the last one first. The root is not among them:
            its gradient comes home last.
    """
    used = dict.fromkeys(range(1, num_units) if visits is None else (visit.unit for visit in visits))
    first = [] if ROOT in used else [ROOT]
    order = [*first, *used, *(i for i in range(1, num_units) if i not in used)]
    late = dict.fromkeys([unit for unit in reversed(used) if unit != ROOT][:last_first])
    return [*late, *(unit for unit in order if unit not in late)]
