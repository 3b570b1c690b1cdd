"""Weights on the move: fetch, bind, unbind, prefetch, evict. See [Note: weight slots].

What goes where, and when, is decided beforehand for the visits of a whole step (``order.weight_cache``). These
are expected to be those of the step before; a ``Cursor`` follows them. An unexpected visit is fetched on demand.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from functools import cached_property, partial
from types import FrameType

import torch

from outcore.core.errors import MemoryBudgetError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.device.lanes import Handle
from outcore.device.recorder import Recorder
from outcore.engine.saved_weights import SavedWeights
from outcore.engine.unit.live_port import Recovery
from outcore.engine.unit.unit import Beneath, Unit
from outcore.order.activations import ActivationOrder
from outcore.order.weight_cache import (
    NEVER,
    Cursor,
    EvaluationRound,
    HeldUnits,
    Move,
    slots_for,
    update_order,
    weight_moves,
)
from outcore.order.weights import WeightOrder, WeightSlots
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Phase, Visit, usual_visits
from outcore.spec.timeline import COMPUTE


class StreamedWeights:
    """Brings the weights of units to compute and takes them away again."""

    def __init__(
        self,
        units: Sequence[Unit],
        order: WeightOrder[Handle],
        recovery: Recovery,
        model: ModelSpec,
        plan: Plan,
        *,
        has_steps: bool,
    ) -> None:
        """Args: units: All, the root first. has_steps: There is an optimizer, so that visits come in steps."""
        self.run, self._device, self._order = recovery, recovery.device, order
        recovery.signs.append(self._notice)
        recovery.parts.append(self._reset)
        self._units, self.has_steps = units, has_steps
        self.saving: list[Unit] = []
        """Units whose weights on the device are still being copied by a save."""
        self._plan = plan
        decide = partial(weight_moves, model, plan)
        self._step = Cursor(decide, usual_visits(model), self._held())
        self._round = EvaluationRound(decide, (), self._held())
        self.calls: list[tuple[int, Phase, FrameType | None]] = []
        """Calls of units that run, the outermost first: unit, phase, and the calling frame."""
        self._thread = 0
        self._cursor: Cursor = self._step
        """The cursor that follows the run now: ``_step`` or ``_round``."""

    @property
    def visits(self) -> tuple[Visit, ...]:
        """Visits of the last step, which this step is expected to repeat."""
        return self._step.expected

    def begin_call(self, unit: Unit) -> int:
        """Allow one more call to begin. Returns how many run already.

        Raises:
            UnsupportedError: Calls of another thread run.
        """
        if self.run.refusal is not None:
            raise self.run.refusal
        thread = threading.get_ident()
        if self.calls and self._thread == thread:
            self._notice()
        if self.run.is_due:
            self.run.run()
        if self.calls and self._thread != thread:
            raise UnsupportedError(
                f"unit '{unit.label}': expected one thread at a time to call a prepared model, but another one is in "
                "a call of a unit; let one thread run the model, or hold a lock around each forward and backward"
            )
        self._thread = thread
        return len(self.calls)

    def bind(self, unit: Unit, phase: Phase, frame: FrameType | None) -> None:
        """Make a unit's parameters present; compute that follows sees the current weights.

        The caller must ``unbind``, or ``unwind`` if either was interrupted, while ``frame`` still runs.

        Order: compute waits for the fetch, and the fetch for the unit's last update.
        """
        index = unit.ledger.index
        self._follow(Visit(phase, index))
        self.calls.append((index, phase, frame))
        presence = unit.presence
        presence.num_calls += 1
        if presence.now is Beneath.GATHERED:
            return
        self._make_due()
        ledger = unit.ledger
        if not ledger.cut.is_resident and ledger.slot is None and ledger.weights.nbytes:
            self._fetch_on_demand(index)
        if presence.num_calls == 1:
            self.present(unit, phase)

    def present(self, unit: Unit, phase: Phase = Phase.FORWARD) -> None:
        """Order compute behind whatever writes the unit's weights on the device, and point the parameters at them."""
        self._order.use(unit.ledger, phase)
        if unit.presence.now is not Beneath.AT_HOME:  # else they stay as they are, with a user's edits
            unit.show()
        if unit.presence.saved is not None:
            self.saved.give_back(unit)

    @cached_property
    def saved(self) -> SavedWeights:
        """Guards weights while a save copies them; made at the first save."""
        return SavedWeights(self._units, self.saving, self._device)

    def present_on_demand(self, unit: Unit) -> None:
        """Make a resident unit's parameters present because they are read outside of a call: the root has no calls."""
        if unit.presence.saved is not None:
            self.saved.wait(unit)
        self._present_outside(unit)

    def begin_forward(self) -> None:
        """Begin a forward of the whole model: it reads the root's weights and does not edit them."""
        root = self._units[0]
        if root.presence.saved is not None:
            self._present_outside(root)

    def end_forward(self) -> None:
        """End a forward of the whole model."""
        if self._units[0].presence.saved is not None:
            self.saved.take(self._units[0])

    def _present_outside(self, unit: Unit) -> None:
        """Make parameters present outside of calls of their unit."""
        if unit.presence.now is Beneath.ABSENT and torch.is_grad_enabled():
            self._step.follow(Visit(Phase.FORWARD, unit.ledger.index), may_skip=False)
        if unit.presence.now is not Beneath.GATHERED:
            self.present(unit)

    def units_to_update(self) -> list[Unit]:
        """Return all units in the order of ``update_order``, by their use since the last step."""
        is_alone = all(unit.spec.num_ranks == 1 for unit in self._units)
        seen = self._step.seen if is_alone else None
        return [self._units[i] for i in update_order(seen, self._plan)]

    def unbind(self, unit: Unit) -> None:
        """Make a unit's parameters absent again; its slot may go to another unit once compute is done with it."""
        self.calls.pop()
        presence = unit.presence
        presence.num_calls -= 1
        if presence.num_calls or presence.now is Beneath.GATHERED or unit.ledger.cut.is_resident:
            if presence.saved is not None:
                self.saved.take(unit)
            return
        self._order.used(unit.ledger)
        presence.hide(device=self._device.torch_device)

    def unwind(self, num_calls: int) -> None:
        """End all calls but the first ``num_calls``, wherever an exception left them."""
        self.run.is_due = True
        del self.calls[num_calls:]

    def _notice(self) -> None:
        """End the calls whose frames no longer run: an exception came before they could be ended."""
        number = _first_over([frame for _, _, frame in self.calls]) if self.calls else None
        if number is not None:
            self.unwind(number)

    def _reset(self) -> None:
        """Take back slots and parameters that no running call uses. See [Note: cut short]."""
        called = [index for index, _, _ in self.calls]
        self._order.on_device.clear(called)
        self._order.on_host.clear(())
        for i, unit in enumerate(self._units):
            presence = unit.presence
            presence.num_calls = called.count(i)
            if presence.saved is not None:
                self.saved.take(unit)
            if presence.num_calls or unit.ledger.cut.is_resident:
                continue
            unit.ledger.slot = None
            if presence.now is not Beneath.GATHERED:
                presence.hide(device=self._device.torch_device)
        self._step.reset(self._held())
        self._round.reset(self._held())

    def rest(self, unit: Unit) -> None:
        """End ``gathered`` for a unit: its parameters are again as between calls, or as in the call that runs."""
        ledger, bound = unit.ledger, unit.presence.bound
        unit.presence.hide(device=None if ledger.cut.is_resident else self._device.torch_device)
        if ledger.cut.is_resident:
            self.present(unit)
            if unit.presence.saved is not None:
                self.saved.take(unit)
        elif bound is not None and any(index == ledger.index for index, _, _ in self.calls):
            unit.presence.show(bound)

    def invalidate(self, unit: Unit) -> None:
        """Forget cached weights: the home holds other weights now, or soon will."""
        if unit.presence.num_calls and unit.ledger.slot is not None:
            raise UnsupportedError(
                f"unit '{unit.label}': expected its weights to be written between its calls, but a call of it runs; "
                "load a state dict, or leave a block gathered(write=True), outside of its forward and backward"
            )
        self._order.invalidate(unit.ledger)

    def prefetch_after_update(self) -> None:
        """Begin a step: fetch what its forward needs first. Each fetch waits for the update of its own unit."""
        self._cursor = self._step
        self._cursor.restart(self._held())
        self._make_due()

    def close(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self._order.close()

    def _held(self) -> HeldUnits:
        return HeldUnits(tuple(self._order.on_device.holders), tuple(self._order.on_host.holders))

    def _follow(self, visit: Visit) -> None:
        if self.has_steps and visit.phase is not Phase.INFERENCE:
            self._cursor = self._step
            self._step.follow(visit)
        else:
            self._cursor = self._round
            self._round.follow_round(visit, self._held)

    def _make_due(self) -> None:
        for move in self._cursor.due():
            cache = self._order.on_device if move.tier == "device" else self._order.on_host
            if self._units[move.unit].presence.now is Beneath.GATHERED or cache.find(move.unit) is not None:
                continue
            place = self._choose(cache, move.unit, move)
            if place is not None:  # else, contrary to what was expected, the slots hold what is needed sooner
                bring = self._fetch if move.tier == "device" else self._order.read
                bring(move.unit, place)

    def _choose(self, cache: WeightSlots[Handle], index: int, move: Move | None = None) -> int | None:
        """Choose a slot for a unit's weights: an idle one, else the one whose content is used again last.

        Args:
            cache: Slots of a tier.
            index: The unit.
            move: The expected move, if it is one. Then its slot is taken if no other is better, and no unit is evicted
                that is needed sooner.
        """
        evicts, planned, beyond = (None, None, -1) if move is None else (move.evicts, move.slot, move.use)

        def next_use(unit: int | None) -> int:
            if unit is not None and cache is self._order.on_device and self._units[unit].presence.num_calls:
                return -1
            return NEVER if unit is None or unit == evicts else self._cursor.next_use(unit)

        cut = self._units[index].ledger.cut
        nbytes = cut.spec.weight_bytes if cache is self._order.on_device else cut.nbytes
        units = {i: cache.holders[i] for i in slots_for(cache.sizes, nbytes)}
        uses = {i: next_use(unit) for i, unit in units.items()}
        last = max(uses, key=lambda i: (uses[i], i == planned, units[i] is None), default=None)
        return last if last is not None and uses[last] > beyond else None

    def _fetch_on_demand(self, index: int) -> None:
        place = self._choose(self._order.on_device, index)
        if place is None:
            unit, sizes = self._units[index], self._order.on_device.sizes
            nbytes = unit.spec.weight_bytes
            raise MemoryBudgetError(
                f"unit '{unit.label}' needs a device slot of {format_bytes(nbytes)}, but all "
                f"{len(slots_for(sizes, nbytes))} are bound by units that are being called right now; plan more weight "
                "slots (a larger prefetch_depth) for units that call one another"
            )
        self._fetch(index, place)

    def _fetch(self, index: int, place: int) -> None:
        """Bring weights into a device slot. From disk they come through a host slot, unless one holds them already."""
        on_host = self._order.on_host
        if self._units[index].plan.weights == "disk" and on_host.find(index) is None:
            staging = self._choose(on_host, index)
            if staging is None:
                raise AssertionError("no host slot for weights on disk")
            self._order.read(index, staging)
        self._order.fetch(index, place)


def _first_over(frames: Sequence[FrameType | None]) -> int | None:
    """Return the index of the first frame that no longer runs on this thread; None if all run."""
    frame, running = inspect.currentframe(), set()
    while frame is not None:
        running.add(id(frame))  # not the frames themselves, which would then hold one another
        frame = frame.f_back
    return next((number for number, each in enumerate(frames) if id(each) not in running), None)


def make_way(activations: ActivationOrder[Handle], unit: Unit, weights: StreamedWeights) -> None:
    """Let activations of earlier calls leave, since a call begins. Being cut short is noticed as for a call."""
    depth = weights.begin_call(unit)
    try:
        activations.begin_forward()
    except BaseException:
        weights.unwind(depth)
        raise


class UnitBinding:
    """Context in which a unit's parameters are present.

    It is a class, so that no frame of ``contextlib`` stands in between: an interrupt there would leave the call
    unended, and nothing would notice. See [Note: cut short].
    """

    def __init__(self, unit: Unit, phase: Phase, weights: StreamedWeights, recorder: Recorder) -> None:
        """Args: recorder: Records the time that the context takes, if it is on."""
        self._unit, self._phase, self._weights, self._recorder = unit, phase, weights, recorder

    def __enter__(self) -> None:
        self._depth = self._weights.begin_call(self._unit)
        try:
            # The frame is not put in a variable: that would lie in the frame that it refers to.
            self._weights.bind(self._unit, self._phase, inspect.currentframe().f_back)  # type: ignore[union-attr]
            self._start = self._recorder.now() if self._recorder.is_on else None
        except BaseException:
            self._weights.unwind(self._depth)
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self._start is not None and self._recorder.is_on:
                name = f"{self._phase.value} {self._unit.label}"
                self._recorder.add(COMPUTE, name, self._start, self._recorder.now())
            if kind is None:
                self._weights.unbind(self._unit)
            else:
                self._weights.unwind(self._depth)
        except BaseException:
            self._weights.unwind(self._depth)
            raise
