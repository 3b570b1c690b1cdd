"""Takes a model over: moves its bytes home and routes its calls and gradients to the engine, until all is undone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from outcore.device.lanes import Handle
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.module.call import SharedByCalls, UnitCall
from outcore.engine.module.plain_call import PlainCall
from outcore.engine.module_guard import ModuleGuard
from outcore.engine.opened import Opened
from outcore.engine.rows.in_pieces import in_pieces
from outcore.engine.unit.tiers import Tiers
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, own_slice, torch_dtype
from outcore.engine.updates.plain import PlainUpdates
from outcore.memory.arena import Buffer
from outcore.memory.host import WORTH_BYTES, HeldBack
from outcore.optim.compact import close_masters
from outcore.order.ledger import Home
from outcore.order.slots import Pools
from outcore.spec.layout import CODES

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
