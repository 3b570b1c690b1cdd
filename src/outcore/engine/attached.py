"""How a model is taken over: its bytes move home, and the engine gets its calls and gradients, until all is undone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from outcore.engine.module.call import Services, UnitCall
from outcore.engine.module.plain_call import PlainCall
from outcore.engine.module_guard import ModuleGuard
from outcore.engine.rows.in_pieces import in_pieces
from outcore.engine.unit.unit import Unit
from outcore.engine.updates.plain import PlainUpdates
from outcore.engine.values.fill import Values, fill_unit
from outcore.memory.allocator import WORTH_BYTES, HeldBack

if TYPE_CHECKING:
    from outcore.engine.engine import Engine


class Attached:
    """What has been done to the user's model, and how to undo it."""

    guard: ModuleGuard

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.held_back = HeldBack()
        self._moved: list[Unit] = []
        self._undo: list[Callable[[], None]] = []

    def move_in(self, values: Callable[[Unit], Values]) -> None:
        """Fill homes unit by unit and make parameters absent.

        A unit's own bytes are freed as soon as they are home, so that model and arenas never stand side by side.

        Args:
            values: Gives the first values of a unit's parameters; called in module order.
        """
        opened, freed_bytes = self._engine.opened, 0
        for unit in self._engine.units:
            if not self._engine.opened.plan.plain:
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
        world = self._engine.access.world
        if world is not None and any(unit.ledger.cut.is_one_copy for unit in self._engine.units):
            world.say("fill the weights that they share")
        opened.tiers.settle()
        self.held_back.give_back()

    def take_calls(self, services: Services) -> None:
        """Replace the forwards of units, and guard the model."""
        kind = PlainCall if self._engine.opened.plan.plain else UnitCall
        for unit in self._engine.units[1:]:
            call, attributes = kind(unit, services), unit.module.__dict__
            self._undo.append(partial(_put_back, attributes, attributes.get("forward")))
            self._undo.append(call.close)
            attributes["forward"] = call
        count = self._engine.opened.model.micro_batches_in_unit
        self._undo += in_pieces(self._engine.units, count, services) if count > 1 else []
        self.guard = ModuleGuard(self._engine)
        self._undo.append(self.guard.remove)

    def watch_results(self, updates: PlainUpdates) -> None:
        """Watch the model's results in a plain plan, whose graphs autograd walks without asking the engine."""
        self._undo.append(self._engine.model.register_forward_hook(updates.after_forward).remove)

    def _take_gradients(self, unit: Unit) -> None:
        for i, param in enumerate(unit.params[: unit.num_trainable]):
            hook = self._engine.gradients.hook(unit, i)
            self._undo.append(param.register_post_accumulate_grad_hook(hook).remove)

    def what_is_left(self) -> str:
        """Say which part of the model still has its own values, for the error that ends ``move_in``."""
        if not self._moved:
            return "no parameter had been moved yet, and those that had values keep them"
        if len(self._moved) == len(self._engine.units):
            return "all parameters had been moved and are gone: build or load model and optimizer again"
        return (
            f"the parameters of {len(self._moved)} of {len(self._engine.units)} units had been moved and are gone "
            f"(the last unit: '{self._moved[-1].label}'), the others still have their values: build or load the model "
            "again"
        )

    def undo(self) -> None:
        """Give the module its own forward back; its parameters stay absent. An interrupt does not stop the rest."""
        with ExitStack() as undoing:  # the last is undone first
            for unit in self._engine.units:
                undoing.callback(unit.gradient_form.give_back)
            for unit in self._moved:
                undoing.callback(self._take_away, unit)
            for undo in self._undo:
                undoing.callback(undo)
        self._undo.clear()

    def _take_away(self, unit: Unit) -> None:
        device = self._engine.device
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
