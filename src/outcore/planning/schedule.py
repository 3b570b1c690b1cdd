"""From a plan and the order of visits to the operations of one training step, with everything that orders them.

Pure: what a simulator runs over, and what tests hold the runtime against. One function per kind of traffic; each says
what the runtime submits for it, and after what. Steps repeat, so some are laid out one behind the other and the last
one is the schedule: what it waits for of the one before is what a step waits for.

What visits do not tell is taken as usual: backward visits in a row are one backward pass, every unit that backward
reaches gets a gradient and is updated, gradients are dropped after each step, and the clip factor, which needs all
gradients, holds every update in ``step()`` back until backward is over. Early updates are all made in time and kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outcore.planning.operations import Index, Operations, ScheduledUnit
from outcore.planning.schedule_updates import Updates
from outcore.planning.weight_cache import Held, Move, Moves, changed_units, nothing_held, weight_moves
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import ROOT, Kind, Phase, Schedule, Visit
from outcore.spec.timeline import COMPUTE

_MAX_WARM_UP = 16


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
    steps = consecutive(model, plan, visits, nothing_held(plan))
    before, step = next(steps), next(steps)
    for _ in range(_MAX_WARM_UP):  # where slots are too few for what no step changes, contents may go round for ever
        before, step = step, next(steps)  # at least once: in the first step no slot had kept states
        if (before.held_device, before.held_host) == (step.held_device, step.held_host):
            break
    oldest = -len(before.operations)  # what is over for longer orders nothing
    operations = (replace(op, after=tuple(i for i in op.after if i >= oldest)) for op in step.operations)
    return replace(step, operations=tuple(operations))


def consecutive(model: ModelSpec, plan: Plan, visits: Sequence[Visit], held: Held) -> Iterator[Schedule]:
    """Schedules of steps with the same visits, one behind the other, without end.

    Args:
        model: Units in the plan's order.
        plan: Checked against the model.
        visits: Of each step.
        held: What slots for weights hold when the first one begins.
    """
    steps, names = _Steps(model, plan, held), [unit.name for unit in model.units]
    while True:
        begin, moves = len(steps.row), weight_moves(model, plan, visits, held)
        steps.lay_out(visits, moves)
        mine = [replace(op, after=tuple(i - begin for i in op.after)) for op in steps.row[begin:]]
        on_device, on_host = (tuple(None if i is None else names[i] for i in units) for units in held)
        yield Schedule(operations=tuple(mine), held_device=on_device, held_host=on_host)
        held = moves.held


@dataclass(slots=True)
class _CacheSlot:
    """Of a weights cache: what must be over before it is written again, and what wrote it."""

    free_after: list[int] = field(default_factory=list)
    written: Index = None
    unit: int | None = None


class _Steps:
    """Lays out operations; remembers homes, slots and the last use of everything across steps."""

    def __init__(self, model: ModelSpec, plan: Plan, held: Held) -> None:
        self._operations = Operations(model, plan)
        self.row, self._model = self._operations.row, model
        self._updates = Updates(self._operations, model, plan)
        self._slots = {tier: [_CacheSlot(unit=unit) for unit in getattr(held, tier)] for tier in Held._fields}

    def lay_out(self, visits: Sequence[Visit], moves: Moves) -> None:
        """One step."""
        units, waiting = self._operations.units, deque(moves.moves)
        for i, visit in enumerate(visits):
            while waiting and waiting[0].due <= i:
                self._move(waiting.popleft())
            self._visit(visit)
            if visit.phase is Phase.BACKWARD:
                self._updates.gradients.end_visit(i, visits)
        backward_over = self._operations.computed
        changed = changed_units(self._model, visits)
        for index in self._updates.kept_first(update_order(visits, len(units))):
            if index in changed:
                self._updates.update(units[index], backward_over)

    def _move(self, move: Move) -> None:
        unit, slot = self._operations.units[move.unit], self._slots[move.tier][move.slot]
        free_after, nbytes = [*slot.free_after, slot.written], unit.spec.weight_bytes
        if move.tier == "host":
            after = [*free_after, unit.weights.ready]
            written = self._operations.add("weights_read", "read weights of", unit, nbytes, after, move)
            unit.weights.readers.append(written)
        else:
            written = self._fetch(unit, free_after, move)
        slot.free_after, slot.written, slot.unit = [], written, unit.index

    def _fetch(self, unit: ScheduledUnit, free_after: list[Index], move: Move) -> int:
        nbytes = unit.spec.weight_bytes
        if unit.plan.weights == "host":
            fetched = self._operations.add("h2d", "fetch", unit, nbytes, [*free_after, unit.weights.ready], move)
            unit.weights.readers.append(fetched)
            return fetched
        source = self._slot_of(unit, "host")
        fetched = self._operations.add("h2d", "fetch", unit, nbytes, [*free_after, source.written], move)
        source.free_after = [fetched]
        return fetched

    def _slot_of(self, unit: ScheduledUnit, tier: str) -> _CacheSlot:
        return next(slot for slot in self._slots[tier] if slot.unit == unit.index)

    def _visit(self, visit: Visit) -> None:
        unit = self._operations.units[visit.unit]
        is_streamed = unit.plan.weights != "device" and unit.spec.weight_bytes
        slot = self._slot_of(unit, "device") if is_streamed else None
        present = unit.weights.ready if slot is None else slot.written
        kind: Kind = visit.phase.value
        done = self._operations.add(COMPUTE, kind, unit, 0, [present])
        if visit.phase is Phase.BACKWARD and unit.spec.trainable:
            done = self._updates.gradients.collect(unit)
        if slot is not None:
            slot.free_after = [done]
