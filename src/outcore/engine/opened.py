"""What a run opens and takes over as a whole, and gives back: device, memory, files and threads; the user's model.

[Note: last meetings] After the last step, ranks still exchange new weights, and weights that were fetched ahead for a
step that does not come. One rank closes while another still reads weights: it writes the model, say. So no rank may
drop its part of what all ranks have submitted: closing first lets these operations end. They are the same on all ranks
and none waits for a call that a rank has yet to make, so this takes no longer than the slowest rank takes to make the
calls that this one has made. Only a Ctrl-C, or ranks that have lost one another, cut it short.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.core.errors import LaneError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.engine_saves import EngineSaves
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.module.call import SharedByCalls, UnitCall
from outcore.engine.module.plain_call import PlainCall
from outcore.engine.module_guard import ModuleGuard
from outcore.engine.rows.in_pieces import in_pieces
from outcore.engine.unit.live_port import LivePort, Tiers, Traffic
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, own_slice, torch_dtype
from outcore.engine.updates.plain import PlainUpdates
from outcore.engine.updates.workers import UpdateWorkers
from outcore.memory.arena import Buffer
from outcore.memory.host import WORTH_BYTES, HeldBack
from outcore.optim.compact import close_masters
from outcore.order.ledger import ByteSpan, Home, Ledger
from outcore.order.slots import Pools
from outcore.order.step import StepOrder
from outcore.ranks.agreement import core_sharers
from outcore.ranks.world import World
from outcore.spec.layout import CODES
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


class Opened:
    """Owns device, memory, files and threads until ``close``. An error while opening closes what is open."""

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        device: Device,
        paths: Sequence[Path],
        world: World | None = None,
        *,
        has_updates: bool,
    ) -> None:
        """Allocate memory and start threads.

        Args:
            model: Units in the plan's order.
            plan: Checked against the model.
            device: Taken over: closed with the rest, also if this raises.
            paths: Folders of the disk tier.
            world: The ranks that train together; taken over, too.
            has_updates: Whether units may be updated. Updates on the host need threads.
        """
        self.model, self.plan, self.device, self.world, self.traffic = model, plan, device, world, Traffic()
        self._closing = ExitStack()
        if world is not None:
            self._closing.callback(world.close)
        self._closing.callback(device.close)
        with self.closed_on_error():
            first = 0 if world is None else world.rank % world.local_size % max(len(paths), 1)
            # Ranks do the same things at the same time, so they begin with different drives.
            self.tiers = Tiers(model, plan, device, [*paths[first:], *paths[:first]], world)
            self._closing.callback(self.tiers.close)
            port = LivePort(device, self.traffic, self.tiers.store)
            self.order: StepOrder[Handle] = StepOrder(model, plan, port)
            if world is not None:
                self.order.weights.all_gather = _all_gathers(world, self.order.ledgers)
            self.saves = EngineSaves(device, port, self.tiers)
            self._closing.callback(self.saves.close)
            self.tiers.hand_out(self.order)
            on_host = has_updates and any(u.plan.is_updated_on_host and u.spec.trainable for u in self.order.ledgers)
            whole = has_updates and any(p.is_whole for unit in model.units for p in unit.trainable)
            on_host |= whole and device.computes_on_host  # there staged updates need the same threads
            sharers = (0, 1) if world is None else core_sharers(world)
            self.workers = UpdateWorkers.beside(device, sharers=sharers, has_whole=whole) if on_host else None
            if self.workers is not None:
                self._closing.callback(self.workers.close)
            self._closing.callback(self._stop)
            if world is not None:
                self._closing.callback(self._meet_last, world)

    def close(self) -> None:
        """Stop what runs and give everything back. Idempotent."""
        self._closing.close()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _meet_last(self, world: World) -> None:
        """Let operations end that other ranks may wait for. See [Note: last meetings]."""
        was_lost, cause = world.failure is not None, sys.exc_info()[1] or getattr(sys, "last_value", None)
        if was_lost or isinstance(cause, KeyboardInterrupt) or os.getpid() != self.device.pid:
            return
        with suppress(LaneError):  # a stall; what follows reports it
            self.device.meet_others()
        if world.failure is not None:
            warnings.warn(str(world.failure), RuntimeWarning, stacklevel=2)

    def _stop(self) -> None:
        """Stop all work: nothing may be in flight to or from memory and files that are given back."""
        if self.workers is not None:
            self.workers.stop()
        if self.tiers.disk is not None:
            self.tiers.disk.stop()
        try:
            self.device.stop()
        except LaneError as error:  # only a warning: what made the program close matters more
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def _all_gathers(world: World, ledgers: Sequence[Ledger[Handle]]) -> Callable[..., Callable[[], None]]:
    """Return what makes the function that fills a slot with cut weights, see [Note: cut fetches]. A collective."""
    cuts = [ledger.cut for ledger in ledgers if ledger.cut.num_sharers > 1]
    for num_sharers in sorted({cut.num_sharers for cut in cuts if cut.is_cut or cut.num_copies > 1}):
        world.open_groups(num_sharers)

    def all_gather(unit: Ledger[Handle], home: ByteSpan, slot: ByteSpan) -> Callable[[], None]:
        whole, pieces = slot.memory.bytes, []
        for (start, stop), run in zip(unit.cut.together(), unit.cut.runs(), strict=True):
            first, origin = (run.home, home.memory.bytes) if home.of.tier == "device" else (run.layout, whole)
            pieces.append((whole[start:stop], origin[first : first + run.nbytes]))
        return partial(world.all_gather, world.facts, unit.name, pieces, unit.cut.num_sharers)

    return all_gather


Values = Callable[[int], torch.Tensor]
"""Parameter index -> its first value, in any dtype, on any device."""


class Attached:
    """What has been done to the user's model, and how to undo it."""

    guard: ModuleGuard

    def __init__(self, model: nn.Module, units: Sequence[Unit], opened: Opened, gradients: BackwardGradients) -> None:
        self._model, self._units, self._opened, self._gradients = model, units, opened, gradients
        self.held_back = HeldBack()
        self._moved: list[Unit] = []
        self._undo: list[Callable[[], object]] = []

    def move_in(self, values: Callable[[Unit], Values]) -> None:
        """Fill homes unit by unit and make parameters absent.

        A unit's own bytes are freed as soon as they are home, so that model and arenas never stand side by side.

        Args:
            values: Gives the first values of a unit's parameters; called in module order.
        """
        opened, freed_bytes = self._opened, 0
        for unit in self._units:
            if not self._opened.plan.plain:
                self._take_gradients(unit)
            fill_unit(unit, opened.tiers, opened.order.pools, values(unit))
            opened.device.synchronize()
            self._moved.append(unit)
            if unit.ledger.cut.is_resident:
                unit.show()
            else:
                unit.presence.hide(device=opened.device.torch_device)
            freed_bytes += unit.spec.weight_bytes
            if freed_bytes >= WORTH_BYTES:
                freed_bytes = 0
                self.held_back.give_back()
        world = opened.world
        if world is not None and any(unit.ledger.cut.is_one_copy for unit in self._units):
            world.say("fill the weights that they share")
        opened.tiers.settle()
        self.held_back.give_back()

    def take_calls(self, shared: SharedByCalls, guard: Callable[[], ModuleGuard]) -> None:
        """Replace the forwards of units, and guard the model. Args: guard: Makes the guard, once calls are taken."""
        kind = PlainCall if self._opened.plan.plain else UnitCall
        for unit in self._units[1:]:
            call, attributes = kind(unit, shared), unit.module.__dict__
            self._undo.append(partial(_put_back, attributes, attributes.get("forward")))
            self._undo.append(call.close)
            attributes["forward"] = call
        count = self._opened.model.micro_batches_in_unit
        self._undo += in_pieces(self._units, count, shared) if count > 1 else []
        self.guard = guard()
        self._undo.append(self.guard.remove)

    def undo_later(self, undo: Callable[[], object]) -> None:
        """Let ``undo`` call a function, too."""
        self._undo.append(undo)

    def watch_results(self, updates: PlainUpdates) -> None:
        """Watch the model's results in a plain plan, whose graphs autograd walks without asking the engine."""
        self._undo.append(self._model.register_forward_hook(updates.after_forward).remove)

    def _take_gradients(self, unit: Unit) -> None:
        for i, param in enumerate(unit.params[: unit.num_trainable]):
            hook = self._gradients.hook(unit, i)
            self._undo.append(param.register_post_accumulate_grad_hook(hook).remove)

    def what_is_left(self) -> str:
        """Say which part of the model still has its own values, for the error that ends ``move_in``."""
        if not self._moved:
            return "no parameter had been moved yet, and those that had values keep them"
        if len(self._moved) == len(self._units):
            return "all parameters had been moved and are gone: build or load model and optimizer again"
        return (
            f"the parameters of {len(self._moved)} of {len(self._units)} units had been moved and are gone "
            f"(the last unit: '{self._moved[-1].label}'), the others still have their values: build or load the model "
            "again"
        )

    def undo(self) -> None:
        """Give the module its own forward back; its parameters stay absent. An interrupt does not stop the rest."""
        with ExitStack() as undoing:  # the last is undone first
            for unit in self._units:
                undoing.callback(unit.gradient_form.give_back)
            for unit in self._moved:
                undoing.callback(self._take_away, unit)
            for undo in self._undo:
                undoing.callback(undo)
        self._undo.clear()

    def _take_away(self, unit: Unit) -> None:
        device = self._opened.device
        unit.presence.hide(device=device.torch_device if os.getpid() == device.pid else None)
        for param in unit.params:
            if param.grad is not None:
                param.grad = None


def _put_back(attributes: dict[str, Any], forward: Any) -> None:
    """Restore ``forward``. Args: forward: The one that the module itself had, as patches do; None: its class's."""
    attributes.pop("forward", None)
    if forward is not None:
        attributes["forward"] = forward


def switch_off_checkpointing(model: nn.Module) -> None:
    """Switch off the model's own activation checkpointing: it would run a third forward inside a unit's recompute."""
    active = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in active:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    if active:
        warnings.warn(
            "outcore recomputes units itself, so the model's own activation checkpointing was switched off "
            f"({len(active)} modules)",
            stacklevel=4,
        )


@torch.no_grad()
def fill_unit(unit: Unit, tiers: Tiers, pools: Pools[Handle], values: Values) -> None:
    """Write a unit's first weights, masters and states to their homes. Nothing else may be in flight for it.

    A model on the CPU shrinks as its units are written; one on the meta device is never in memory as a whole.

    Args:
        unit: The unit, whose homes are uninitialised.
        tiers: Writes homes on disk.
        pools: Their slots on the host serve as staging for homes on disk.
        values: Called once for each parameter.
    """
    weights, states = (_staged(home, pools) for home in (unit.ledger.weights, unit.ledger.states))
    if states is not None:
        _begin_states(unit, states)
    for i, param in enumerate(unit.spec.params):
        value = values(i).detach()
        if tuple(value.shape) != param.shape:
            raise AssertionError(f"'{param.name}': expected shape {param.shape}, but got {tuple(value.shape)}")
        if weights is not None:
            _put(unit, weights, i, value)
        if states is not None and unit.ledger.has_master and param.requires_grad:
            master = unit.views.state(states, "master")[i]
            if weights is not None and unit.views.is_compact[i]:
                whole, codes = flat(param, value.to("cpu", torch.float32)), unit.views.state(states, CODES)[i]
                own = unit.views.own(weights.part(*unit.ledger.cut.updated))[i]
                close_masters(own_slice(unit.spec, i, whole), own, master, codes)
            else:
                master.copy_(own_slice(unit.spec, i, flat(param, value.to(master.dtype))))
    for home, staged in ((unit.ledger.weights, weights), (unit.ledger.states, states)):
        if staged is not None and staged is not home.memory:
            tiers.store().write(home.memory, staged.bytes)


def _put(unit: Unit, weights: Buffer, index: int, value: torch.Tensor) -> None:
    """Write what this rank has of a parameter."""
    cut, part = unit.ledger.cut, unit.spec.weight_parts[index]
    if cut.num_sharers == 1:
        unit.views.weights(weights)[index].copy_(value)
        return
    values, dtype = flat(unit.spec.params[index], value), torch_dtype(part.dtype)
    for run in cut.here(part):
        first, numel = (run.layout - part.offset) // dtype.itemsize, run.nbytes // dtype.itemsize
        weights.tensor(dtype, (numel,), run.home).copy_(values[first : first + numel])


def _begin_states(unit: Unit, states: Buffer) -> None:
    states.bytes.zero_()
    for name, state in unit.ledger.state_specs.items():
        for view, form in zip(unit.views.state(states, name), state.forms, strict=True):
            if form is not None and form.initial:
                view.fill_(form.initial)


def _staged(home: Home[Handle], pools: Pools[Handle]) -> Buffer | None:
    if home.memory is None or isinstance(home.memory, Buffer):
        return home.memory
    pool = pools.pool("host", "weights" if home.kind == "weights" else "states", home.nbytes)
    return pool.slots[0].span(home.nbytes).memory
