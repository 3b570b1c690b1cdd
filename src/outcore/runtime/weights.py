"""Weights on the move: fetch, bind, unbind, prefetch, evict.

[Note: weight slots] A unit whose weights do not live on the device borrows a slot there. After unbinding, the slot
stays with the unit ("cached") until another unit needs it; weights never change in a slot, so evicting moves no
bytes. The next fetch into the slot waits for the compute that read it. Weights whose home is disk pass through slots on
the host, which are kept in the same way and written again after the fetch that read them.

What goes where, and when, is decided beforehand for the visits of a whole step (``planning.weight_cache``), taken to be
those of the step before. Whatever else is needed is fetched on demand.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from functools import partial
from types import FrameType

import torch

from outcore.core.errors import MemoryBudgetError, OutcoreError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.memory.arena import Buffer
from outcore.planning.schedule import update_order, usual_visits
from outcore.planning.weight_cache import NEVER, Held, weight_moves
from outcore.runtime.cursor import Cursor, Round
from outcore.runtime.disk_transfers import DiskTransfers
from outcore.runtime.homes import Homes
from outcore.runtime.lanes import After, newest
from outcore.runtime.recovery import Recovery
from outcore.runtime.slot_cache import SlotCache
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer, expect_extent
from outcore.spec.lanes import Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Phase, Visit


class Weights:
    """Brings the weights of units to compute and takes them away again."""

    def __init__(
        self,
        units: Sequence[Unit],
        homes: Homes,
        recovery: Recovery,
        traffic: Traffic,
        model: ModelSpec,
        plan: Plan,
        *,
        has_steps: bool,
    ) -> None:
        """Args: units: All, the root first. has_steps: There is an optimizer, so that visits come in steps."""
        self._recovery, device = recovery, recovery.device
        recovery.signs.append(self._notice)
        recovery.parts.append(self._reset)
        self._units, self._homes, self._device, self._traffic = units, homes, device, traffic
        self._transfers = DiskTransfers(homes, device, traffic)
        self._index = {unit: i for i, unit in enumerate(units)}
        self.has_steps = has_steps
        self.refusal: OutcoreError | None = None
        """Why no unit may run any more."""
        self._on_device = SlotCache(homes.slots("device", "weights"), device, "slot free")
        self._on_host = SlotCache(homes.slots("host", "weights"), device, "staging free")
        decide = partial(weight_moves, model, plan)
        self._step = Cursor(decide, usual_visits(model), self._held())
        self._round = Round(decide, (), self._held())
        self.calls: list[tuple[int, Phase, FrameType | None]] = []
        """Units that are being called, the outermost first, and by which frame."""
        self._thread = 0
        self._cursor: Cursor = self._step
        """The one of the two that follows the run now."""

    @property
    def visits(self) -> tuple[Visit, ...]:
        """Those of the last step, which this one is expected to repeat."""
        return self._step.expected

    def begin_call(self, unit: Unit) -> int:
        """How many calls are running already; one more may begin.

        Raises:
            UnsupportedError: They are another thread's.
        """
        if self.refusal is not None:
            raise self.refusal
        thread = threading.get_ident()
        if self.calls and self._thread == thread:
            self._notice()
        if self._recovery.is_due:
            self._recovery.run()
        if self.calls and self._thread != thread:
            raise UnsupportedError(
                f"unit '{unit.label}': expected one thread at a time to call a prepared model, but another one is in "
                "a call of a unit; let one thread run the model, or hold a lock around each forward and backward"
            )
        self._thread = thread
        return len(self.calls)

    def bind(self, index: int, phase: Phase, frame: FrameType | None) -> None:
        """Make a unit's parameters present; compute that follows sees the current weights.

        Whoever calls this must ``unbind``, or ``unwind`` if either was interrupted, while ``frame`` runs.

        Order: compute waits for the fetch, and the fetch for the unit's last update.
        """
        unit = self._units[index]
        self._follow(Visit(phase, index))
        self.calls.append((index, phase, frame))
        unit.num_bound += 1
        if unit.is_gathered:
            return
        self._make_due()
        if not unit.is_resident and unit.slot is None and unit.weights is not None:
            self._fetch_on_demand(index)
        if unit.num_bound == 1:
            self.present(unit)

    def present(self, unit: Unit) -> None:
        """Order compute behind whatever writes the unit's weights on the device, and point the parameters at them."""
        buffer = unit.device_buffer()
        if buffer is None:
            unit.point_at(None)
            return
        after = {"weights updated": unit.weights_ready} if unit.is_resident else {"weights fetched": unit.fetched}
        self._device.compute(f"use weights of {unit.label}", reads=[buffer.region], after=after)
        if not unit.is_resident or not unit.is_present:  # else where they were, with a user's edits
            unit.point_at(buffer)

    def present_on_demand(self, unit: Unit) -> None:
        """Make a resident unit's parameters present because somebody reads them: the root has no call of its own."""
        if torch.is_grad_enabled():
            self._step.follow(Visit(Phase.FORWARD, self._index[unit]), may_skip=False)
        self.present(unit)

    def units_by_next_use(self) -> list[Unit]:
        """All units in the order in which they were first used since the last step, then those that were not."""
        return [self._units[i] for i in update_order(self._step.seen, len(self._units))]

    def unbind(self, index: int) -> None:
        """Make a unit's parameters absent again; its slot may go to another unit once compute is done with it."""
        unit = self._units[index]
        self.calls.pop()
        unit.num_bound -= 1
        if unit.is_gathered or unit.num_bound or unit.is_resident:
            return
        if unit.slot is not None:
            unit.slot.free_after = [self._device.mark(f"weights of {unit.label} used")]
        unit.mark_absent(device=self._device.torch_device)

    def unwind(self, num_calls: int) -> None:
        """End all calls but the first ones, wherever an exception left them."""
        self._recovery.is_due = True
        del self.calls[num_calls:]

    def _notice(self) -> None:
        """End the calls whose frames run no more: an exception came before they could be ended."""
        frame, running = inspect.currentframe() if self.calls else None, set()
        while frame is not None:
            running.add(id(frame))  # the frames themselves would hold one another
            frame = frame.f_back
        for number, (_, _, caller) in enumerate(self.calls):
            if id(caller) not in running:
                self.unwind(number)
                break

    def _reset(self) -> None:
        """Take back what no running call has. See [Note: cut short]."""
        called = [index for index, _, _ in self.calls]
        self._on_device.reset(called)
        self._on_host.reset(())
        for i, unit in enumerate(self._units):
            unit.num_bound = called.count(i)
            if unit.num_bound or unit.is_gathered or unit.num_lent or unit.is_resident:
                continue
            unit.slot = unit.fetched = None
            unit.mark_absent(device=self._device.torch_device)
        self._step.reset(self._held())
        self._round.reset(self._held())

    def rest(self, unit: Unit) -> None:
        """Put an unbound unit's parameters into the state that they have between calls."""
        if unit.is_resident:
            unit.is_present = False
            self.present(unit)
        else:
            unit.mark_absent(device=self._device.torch_device)

    def invalidate(self, unit: Unit) -> None:
        """Forget cached weights: the home holds other ones now, or will."""
        if unit.slot is not None:
            if unit.num_bound:
                raise AssertionError(f"unit '{unit.label}' is bound while its weights change")
            self._vacate_on_device(self._on_device.slots.index(unit.slot))
        staged = self._on_host.find(self._index[unit])
        if staged is not None:
            self._on_host.vacate(staged)

    def prefetch_after_update(self) -> None:
        """A step begins: fetch what its forward needs first; each unit waits for its own update."""
        self._cursor = self._step
        self._cursor.restart(self._held())
        self._make_due()

    def forget(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self._on_device.slots.clear()
        self._on_host.slots.clear()

    def _held(self) -> Held:
        return Held(tuple(self._on_device.holders), tuple(self._on_host.holders))

    def _follow(self, visit: Visit) -> None:
        if self.has_steps and visit.phase is not Phase.INFERENCE:
            self._cursor = self._step
            self._step.follow(visit)
        else:
            self._cursor = self._round
            self._round.follow_round(visit, self._held)

    def _make_due(self) -> None:
        for move in self._cursor.due():
            cache = self._on_device if move.tier == "device" else self._on_host
            if self._units[move.unit].is_gathered or cache.find(move.unit) is not None:
                continue
            place = self._choose(cache, move.unit, evicts=move.evicts, beyond=move.use)
            if place is not None:  # else the slots hold what is needed sooner: not what was expected
                bring = self._fetch if move.tier == "device" else self._read
                bring(move.unit, place)

    def _choose(self, cache: SlotCache, index: int, *, evicts: int | None = None, beyond: int = -1) -> int | None:
        """A slot for a unit's weights: the one with ``evicts`` in it, or the one whose content is needed last."""

        def next_use(unit: int) -> int:
            if cache is self._on_device and self._units[unit].num_bound:
                return -1
            return NEVER if unit == evicts else self._cursor.next_use(unit)

        return cache.choose(self._units[index].spec.weight_bytes, next_use, beyond=beyond)

    def _fetch_on_demand(self, index: int) -> None:
        place = self._choose(self._on_device, index)
        if place is None:
            unit, nbytes = self._units[index], self._units[index].spec.weight_bytes
            raise MemoryBudgetError(
                f"unit '{unit.label}' needs a device slot of {format_bytes(nbytes)}, but all "
                f"{len(self._homes.pool('device', 'weights', nbytes).slots)} are bound by units that are being called "
                "right now; plan more weight slots (a larger prefetch_depth) for units that call one another"
            )
        self._fetch(index, place)

    def _fetch(self, index: int, place: int) -> None:
        """Bring weights into a device slot, whatever it holds."""
        unit = self._units[index]
        self._vacate_on_device(place)
        slot, nbytes = self._on_device.slots[place], unit.spec.weight_bytes
        target = slot.buffer.part(0, nbytes)
        staged = self._staged(index) if unit.plan.weights == "disk" else None
        source, ready = self._source(unit, staged)
        fetched = self._device.submit(
            Lane.H2D,
            f"fetch {unit.label}",
            lambda: target.bytes.copy_(source.bytes, non_blocking=True),
            reads=[source.region],
            writes=[target.region],
            after={"slot free": slot.free_after, **ready},
        )
        self._traffic.add(Lane.H2D, nbytes)
        if staged is None:
            unit.weights_readers = newest([*unit.weights_readers, fetched])
        else:
            self._on_host.slots[staged].free_after = [fetched]
        self._on_device.put(place, index, fetched)
        unit.slot, unit.fetched = slot, fetched

    def _source(self, unit: Unit, staged: int | None) -> tuple[Buffer, After]:
        """Weights in host memory, and what a copy must wait for."""
        nbytes = unit.spec.weight_bytes
        if staged is None:
            home = expect_buffer(unit.weights, unit.label)
            return home.part(0, nbytes), {"weights updated": unit.weights_ready}
        return self._on_host.slots[staged].buffer.part(0, nbytes), {"weights read": self._on_host.written(staged)}

    def _staged(self, index: int) -> int:
        """The host slot with a unit's weights; read from disk if there is none."""
        staged = self._on_host.find(index)
        if staged is None:
            staged = self._choose(self._on_host, index)
            if staged is None:
                raise AssertionError("no host slot for weights on disk")
            self._read(index, staged)
        return staged

    def _read(self, index: int, place: int) -> None:
        """Bring weights from disk into a host slot, whatever it holds."""
        unit = self._units[index]
        self._on_host.vacate(place)
        slot, extent = self._on_host.slots[place], expect_extent(unit.weights, unit.label)
        buffer = slot.buffer.part(0, unit.spec.weight_bytes)
        after: After = {"staging free": slot.free_after, "weights written": unit.weights_ready}
        read = self._transfers.read(Lane.WEIGHTS_READ, f"read weights of {unit.label}", extent, buffer, after)
        unit.weights_readers = newest([*unit.weights_readers, read])
        self._on_host.put(place, index, read)

    def _vacate_on_device(self, place: int) -> None:
        holder = self._on_device.holders[place]
        if holder is not None:
            self._units[holder].slot = self._units[holder].fetched = None
        self._on_device.vacate(place)
