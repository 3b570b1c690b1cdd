"""Which weights each slot holds, and when they are loaded: Belady's rule over the visits of a step.

Slots on the device are a cache of units. Host slots, for weights whose home is disk, are a cache behind it that every
fetch uses. Both follow the same rule: a missing unit takes the slot whose content is used again last (L. A. Belady, "A
study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966); no other rule loads
less. The future is known: steps repeat, so this step's visits come again after it. Units that the step changes are
worth nothing beyond its end.

*When* to load is a separate question. A load may begin as soon as compute is done with what it replaces, however long
before its use, and loads are made in that order. Units may also be used in turn, over and over. Then the unit used last
is needed last, and what replaces it cannot be loaded ahead. So ``Plan.prefetch_depth`` asks for time: where possible, a
unit takes a slot that is free that many visits before its use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from outcore.core.errors import ConfigError
from outcore.spec.layout import in_slot
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Tier
from outcore.spec.schedule import ROOT, Phase, Visit

NEVER = 2**62
STEPS_AHEAD = 3  # this step, the next one, whose first loads may be made in this one, and the one after that


class HeldUnits(NamedTuple):
    """Unit whose weights each slot holds, in the order of ``slot_sizes``; None: an empty slot."""

    device: tuple[int | None, ...]
    host: tuple[int | None, ...]


class Move(NamedTuple):
    """A load of a unit's weights into a slot."""

    tier: Literal["device", "host"]
    """Tier of the slot.
    ``host`` reads from disk; ``device`` fetches from the home, or from the host slot that was read into."""
    unit: int
    slot: int
    evicts: int | None
    """Unit whose weights are in the slot until then."""
    due: int
    """First visit before which the move can be made: by then compute is done with what the slot holds."""
    use: int
    """Visit that needs the move; the count goes on into the next step."""


class Moves(NamedTuple):
    """Moves of a step, in order, and the content of slots when the step's updates have been submitted."""

    moves: tuple[Move, ...]
    held: HeldUnits


class Use(NamedTuple):
    """A request to a cache for the weights of a unit."""

    at: int
    """Position in time."""
    unit: int
    step: int


class SlotFill(NamedTuple):
    """A use that missed, and the slot that is filled for it."""

    use: Use
    slot: int
    evicts: int | None
    free: int
    """First position at which the slot is not in use."""


@dataclass(frozen=True)
class Cache:
    """Slots, and the units that may use each of them."""

    slots_of: Mapping[int, Sequence[int]]
    """Unit -> slots that it may use."""
    changed: frozenset[int]
    """Units whose weights another step must not use again."""
    depth: int = 0
    """Number of positions by which a slot should be free before the use that it is filled for."""


@dataclass(slots=True)
class _SlotState:
    """Content of a slot at a position in time."""

    unit: int | None
    next_use: int
    free: int = 0
    step: int = 0


def belady(uses: Sequence[Use], cache: Cache, held: Sequence[int | None]) -> Iterator[SlotFill]:
    """Yield a load for each use that misses.

    A load evicts the unit that is used again last; among equals it takes the slot that has been free for longest.

    Args:
        uses: Uses in the order of time.
        cache: The slots.
        held: Unit that each slot holds at first.

    Cost: O(uses + loads * slots).
    """
    next_uses, first_uses = _next_uses(uses, cache.changed)
    slots = [_SlotState(unit, NEVER if unit is None else first_uses.get(unit, NEVER)) for unit in held]
    for use, next_use in zip(uses, next_uses, strict=True):
        mine = [(i, slots[i]) for i in cache.slots_of[use.unit]]
        is_lost = use.unit in cache.changed
        index = next((i for i, s in mine if s.unit == use.unit and not (is_lost and s.step != use.step)), None)
        if index is None:
            index = _victim(use.at, cache, mine)
            yield SlotFill(use, index, slots[index].unit, slots[index].free)
        slots[index] = _SlotState(use.unit, next_use, use.at + 1, use.step)


def _victim(at: int, cache: Cache, slots: Sequence[tuple[int, _SlotState]]) -> int:
    in_time = max(at - cache.depth, min(slot.free for _, slot in slots))
    candidates = [(i, slot) for i, slot in slots if slot.free <= in_time]
    return max(candidates, key=lambda pair: (pair[1].next_use, -pair[1].free, -pair[0]))[0]


def _next_uses(uses: Sequence[Use], changed: frozenset[int]) -> tuple[list[int], dict[int, int]]:
    """Return the position of the next use for each use's unit, and the position of the first use for each unit."""
    next_uses: list[int] = []
    seen: dict[int, Use] = {}
    for use in reversed(uses):
        coming = seen.get(use.unit)
        is_lost = coming is None or (coming.step != use.step and use.unit in changed)
        next_uses.append(NEVER if coming is None or is_lost else coming.at)
        seen[use.unit] = use
    return next_uses[::-1], {unit: use.at for unit, use in seen.items()}


def slot_sizes(plan: Plan, tier: Tier) -> list[int]:
    """Return the bytes of every slot for weights on a tier, smallest first."""
    pools = sorted((p for p in plan.pools if (p.tier, p.kind) == (tier, "weights")), key=lambda p: p.slot_bytes)
    return [pool.slot_bytes for pool in pools for _ in range(pool.num_slots)]


def slots_for(sizes: Sequence[int], nbytes: int) -> list[int]:
    """Return the slots that weights of a size may use: the smallest that hold them. Empty if all are too small."""
    size = min((size for size in sizes if size >= nbytes), default=None)
    return [i for i, other in enumerate(sizes) if other == size]


def nothing_held(plan: Plan) -> HeldUnits:
    """Return the content of slots when a run begins: all are empty."""
    return HeldUnits((None,) * len(slot_sizes(plan, "device")), (None,) * len(slot_sizes(plan, "host")))


def changed_units(model: ModelSpec, visits: Iterable[Visit]) -> frozenset[int]:
    """Return the units that a step updates, judging by its visits: those that backward reaches, and with them the root.

    Units without trainable parameters are left out.
    """
    reached = {visit.unit for visit in visits if visit.phase is Phase.BACKWARD}
    return frozenset(unit for unit in reached | {0} if reached and model.units[unit].trainable)


def weight_moves(model: ModelSpec, plan: Plan, visits: Sequence[Visit], held: HeldUnits) -> Moves:
    """Decide what a step moves into slots for weights.

    A step begins when the updates of the step before have been submitted. Weights that these updates change are not
    moved before that. Weights of other units may be moved ahead of the next step.

    Args:
        model: Model with units in the plan's order.
        plan: Plan with homes, slots and ``prefetch_depth``.
        visits: Visits of the step; those of the following steps are the same.
        held: Content of the slots when the step begins.
    """
    changed, period = changed_units(model, visits), len(visits)
    all_fetches = _fetches(_streamed(model, plan, "device"), visits, changed, plan.prefetch_depth, held.device)
    fetches = list(_without_copies(sorted(all_fetches, key=lambda move: (move.due, move.use)), period, held.device))
    mine = [move for move in fetches if move.due < period]
    depth = min(plan.prefetch_depth, 1)  # enough: a read should not wait for the fetch just before the one it serves
    reads = _reads(_streamed(model, plan, "host"), fetches, period, changed, depth, held.host)
    moves = tuple(_merged(mine, [(due, move) for due, move in reads if due < len(mine)]))
    return Moves(moves, HeldUnits(*(_after(getattr(held, tier), tier, moves, changed) for tier in HeldUnits._fields)))


def _without_copies(fetches: Iterable[Move], period: int, held: Sequence[int | None]) -> Iterator[Move]:
    """Leave out fetches ahead of the next step of units that are still held when this step ends.

    Such a unit was to be evicted early in the next step and fetched again; the next step decides anew.
    """
    slots = list(held)
    for fetch in fetches:
        if fetch.due < period <= fetch.use and fetch.unit in slots:
            continue
        slots[fetch.slot] = fetch.unit
        yield fetch


def _streamed(model: ModelSpec, plan: Plan, tier: Tier) -> dict[int, list[int]]:
    """Return unit -> its slots on a tier, for the units that use slots there."""
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
    """Yield reads from disk, each with the number of fetches that must be made before it."""
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


def update_order(visits: Iterable[Visit] | None, plan: Plan) -> list[int]:
    """Return the order in which ``step()`` updates units: those that the plan names, then first used, first updated.

    The root is the first of the others if it is not visited.

    Args:
        visits: Visits of the step before. None: module order, for several ranks, which may visit different units but
            must update them in the same order.
        plan: Names the units that come first (``updated_first``).
    """
    index = {unit.name: i for i, unit in enumerate(plan.units)}
    used = dict.fromkeys(range(1, len(index)) if visits is None else (visit.unit for visit in visits))
    root = [] if ROOT in used else [ROOT]
    return list(dict.fromkeys([*(index[name] for name in plan.updated_first), *root, *used, *range(1, len(index))]))


MAX_VISITS = 2**16
"""Visits of a step that are remembered; the rest of a longer step is fetched on demand."""

Decide = Callable[[Sequence[Visit], HeldUnits], Moves]


class Cursor:
    """Follows a step along the visits of the one before, and says which moves are due.

    If a visit is not the expected one, the cursor skips to the next place that fits, or stays if there is none. Moves
    whose use was skipped are not made. An unexpected visit is fetched on demand. The next step is expected to repeat
    this one.
    """

    def __init__(self, decide: Decide, expected: Sequence[Visit], held: HeldUnits) -> None:
        """Args: decide: Returns the moves for visits, given what slots hold. expected: Visits of the first step."""
        self._decide = decide
        self.expected, self.seen = tuple(expected), list[Visit]()
        self._decided: tuple[tuple[Visit, ...], HeldUnits] | None = None
        self._moves: tuple[Move, ...] = ()
        self._begin(held)

    def restart(self, held: HeldUnits) -> None:
        """Begin a step. The visits seen are expected again; if none were seen, the expected ones stay."""
        self.expected, self.seen = tuple(self.seen) or self.expected, []
        self._begin(held)

    def reset(self, held: HeldUnits) -> None:
        """Begin again: the visits seen were cut short and are no step."""
        self.seen = []
        self._begin(held)

    def _begin(self, held: HeldUnits) -> None:
        if self._decided != (self.expected, held):
            self._decided, self._moves = (self.expected, held), self._decide(self.expected, held).moves
        self._waiting = deque(self._moves)
        self._next = 0

    def follow(self, visit: Visit, *, may_skip: bool = True) -> None:
        """Note that a visit takes place.

        Args:
            visit: An expected visit or another one.
            may_skip: Whether it may come before expected visits, which are then not expected any more.
        """
        if len(self.seen) < MAX_VISITS:
            self.seen.append(visit)
        stop = len(self.expected) if may_skip else self._next + 1
        found = next((i for i in range(self._next, min(stop, len(self.expected))) if self.expected[i] == visit), None)
        if found is not None:
            self._next = found + 1

    def due(self) -> Iterator[Move]:
        """Yield moves that can be made now, in order, each once, without those that come too late."""
        now = max(self._next - 1, 0)
        while self._waiting and self._waiting[0].due <= now:
            move = self._waiting.popleft()
            if move.use >= now:
                yield move

    def next_use(self, unit: int) -> int:
        """Return the index of a unit's next expected visit; beyond the end if there is none in this step."""
        coming = (i for i in range(self._next, len(self.expected)) if self.expected[i].unit == unit)
        return next(coming, len(self.expected))


class EvaluationRound(Cursor):
    """Follows visits that are not divided into steps, as in evaluation: a round ends when a visit of it comes again."""

    def follow_round(self, visit: Visit, held: Callable[[], HeldUnits]) -> None:
        """Note that a visit takes place; begin a new round if it was in this one."""
        if self.seen and visit == self.seen[-1]:  # a unit that is used twice in a row: nothing moves
            return
        if visit in self.seen:
            del self.seen[: self.seen.index(visit)]
            self.restart(held())
        self.follow(visit)
