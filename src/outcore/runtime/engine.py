"""The engine of one prepared model: opens everything, wires it to the module, and runs a step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.core.errors import ConfigError, LaneError, OutcoreError, UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.memory.allocator import WORTH_BYTES, HeldBack
from outcore.optim.rules import Hyper, UpdateRule
from outcore.optim.sums import run_here
from outcore.order.step import StepOrder
from outcore.planning.partition import Partition
from outcore.runtime.activations.room import Room
from outcore.runtime.gradients.homes import GradientHomes
from outcore.runtime.gradients.passes import Gradients
from outcore.runtime.module.call import GradientSink, Services, UnitCall
from outcore.runtime.module.checks import Doubts
from outcore.runtime.module.plain_call import PlainCall
from outcore.runtime.module_guard import ModuleGuard
from outcore.runtime.unit.one_process import refuse_process_group
from outcore.runtime.unit.port import LivePort
from outcore.runtime.unit.presence import Beneath
from outcore.runtime.unit.recovery import Recovery
from outcore.runtime.unit.tiers import Tiers
from outcore.runtime.unit.traffic import Traffic
from outcore.runtime.unit.unit import Unit
from outcore.runtime.unit.views import torch_dtype
from outcore.runtime.updates.early import EarlyUpdates
from outcore.runtime.updates.plain import PlainUpdates
from outcore.runtime.updates.streamed import Stepper, StreamedUpdates
from outcore.runtime.updates.workers import UpdateWorkers
from outcore.runtime.values.access import Access
from outcore.runtime.values.fill import Values, fill_unit
from outcore.runtime.weights.weights import Weights
from outcore.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What the user said about the loop; what contradicts it raises."""

    accumulation_steps: int | None = None
    clipping: bool = True


class Engine:
    """Everything behind one prepared model. Owns device, memory, files and threads until ``close``."""

    def __init__(
        self,
        partition: Partition,
        plan: Plan,
        device: Device,
        paths: Sequence[Path],
        rule: UpdateRule | None,
        promises: Promises,
    ) -> None:
        """Allocate memory and start threads. ``attach`` then moves the model in.

        Args:
            partition: The model in units.
            plan: Checked against it.
            device: Taken over: closed with the engine, also if this raises.
            paths: Folders of the disk tier.
            rule: None without an optimizer.
            promises: See ``Promises``.
        """
        self.model, self.plan, self.model_spec, self.device = partition.modules[0], plan, partition.spec, device
        self.traffic = Traffic()
        self._rule = rule
        self._closing = ExitStack()
        self._closing.callback(device.close)
        with self._closing_on_error():
            self.tiers = Tiers(partition.spec, plan, device, paths)
            self._closing.callback(self.tiers.close)
            port = LivePort(device, self.traffic, self.tiers.store)
            self.order: StepOrder[Handle] = StepOrder(partition.spec, plan, port)
            self.tiers.hand_out(self.order)
            self.units = self._units_of(partition)
            on_host = any(u.is_updated_on_host and u.num_trainable for u in self.units)
            spare = 0 if device.computes_on_host else 1  # for whoever gives the device its work
            self._workers = UpdateWorkers(spare_cores=spare) if rule is not None and on_host else None
            if self._workers is not None:
                self._closing.callback(self._workers.close)
            self._closing.callback(_stop_lanes, device, self.tiers, self._workers)
        spec, has_steps, self._recovery = partition.spec, rule is not None, Recovery(device)
        order, run_all = self.order, run_here if self._workers is None else self._workers.run_all
        self.weights = Weights(self.units, order.weights, self._recovery, spec, plan, has_steps=has_steps)
        resting = GradientHomes(self.tiers, order.pools, device, run_all)
        steps, clipping = promises.accumulation_steps, promises.clipping
        self.gradients = Gradients(
            self.units, order.gradients, device, resting, steps, self._recovery, clipping=clipping
        )
        self.groups: Sequence[Mapping[str, Any]] = ()
        """The param groups as they are now, for updates that do not wait for ``step``."""
        self._doubts = Doubts(device)
        self.access = Access(self.tiers, order.pools, device, self.weights)
        self._stepper: Stepper = self._streamed_updates()
        self._room = Room(0)
        self.places = {id(p): (u, i) for u in self.units for i, p in enumerate(u.params)}
        self.is_closed = False
        self._held_back = HeldBack()
        self._moved: list[Unit] = []
        self._undo: list[Callable[[], None]] = []

    def _units_of(self, partition: Partition) -> list[Unit]:
        owners = [_Absence(self) for _ in self.order.ledgers]
        everything = zip(self.order.ledgers, partition.modules, partition.params, owners, strict=True)
        units = [Unit(ledger, module, list(params), owner) for ledger, module, params, owner in everything]
        for owner, unit in zip(owners, units, strict=True):
            owner.unit = unit
        return units

    def _streamed_updates(self) -> StreamedUpdates:
        order, workers = self.order.updates, self._workers
        early = EarlyUpdates(order, self.device, self.traffic, workers, lambda: self._hypers(self.groups))
        self.gradients.on_last = early.attempt
        self._recovery.parts += [early.reset, self.order.activations.reset, self.order.pools.reclaim]
        return StreamedUpdates(self.units, self.gradients, self.weights, order, early, self.access, workers)

    def attach(self, values: Callable[[Unit], Values]) -> None:
        """Move the model in: fill homes unit by unit, make parameters absent, take over forward.

        A unit's own bytes are freed as soon as they are home, so that model and arenas never stand side by side.

        Args:
            values: Unit -> first values of its parameters; asked for in module order.
        """
        with self._closing_on_error():
            initial = self._rule.initial_value if self._rule is not None else _zero
            freed_bytes = 0
            for unit in self.units:
                if not self.plan.plain:
                    self._take_gradients(unit)
                fill_unit(unit, self.tiers, self.order.pools, values(unit), initial)
                self.device.synchronize()
                self._moved.append(unit)
                if unit.ledger.is_resident:
                    unit.show()
                else:
                    unit.presence.hide(device=self.device.torch_device)
                freed_bytes += unit.spec.weight_bytes
                if freed_bytes >= WORTH_BYTES:
                    freed_bytes = 0
                    self._held_back.give_back()
            self.tiers.settle()
            self._held_back.give_back()
            if self.plan.kept_bytes:
                self._room = Room(self.plan.kept_bytes, self.device.meter())
            sink: GradientSink = self.gradients
            if self.plan.plain:
                self._stepper = sink = plain = PlainUpdates(self.units, self.device)
                self._undo.append(self.model.register_forward_hook(plain.after_forward).remove)
            services = Services(
                self.weights, sink, self.device, self._doubts, self.access, self._room, self.order.activations
            )
            for index, unit in enumerate(self.units[1:], start=1):
                call = (PlainCall if self.plan.plain else UnitCall)(unit, index, services)
                unit.module.__dict__["forward"] = call
                self._undo.append(call.restore)
            self._guard = ModuleGuard(self)
            self._undo.append(self._guard.remove)

    def what_is_left(self) -> str:
        """For the error that ends ``attach``: which part of the model has its own values still."""
        if not self._moved:
            return "no parameter had been moved yet, and those that had values keep them"
        if len(self._moved) == len(self.units):
            return "all parameters had been moved and are gone: build or load model and optimizer again"
        return (
            f"the parameters of {len(self._moved)} of {len(self.units)} units had been moved and are gone (the last "
            f"unit: '{self._moved[-1].label}'), the others have their values still: build or load the model again"
        )

    def _take_gradients(self, unit: Unit) -> None:
        for i, param in enumerate(unit.params[: unit.num_trainable]):
            self._undo.append(param.register_post_accumulate_grad_hook(self.gradients.hook(unit, i)).remove)

    # A step.

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Submit the update of every parameter that has a gradient, and return. See [Note: forward window].

        Args:
            groups: Param groups; settings are read now.
        """
        self.refuse_if_closed()
        refuse_process_group("optimizer.step")
        self.device.check()
        self._doubts.settle()
        hypers = self._hypers(groups)
        self._refuse_while_gathered()
        self.refuse_if_replaced()
        self.weights.end_lending()
        steps = self._stepper.steps_of(hypers, self._guard.refuse_if_adapted)  # refuses before anything is done
        with self._refusing_what_follows():
            self._stepper.take(steps)
        self._room.end_step()
        self._held_back.give_back_if_due()

    @contextmanager
    def _refusing_what_follows(self) -> Iterator[None]:
        """A step that is cut short leaves some units updated and some not, and slots that nobody gave back."""
        try:
            yield
        except BaseException as error:
            self.weights.refusal = OutcoreError(
                "expected whole optimizer steps, but the last one was cut short, with some units updated and some not, "
                f"by {type(error).__name__}: {error}; close the model, and go on from what was saved before"
            )
            raise

    def _hypers(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, Hyper]:
        if self._rule is None:
            raise UnsupportedError(
                "expected an optimizer given to outcore.prepare(), but there was none (optimizer=None); nothing to step"
            )
        hypers = [self._rule.hyper(group) for group in groups]
        self._refuse_new_states(hypers)
        return {id(p): hyper for group, hyper in zip(groups, hypers, strict=True) for p in group["params"]}

    def _refuse_new_states(self, hypers: Sequence[Hyper]) -> None:
        for hyper in hypers:
            missing = [name for name in hyper.state_names if name not in self.model_spec.state_names]
            if missing:
                raise UnsupportedError(
                    f"expected param groups that need no other states than at outcore.prepare(), but one needs "
                    f"{', '.join(missing)} now, for which no memory was taken; set momentum or amsgrad before prepare "
                    "(momentum may be set to 0 afterwards and switched on again later)"
                )

    def _refuse_while_gathered(self) -> None:
        unit = next((u for u in self.units if u.presence.now is Beneath.GATHERED), None)
        if unit is not None:
            raise UnsupportedError(
                f"expected optimizer.step() outside of outcore.gathered(), but unit '{unit.label}' is gathered; leave "
                "the block first"
            )

    # States, by parameter.

    def check_state(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Raise if states of an optimizer do not fit a parameter.

        Raises:
            ConfigError: A tensor of another shape.
        """
        unit, i = self.places.get(id(param), (None, 0))
        if unit is None or i >= unit.num_trainable:
            return
        spec = unit.spec.params[i]
        for name in unit.ledger.state_specs:
            value = values.get(name)
            if value is not None and tuple(value.shape) != spec.shape:
                raise ConfigError(
                    f"optimizer state: expected {name} of '{spec.name}' with shape {spec.shape}, but got "
                    f"{tuple(value.shape)}; it was saved for another model"
                )

    def load_state(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace a parameter's states by ``values``; what is missing begins anew, masters apart."""
        unit, i = self.places.get(id(param), (None, 0))
        if unit is None or i >= unit.num_trainable or self._rule is None:
            return
        has_states = any(values.get(name) is not None for name in unit.ledger.state_specs if name != "master")
        unit.steps[i] = int(values["step"]) if "step" in values else int(has_states)  # SGD keeps no step
        for name in unit.ledger.state_specs:
            value = values.get(name)
            if value is None and name != "master":
                spec = unit.spec.params[i]
                dtype = torch_dtype(unit.ledger.state_specs[name].parts[i].dtype)
                value = torch.full(spec.shape, self._rule.initial_value(name), dtype=dtype, device="cpu")
            if value is not None:
                self.access.write_state(unit, name, i, value)

    # Life.

    def refuse_if_replaced(self) -> None:
        """Raise if a module has another parameter than at ``prepare``."""
        self._guard.refuse_if_changed()

    def refuse_if_closed(self) -> None:
        """Raise if ``close`` was called, or nothing else is left; clear up behind what was cut short."""
        if self.weights.refusal is not None and not self.is_closed:
            raise self.weights.refusal
        if self.is_closed:
            raise OutcoreError(
                "expected a prepared model, but it was closed; prepare it again, or load what was saved before close()"
            )
        self._recovery.look()

    def notice_what_was_cut_short(self) -> None:
        """Mark gradients that an exception has left not whole."""
        self._recovery.notice()

    def close(self) -> None:
        """Let running work end, give memory, files and threads back, and the module its own forward. Idempotent.

        What is queued is dropped, and updates end with the blocks that they have begun. If a Ctrl-C ends the waiting,
        everything is given back all the same.
        """
        if self.is_closed:
            return
        self.is_closed = True
        with ExitStack() as rest:  # done whatever interrupts what comes before
            rest.callback(self._forget)
            rest.callback(self._closing.close)
            with ExitStack() as undoing:
                for undo in self._undo:  # the last is undone first
                    undoing.callback(undo)
            self._undo.clear()
            for unit in self._moved:
                unit.presence.hide(device=self.device.torch_device)
                for param in unit.params:
                    if param.grad is not None:
                        param.grad = None

    def _forget(self) -> None:
        for unit in self.units:
            unit.forget()
        self.weights.forget()
        self.order.activations.let_go()
        self.order.pools.let_go()
        self._stepper.forget()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._closing.close()
            raise


class _Absence:
    """Speaks for the absent parameters of one unit."""

    unit: Unit

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def name_of(self, param: torch.Tensor) -> str:
        """Fully qualified name."""
        names = (s.name for p, s in zip(self.unit.params, self.unit.spec.params, strict=True) if p is param)
        return next(names, "?")

    def make_present(self) -> bool:
        """Parameters that live on the device need only wait for their update."""
        engine = self._engine()
        if engine is None or engine.is_closed or not self.unit.ledger.is_resident:
            return False
        engine.weights.present_on_demand(self.unit)
        return True

    def absence(self) -> str:
        """Where the bytes are."""
        engine = self._engine()
        if engine is None or engine.is_closed:
            return "gone: the model that outcore prepared was closed"
        return f"in {'host memory' if self.unit.plan.weights == 'host' else 'the disk tier'} between calls of its unit"


def _stop_lanes(device: Device, tiers: Tiers, workers: UpdateWorkers | None) -> None:
    """Nothing may be in flight to or from memory and files that are given back."""
    if workers is not None:
        workers.stop()
    if tiers.disk is not None:
        tiers.disk.stop()
    try:
        device.stop()
    except LaneError as error:  # said, since whatever made the program close matters more
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def _zero(_: str) -> float:
    return 0.0
