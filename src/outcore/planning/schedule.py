"""From a plan and the order of visits to the operations of one training step, with everything that orders them.

Pure: what a simulator runs over, and what tests hold the runtime against. One function per kind of traffic; each says
what the runtime submits for it, and after what. Steps repeat, so two equal ones are laid out one behind the other and
the second is the schedule: what it waits for of the first is what a step waits for of the one before.

What visits do not tell is taken as usual: backward visits in a row are one backward pass, every unit that backward
reaches gets a gradient and is updated, gradients are dropped after each step, and the clip factor, which needs all
gradients, holds every update back until backward is over.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from outcore.core.errors import ConfigError
from outcore.planning.reservations import states_of
from outcore.planning.weight_cache import Held, Move, Moves, changed_units, nothing_held, weight_moves
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, PoolKind, Tier, UnitPlan
from outcore.spec.schedule import Kind, Operation, Phase, Schedule, Visit
from outcore.spec.timeline import COMPUTE

_MAX_WARM_UP = 16
ROOT = 0


def usual_visits(model: ModelSpec, micro_batches: int = 1) -> tuple[Visit, ...]:
    """The visits of a step if every unit is used once in forward, in module order: what to expect of an unknown loop.

    The root's visits stand between forward and backward, where its head and the loss are.
    """
    units = range(1, len(model.units))
    forward = (*(Visit(Phase.FORWARD, i) for i in units), Visit(Phase.FORWARD, ROOT))
    backward = (Visit(Phase.BACKWARD, ROOT), *(Visit(Phase.BACKWARD, i) for i in reversed(units)))
    return (forward + backward) * micro_batches


def update_order(visits: Iterable[Visit], num_units: int) -> list[int]:
    """In which order ``step()`` updates units: first used, first updated. The root comes first if it is not visited."""
    used = dict.fromkeys(visit.unit for visit in visits)
    first = [] if ROOT in used else [ROOT]
    return [*first, *used, *(i for i in range(1, num_units) if i not in used)]


def schedule(model: ModelSpec, plan: Plan, visits: Sequence[Visit]) -> Schedule:
    """List what one training step among equal ones does.

    Args:
        model: Units in the plan's order.
        plan: Checked against the model.
        visits: From one ``step()`` to the next, of any number of micro-batches.

    Raises:
        ConfigError: The plan lacks slots that these visits need.
    """
    held = before = nothing_held(plan)
    for _ in range(_MAX_WARM_UP):  # where slots are too few for what no step changes, contents may go round for ever
        held, before = weight_moves(model, plan, visits, held).held, held
        if held == before:
            break
    return consecutive(model, plan, visits, held, 2)[-1]


def consecutive(model: ModelSpec, plan: Plan, visits: Sequence[Visit], held: Held, num_steps: int) -> list[Schedule]:
    """Schedules of steps with the same visits, one behind the other.

    Args:
        model: Units in the plan's order.
        plan: Checked against the model.
        visits: Of each step.
        held: What slots for weights hold when the first one begins.
        num_steps: How many.
    """
    steps, schedules = _Steps(model, plan, held), []
    names = [unit.name for unit in model.units]
    for _ in range(num_steps):
        begin, moves = len(steps.operations), weight_moves(model, plan, visits, held)
        steps.lay_out(visits, moves)
        mine = [replace(op, after=tuple(i - begin for i in op.after)) for op in steps.operations[begin:]]
        on_device, on_host = (tuple(None if i is None else names[i] for i in units) for units in held)
        schedules.append(Schedule(operations=tuple(mine), held_device=on_device, held_host=on_host))
        held = moves.held
    return schedules


@dataclass(slots=True)
class _Home:
    """Operations, as ``[Note: handles of a unit]`` has handles: who wrote a home last, and who reads it since."""

    ready: int | None = None
    readers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """Of a weights cache: what must be over before it is written again, and what wrote it."""

    free_after: list[int] = field(default_factory=list)
    written: int | None = None
    unit: int | None = None


class _Turns:
    """Slots that are taken in turn; None: nothing to wait for."""

    def __init__(self, num_slots: int) -> None:
        self._free_after: deque[int | None] = deque([None] * num_slots)

    def take(self) -> int | None:
        return self._free_after.popleft()

    def give(self, free_after: int) -> None:
        self._free_after.append(free_after)

    @property
    def is_empty(self) -> bool:
        return not self._free_after


class _Unit:
    """A unit and the operations that concern it."""

    def __init__(self, index: int, spec: UnitSpec, plan: UnitPlan, model: ModelSpec) -> None:
        self.index, self.spec, self.plan = index, spec, plan
        self.states_bytes = spec.update_bytes * len(states_of(plan, model))
        self.weights, self.gradients, self.states = _Home(), _Home(), _Home()
        self.is_open = False  # has gradients of this pass on the device
        self.bucket: _Turns | None = None  # the pool whose slot they are in
        self.has_gradients = False


class _Steps:
    """Lays out operations; remembers homes, slots and the last use of everything across steps."""

    def __init__(self, model: ModelSpec, plan: Plan, held: Held) -> None:
        self.operations: list[Operation] = []
        self._model, self._plan = model, plan
        pairs = zip(model.units, plan.units, strict=True)
        self._units = [_Unit(i, spec, unit, model) for i, (spec, unit) in enumerate(pairs)]
        self._slots = {tier: [_Slot(unit=unit) for unit in getattr(held, tier)] for tier in Held._fields}
        self._turns = {i: _Turns(pool.num_slots) for i, pool in enumerate(plan.pools)}
        self._computed: int | None = None
        self._backward_over: int | None = None
        self._reached: dict[int, _Unit] = {}  # by this backward pass

    def lay_out(self, visits: Sequence[Visit], moves: Moves) -> None:
        """One step."""
        waiting = deque(moves.moves)
        for i, visit in enumerate(visits):
            while waiting and waiting[0].due <= i:
                self._move(waiting.popleft())
            self._visit(visit)
            if visit.phase is Phase.BACKWARD:
                self._end_visit(i, visits)
        self._backward_over = self._computed
        changed = changed_units(self._model, visits)
        for index in update_order(visits, len(self._units)):
            if index in changed:
                self._update(self._units[index])

    def _add(
        self, lane: str, kind: Kind, unit: _Unit, nbytes: int, after: Iterable[int | None], move: Move | None = None
    ) -> int:
        slot = move.slot if move is not None else None
        evicts = self._units[move.evicts].spec.name if move is not None and move.evicts is not None else None
        order = tuple(sorted({i for i in after if i is not None}))
        self.operations.append(
            Operation(lane=lane, kind=kind, unit=unit.spec.name, nbytes=nbytes, after=order, slot=slot, evicts=evicts)
        )
        if lane == COMPUTE:
            self._computed = len(self.operations) - 1
        return len(self.operations) - 1

    def _pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> _Turns:
        """The pool of the smallest slots that hold so much."""
        pools = [(p.slot_bytes, i) for i, p in enumerate(self._plan.pools) if (p.tier, p.kind) == (tier, kind)]
        found = min((pair for pair in pools if pair[0] >= nbytes), default=None)
        if found is None:
            raise ConfigError(
                f"schedule: expected a pool of {kind} slots on {tier} of at least {nbytes} bytes in the plan"
            )
        return self._turns[found[1]]

    # Weights.

    def _move(self, move: Move) -> None:
        unit, slot = self._units[move.unit], self._slots[move.tier][move.slot]
        free_after = [*slot.free_after, slot.written]
        if move.tier == "host":
            written = self._add(
                "weights_read", "read weights of", unit, unit.spec.weight_bytes, [*free_after, unit.weights.ready], move
            )
            unit.weights.readers.append(written)
        else:
            written = self._fetch(unit, free_after, move)
        slot.free_after, slot.written, slot.unit = [], written, unit.index

    def _fetch(self, unit: _Unit, free_after: list[int | None], move: Move) -> int:
        if unit.plan.weights == "host":
            fetched = self._add("h2d", "fetch", unit, unit.spec.weight_bytes, [*free_after, unit.weights.ready], move)
            unit.weights.readers.append(fetched)
            return fetched
        source = self._slot_of(unit, "host")
        fetched = self._add("h2d", "fetch", unit, unit.spec.weight_bytes, [*free_after, source.written], move)
        source.free_after = [fetched]
        return fetched

    def _slot_of(self, unit: _Unit, tier: str) -> _Slot:
        return next(slot for slot in self._slots[tier] if slot.unit == unit.index)

    # Compute.

    def _visit(self, visit: Visit) -> None:
        unit = self._units[visit.unit]
        is_streamed = unit.plan.weights != "device" and unit.spec.weight_bytes
        slot = self._slot_of(unit, "device") if is_streamed else None
        present = unit.weights.ready if slot is None else slot.written
        kind: Kind = visit.phase.value
        done = self._add(COMPUTE, kind, unit, 0, [present])
        if visit.phase is Phase.BACKWARD and unit.spec.trainable:
            done = self._collect(unit)
        if slot is not None:
            slot.free_after = [done]

    def _collect(self, unit: _Unit) -> int:
        """Gradients of one visit go into the unit's bucket; those of the root, and for a home here, stay loose."""
        self._reached[unit.index], unit.is_open = unit, True
        if unit.index == ROOT or unit.plan.gradients == "device":
            return self._last_computed
        free_after = None
        if unit.bucket is None:
            pool = self._pool("device", "bucket", unit.spec.trainable_bytes)
            while pool.is_empty:  # all are held by units that come again: one goes home early, its rest is added there
                self._send_gradients(next(u for u in self._reached.values() if u.bucket is pool))
            unit.bucket, free_after = pool, pool.take()
        return self._add(COMPUTE, "gradients of", unit, unit.spec.trainable_bytes, [free_after])

    @property
    def _last_computed(self) -> int:
        if self._computed is None:
            raise AssertionError("gradients without compute")
        return self._computed

    def _end_visit(self, i: int, visits: Sequence[Visit]) -> None:
        """Send home what is complete: a unit's gradients with its last visit of the pass, the root's with the pass."""
        unit, rest = self._units[visits[i].unit], _rest_of_pass(i, visits)
        if unit.index != ROOT and unit.index not in rest and unit.is_open:
            self._send_gradients(unit)
        if not rest:
            if self._units[ROOT].spec.trainable:
                self._send_gradients(self._units[ROOT])
            self._reached.clear()

    # Gradients.

    def _send_gradients(self, unit: _Unit) -> None:
        unit.is_open = False
        is_first, unit.has_gradients = not unit.has_gradients, True
        home = unit.gradients
        if unit.plan.gradients == "device":
            after = [home.ready, *home.readers]
            unit.gradients = _Home(self._add(COMPUTE, "accumulate", unit, unit.spec.update_bytes, after))
        elif unit.plan.gradients == "host" and is_first:
            unit.gradients = _Home(self._copy_out(unit, [home.ready, *home.readers]))
        else:
            self._land(unit, is_first=is_first)

    def _copy_out(self, unit: _Unit, after: Iterable[int | None]) -> int:
        copied = self._add("d2h", "gradients of", unit, unit.spec.trainable_bytes, [self._computed, *after])
        if unit.bucket is not None:
            unit.bucket.give(copied)
            unit.bucket = None
        return copied

    def _land(self, unit: _Unit, *, is_first: bool) -> None:
        """Gradients that are not simply copied to their home pass through a landing slot."""
        landing = self._pool("host", "landing", unit.spec.trainable_bytes)
        landed = self._copy_out(unit, [landing.take()])
        if is_first:
            landing.give(self._write_gradients(unit, unit.spec.trainable_bytes, landed))
            return
        target, home = None, unit.gradients
        if unit.plan.gradients == "disk":
            target, read = self._read_gradients(unit)
            after = [landed, *read]
        else:
            after = [landed, home.ready, *home.readers]
        added = self._add("update", "accumulate", unit, unit.spec.update_bytes, after)
        landing.give(added)
        if target is None:
            unit.gradients = _Home(added)
        else:
            target.give(self._write_gradients(unit, unit.spec.update_bytes, added))

    def _write_gradients(self, unit: _Unit, nbytes: int, made: int) -> int:
        home = unit.gradients
        after = [made, home.ready, *home.readers]
        written = self._add("disk_write", "write gradients of", unit, nbytes, after)
        unit.gradients = _Home(written)
        return written

    def _read_gradients(self, unit: _Unit) -> tuple[_Turns, list[int | None]]:
        """Bring gradients from disk or device into a host slot; what uses them there comes after the result."""
        pool = self._pool("host", "gradients", unit.spec.update_bytes)
        after = [pool.take(), unit.gradients.ready]
        if unit.plan.gradients == "disk":
            read = self._add("states_read", "read gradients of", unit, unit.spec.update_bytes, after)
        else:
            read = self._add("d2h", "gradients of", unit, unit.spec.update_bytes, after)
        unit.gradients.readers.append(read)
        return pool, [read]

    # Updates.

    def _update(self, unit: _Unit) -> None:
        unit.has_gradients = False
        if unit.plan.states == "device":
            after = [unit.gradients.ready, unit.states.ready, unit.weights.ready]
            done = self._add(COMPUTE, "update", unit, unit.spec.trainable_bytes + unit.states_bytes, after)
            unit.states.ready = unit.weights.ready = done
        else:
            self._update_on_host(unit)

    def _update_on_host(self, unit: _Unit) -> None:
        """Bring what is missing, update, write back."""
        slots: dict[str, _Turns] = {}
        after: list[int | None] = [self._backward_over]  # for the clip factor
        if unit.plan.gradients == "host":
            after.append(unit.gradients.ready)
        else:
            slots["gradients"], read = self._read_gradients(unit)
            after += read
        if unit.plan.states == "disk" and unit.states_bytes:
            slots["states"] = self._pool("host", "states", unit.states_bytes)
            needs = [slots["states"].take(), unit.states.ready]
            after.append(self._add("states_read", "read states of", unit, unit.states_bytes, needs))
        else:
            after.append(unit.states.ready)
        if unit.plan.weights == "host":
            after += [unit.weights.ready, *unit.weights.readers]
        else:
            slots["weights"] = self._pool("host", "new_weights", unit.spec.trainable_bytes)
            after.append(slots["weights"].take())
        done = self._add("update", "update", unit, unit.spec.trainable_bytes + unit.states_bytes, after)
        self._write_back(unit, done, slots)

    def _write_back(self, unit: _Unit, done: int, slots: dict[str, _Turns]) -> None:
        if "gradients" in slots:
            slots["gradients"].give(done)
        else:
            unit.gradients.readers = [done]
        unit.states.ready = done
        if "states" in slots:
            unit.states.ready = self._add("disk_write", "write states of", unit, unit.states_bytes, [done])
            slots["states"].give(unit.states.ready)
        if "weights" in slots:
            is_resident = unit.plan.weights == "device"
            lane, users = ("write_back", [self._computed]) if is_resident else ("disk_write", unit.weights.readers)
            after = [done, *users, unit.weights.ready]
            done = self._add(lane, "write weights of", unit, unit.spec.trainable_bytes, after)
            slots["weights"].give(done)
        unit.weights = _Home(done)


def _rest_of_pass(i: int, visits: Sequence[Visit]) -> set[int]:
    """Units that the backward pass of a visit reaches after it."""
    after = itertools.takewhile(lambda visit: visit.phase is Phase.BACKWARD, itertools.islice(visits, i + 1, None))
    return {visit.unit for visit in after}
