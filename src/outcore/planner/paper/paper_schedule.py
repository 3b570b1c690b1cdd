"""From a plan and the order of visits to the operations of one training step, with everything that orders them.

This is pure; a simulator runs over its result. The operations are those of ``outcore.order``, which the engine also
submits; here they are written down. Steps repeat, so several are laid out one behind another. The last of them is the
schedule; its negative indices are what a step waits for in the previous step.

Visits do not tell everything. The rest is assumed to be as usual: backward visits in a row are one backward pass, every
unit that backward reaches gets a gradient and is updated, and gradients are dropped after each step. What timing or
numbers decide in a run is given by the caller (``Circumstances``), or timing is played (``Clock``).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from outcore.order.activations import SavedCall
from outcore.order.attempts import Attempt
from outcore.order.gradients import Turns
from outcore.order.ledger import ByteSpan, Ledger
from outcore.order.slots import SlotPool
from outcore.order.step import StepOrder
from outcore.order.weight_cache import (
    HeldUnits,
    Move,
    Moves,
    changed_units,
    nothing_held,
    update_order,
    weight_moves,
)
from outcore.planner.paper.paper_port import Clock, InTime, Paper, PaperEntry
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import ROOT, Phase, Schedule, Visit

_MAX_WARM_UP = 16


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Conditions that depend on timing or on numbers in a run."""

    clips: bool = True
    """Whether updates in ``step()`` need a clip factor, which depends on all gradients."""
    overtaken: frozenset[str] | None = None
    """Units whose early update is not made. None: all are made, or if steps are played, played time decides."""


def schedule(
    model: ModelSpec, plan: Plan, visits: Sequence[Visit], circumstances: Circumstances | None = None
) -> Schedule:
    """List the operations of one training step in a row of equal ones.

    Args:
        model: Model with units in the plan's order.
        plan: Plan that was checked against the model.
        visits: Visits from one ``step()`` to the next, of any number of micro-batches.
        circumstances: None: the default ones.

    Raises:
        ConfigError: The plan lacks slots for weights that these visits need.
        MemoryBudgetError: The plan lacks other slots.
    """
    steps = consecutive(model, plan, visits, nothing_held(plan), circumstances)
    before, step = next(steps), next(steps)
    # In the first step no slot has kept states yet. If slots are too few for the frozen units, their contents may never
    # repeat; stop after some steps.
    for _ in range(_MAX_WARM_UP):
        before, step = step, next(steps)
        if (before.held_device, before.held_host) == (step.held_device, step.held_host):
            break
    oldest = -len(before.operations)  # operations from before the previous step are over, and order nothing
    operations = (op._replace(after=tuple(i for i in op.after if i >= oldest)) for op in step.operations)
    return replace(step, operations=tuple(operations))


def consecutive(
    model: ModelSpec,
    plan: Plan,
    visits: Sequence[Visit],
    held: HeldUnits,
    circumstances: Circumstances | None = None,
    clock: Clock | None = None,
    *,
    says_where: bool = True,
) -> Iterator[Schedule]:
    """Yield schedules of steps with the same visits, one behind another, without end.

    Args:
        model: Model with units in the plan's order.
        plan: Plan that was checked against the model.
        visits: Visits of each step.
        held: Content of the slots for weights when the first step begins.
        circumstances: None: the default ones.
        clock: Decides which early updates are made. It plays a step only to the end of backward, and only if there are
            such updates; the caller plays the rest.
        says_where: Whether operations list the bytes that they read and write.
    """
    known = {held: weight_moves(model, plan, visits, held)}  # raises for a plan without slots for weights
    steps = _Steps(model, plan, held, circumstances or Circumstances(), clock)
    steps.paper.says_where = says_where
    names = [unit.name for unit in model.units]
    ahead = _ahead_of(visits)
    while True:
        if held not in known:
            known[held] = weight_moves(model, plan, visits, held)
        steps.paper.begin_step()
        steps.lay_out(visits, ahead, known[held])
        on_device, on_host = (tuple(None if i is None else names[i] for i in units) for units in held)
        yield Schedule(operations=tuple(steps.paper.row), held_device=on_device, held_host=on_host)
        held = known[held].held


@dataclass(slots=True)
class _Progress:
    """Progress of a unit's gradients and update in a step."""

    is_open: bool = False
    """True while it has gradients of this pass on the device."""
    made: PaperEntry | None = None
    """Operation that put them into a bucket."""
    has_gradients: bool = False
    num_passes: int = 0
    """Number of backward passes that gave it gradients."""
    is_counted: bool = False
    """True if ``num_passes`` includes this pass."""
    is_attempted: bool = False
    """True if an update inside backward was submitted."""
    attempt: Attempt | None = None
    """That update, if played time decides whether it is made."""
    is_loose: bool = False
    """True if another unit has taken its bucket while it waits for its turn among ranks."""


class _Steps:
    """Lays out operations. Remembers homes, slots and the last use of everything across steps."""

    def __init__(
        self, model: ModelSpec, plan: Plan, held: HeldUnits, circumstances: Circumstances, clock: Clock | None
    ) -> None:
        self.paper = paper = Paper([unit.name for unit in model.units])
        paper.in_time = None if clock is None else InTime(clock)
        self._model, self._plan, self._circumstances = model, plan, circumstances
        self._order = order = StepOrder(model, plan, paper)
        self._units, self._gradients, self._activations = order.ledgers, order.gradients, order.activations
        self._saved: dict[int, list[SavedCall[PaperEntry] | None]] = {}
        """Calls whose saved activations are sent away, by unit, the newest last. None: a call that found no home."""
        self._progress = [_Progress() for _ in self._units]
        self._work = [_Nothing(self, unit) for unit in self._units]
        self.factors: list[PaperEntry] = []
        """Operations that make the clip factor of the step."""
        self._reached: dict[int, Ledger[PaperEntry]] = {}  # units that this backward pass has reached
        is_alone = all(unit.num_ranks == 1 for unit in model.units)
        self._turns = None if is_alone else Turns(unit for unit in self._units if unit.spec.trainable)
        order.weights.on_host.holders[:] = held.host
        for slot, index in enumerate(held.device):
            order.weights.on_device.holders[slot] = index
            if index is not None:
                self._units[index].slot = order.weights.on_device.slots[slot]

    def lay_out(self, visits: Sequence[Visit], ahead: Sequence[_Ahead], moves: Moves) -> None:
        """Lay out one step."""
        waiting = deque(moves.moves)
        for i, (visit, coming) in enumerate(zip(visits, ahead, strict=True)):
            if i and coming.has_backward:
                self._activations.begin_forward()
            while waiting and waiting[0].due <= i:
                self._move(waiting.popleft())
            if not i and coming.has_backward:  # the first fetches are submitted right after the updates
                self._activations.begin_forward()
            self._visit(visit, coming)
        self._step(visits)

    def _move(self, move: Move) -> None:
        self.paper.move = move
        weights = self._order.weights
        (weights.read if move.tier == "host" else weights.fetch)(move.unit, move.slot)
        self.paper.move = None

    def _visit(self, visit: Visit, ahead: _Ahead) -> None:
        phase, unit = visit.phase, self._units[visit.unit]
        self._order.weights.use(unit, phase)
        calls = self._saved.setdefault(unit.index, []) if unit.plan.saved_bytes else []
        saved = calls.pop() if phase is Phase.BACKWARD and calls else None
        if saved is not None:
            self._activations.begin_backward(saved)
        if phase is Phase.BACKWARD and unit.spec.trainable:
            self._reached[unit.index], self._progress[unit.index].is_open = unit, True
            if unit.index != ROOT and (unit.gradients.tier != "device" or unit.spec.num_ranks > 1):  # else loose
                progress = self._progress[unit.index]
                if not progress.is_loose:
                    _, progress.made = self._gradients.collect(unit, progress.made, self._make_room)
        if saved is not None:
            self._activations.end_backward(saved)
        self._order.weights.used(unit)
        if unit.plan.saved_bytes and ahead.has_backward:
            self._save(unit, calls)
        if phase is Phase.BACKWARD:
            self._end_visit(unit, ahead)

    def _save(self, unit: Ledger[PaperEntry], calls: list[SavedCall[PaperEntry] | None]) -> None:
        is_free = self._activations.room(unit) >= unit.plan.saved_bytes
        calls.append(self._activations.end_forward(unit, _PaperActivations(unit.plan.saved_bytes)) if is_free else None)
        count = self._model.micro_batches_in_unit
        if count > 1 and len(calls) % count == 0:  # backward comes to the first piece of a batch first
            self._activations.turn(unit)
            calls[-count:] = reversed(calls[-count:])

    def _make_room(self, pool: SlotPool[PaperEntry]) -> None:
        if self._turns is not None:  # as in ``RankExchange``
            taken = (u for u in self._turns.order if u.bucket is not None and u.bucket.pool is pool)
            unit = next(taken)
            self._gradients.give_back(unit)
            self._progress[unit.index].is_loose = True
            return
        self._send(next(u for u in self._reached.values() if u.bucket is not None and u.bucket.pool is pool))

    def _end_visit(self, unit: Ledger[PaperEntry], ahead: _Ahead) -> None:
        """Send complete gradients home: a unit's after its last visit of the pass, the root's when the pass ends."""
        root = self._units[ROOT]
        if unit.index != ROOT and not ahead.comes_again and self._progress[unit.index].is_open:
            for turn in (unit,) if self._turns is None else self._turns.come(unit):
                self._send(turn)
        if ahead.ends_pass:
            last = [root] if root.spec.trainable else []
            for turn in last if self._turns is None else self._turns.rest():
                self._send(turn)
            for reached in (root, *self._reached.values()):
                self._progress[reached.index].is_counted = False
            self._reached.clear()

    def _send(self, unit: Ledger[PaperEntry]) -> None:
        progress = self._progress[unit.index]
        progress.is_open, progress.made, progress.is_loose = False, None, False
        is_first = not progress.has_gradients
        if self._turns is not None:
            self._gradients.share(unit, self._work[unit.index], self._make_room, is_first=is_first)
            if unit.index not in self._reached and unit.index != ROOT:
                return
        elif not (self._plan.plain and is_first):  # else they stay where autograd makes them
            self._gradients.send(unit, self._work[unit.index], is_first=is_first)
        progress.num_passes += not progress.is_counted
        progress.has_gradients = progress.is_counted = True
        if unit.plan.early and progress.num_passes == self._plan.accumulation_steps:
            if progress.is_attempted:  # the unit got gradients again
                self._order.out_of_place.forget_attempt(unit)
            self._attempt(unit, progress)

    def _attempt(self, unit: Ledger[PaperEntry], progress: _Progress) -> None:
        in_time = self.paper.in_time
        if in_time is None:
            progress.is_attempted = True
            self._order.out_of_place.attempt(unit, self._work[unit.index])
            return
        progress.attempt = in_time.attempt = in_time.begin(unit)
        progress.is_attempted = progress.attempt is not None
        if progress.is_attempted:
            self._order.out_of_place.attempt(unit, self._work[unit.index])
        in_time.attempt = None

    def _step(self, visits: Sequence[Visit]) -> None:
        backward = self.paper.mark("is over", self._units[ROOT])
        if any(progress.is_attempted for progress in self._progress):
            self.paper.wait("backward is over", backward)
        if self.paper.in_time is not None:
            started = [p.attempt for p in self._progress if p.attempt is not None]
            self.paper.in_time.settle(self.paper.row, started)
        self.factors = [backward] if self._circumstances.clips else []
        changed = changed_units(self._model, visits)
        seen = visits if self._turns is None else None
        indices = [i for i in update_order(seen, self._plan) if i in changed]
        for unit in self._units:
            if self._progress[unit.index].is_attempted and not self.is_made_early(unit):
                self._order.out_of_place.forget_attempt(unit)
        self._order.updates.step((self._units[i] for i in indices), lambda unit: self._work[unit.index])
        for index in indices:
            self._progress[index] = _Progress()

    def is_made_early(self, unit: Ledger[PaperEntry]) -> bool:
        """Return whether a unit's early update is made."""
        progress = self._progress[unit.index]
        if progress.attempt is not None:
            return progress.attempt.settle()
        return progress.is_attempted and unit.spec.name not in (self._circumstances.overtaken or ())


class _PaperActivations:
    """Activations that a forward saved, on paper."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.is_held, self.memory = nbytes, True, None

    def is_wanted(self) -> bool:
        """Return True, since backward always comes."""
        return True

    def leave(self, target: ByteSpan) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Note that the device holds them no longer."""
        self.is_held = False

    close_early = close


class _Nothing:
    """The work of operations on paper: they do nothing."""

    def __init__(self, steps: _Steps, unit: Ledger[PaperEntry]) -> None:
        self._steps, self._unit, self.nbytes = steps, unit, unit.spec.bucket_bytes

    @property
    def factors(self) -> list[PaperEntry]:
        """Operations that make the clip factor of the step."""
        return self._steps.factors

    @property
    def is_early(self) -> bool:
        """Whether the unit's update inside backward is made."""
        return self._steps.is_made_early(self._unit)

    def leave(self, target: ByteSpan) -> None:
        """Do nothing."""

    def landed(self) -> None:
        """Do nothing."""

    def add_on_device(self) -> None:
        """Do nothing."""

    def add_on_host(self, landing: ByteSpan, target: ByteSpan) -> None:
        """Do nothing."""

    def put_in(self, bucket: ByteSpan) -> None:
        """Do nothing."""

    def exchange(self, bucket: ByteSpan, received: ByteSpan) -> None:
        """Do nothing."""

    def add_runs(self, received: ByteSpan, target: ByteSpan) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def at_once(self, grads: ByteSpan, states: ByteSpan, weights: ByteSpan, scratch: ByteSpan) -> None:
        """Do nothing."""

    def in_place(self, grads: ByteSpan, states: ByteSpan | None, weights: ByteSpan, *, is_slot: bool) -> None:
        """Do nothing."""

    def staged(self, grads: ByteSpan, states: ByteSpan, weights: ByteSpan, scratch: ByteSpan) -> None:
        """Do nothing."""

    def weights_sent(self) -> None:
        """Do nothing."""

    def gather(self, weights: ByteSpan) -> None:
        """Do nothing."""

    def out_of_place(
        self, grads: ByteSpan, new: tuple[ByteSpan | None, ByteSpan], old: tuple[ByteSpan | None, ByteSpan | None]
    ) -> None:
        """Do nothing."""

    def is_due(self) -> bool:
        """Return whether the unit's update inside backward is made."""
        return self.is_early

    def is_wanted(self) -> bool:
        """Return True always."""
        return True


class _Ahead(NamedTuple):
    """What follows a visit."""

    has_backward: bool = False
    """True for a forward to which a backward comes. If backward does not come to all forwards of a unit, it leaves out
    the first ones: the unit is frozen, and nothing before it is trained."""
    comes_again: bool = False
    """True if the same backward pass reaches the unit again."""
    ends_pass: bool = False
    """True for the last visit of a backward pass."""


def _ahead_of(visits: Sequence[Visit]) -> list[_Ahead]:
    """Return what follows each visit. Backward visits in a row are one pass."""
    found: list[_Ahead] = []
    walked: Counter[int] = Counter()  # visits of the next backward pass, by unit
    for is_backward, group in itertools.groupby(reversed(visits), key=lambda visit: visit.phase is Phase.BACKWARD):
        mine = list(group)
        if is_backward:
            walked = Counter()
            for unit in (visit.unit for visit in mine):
                found.append(_Ahead(comes_again=walked[unit] > 0, ends_pass=not walked))
                walked[unit] += 1
            continue
        used: Counter[Visit] = Counter()
        for visit in mine:
            used[visit] += 1
            is_forward = visit.phase is Phase.FORWARD and visit.unit != ROOT
            found.append(_Ahead(has_backward=is_forward and walked[visit.unit] >= used[visit]))
        walked = Counter()
    return found[::-1]
