"""The engine of one prepared model: opens everything, wires it to the module, and runs a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.core.errors import ConfigError, OutcoreError, UnsupportedError
from outcore.device.device import Device
from outcore.engine.activations.room import ActivationRoom, SharedArguments
from outcore.engine.gradients.homes import GradientHomes
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.module.call import SharedByCalls
from outcore.engine.module.compiling import Compiling
from outcore.engine.module_guard import ModuleGuard
from outcore.engine.opened import Attached, Opened, Values
from outcore.engine.recompute.checks import PendingComparisons
from outcore.engine.streamed_weights import StreamedWeights
from outcore.engine.unit.live_port import Recovery
from outcore.engine.unit.unit import Beneath, Unit
from outcore.engine.updates.plain import PlainUpdates
from outcore.engine.updates.streamed import EarlyUpdates, StreamedUpdates
from outcore.engine.updates.unit_update import Numbers, RuleSettings
from outcore.engine.values.access import ValueAccess
from outcore.engine.values.parameter_values import ParameterValues
from outcore.model.partition import Partition
from outcore.optim.rules import UpdateRule
from outcore.optim.sums import RunAll, run_here
from outcore.ranks.world import World, refuse_process_group
from outcore.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What the user promised about the loop; breaking a promise raises."""

    accumulation_steps: int | None = None
    clipping: bool = True


class Engine:
    """Everything behind one prepared model. Owns device, memory, files and threads until ``close``."""

    calls: SharedByCalls

    def __init__(
        self,
        partition: Partition,
        plan: Plan,
        device: Device,
        paths: Sequence[Path],
        rule: UpdateRule | None,
        promises: Promises,
        world: World | None = None,
    ) -> None:
        """Allocate memory and start threads. ``attach`` then moves the model in.

        Args:
            partition: The model in units.
            plan: Checked against the partition.
            device: Taken over: closed with the engine, also if this raises.
            paths: Folders of the disk tier.
            rule: None without an optimizer.
            promises: See ``Promises``.
            world: The ranks that train the model together; taken over. None: there is only one rank.
        """
        self.model, self.device = partition.modules[0], device
        self.opened = Opened(partition.spec, plan, device, paths, world, has_updates=rule is not None)
        order, workers = self.opened.order, self.opened.workers
        with self.opened.closed_on_error():
            self.units = self._units_of(partition)
        self.places = {id(p): (u, i) for u in self.units for i, p in enumerate(u.params)}
        self.places |= {id(weight.param): self.places[id(weight.named[0][1])] for weight in partition.quantized}
        self.run = Recovery(device)
        self.weights = StreamedWeights(
            self.units, order.weights, self.run, partition.spec, plan, has_steps=rule is not None
        )
        self.gradients = self._gradients_of(promises, run_here if workers is None else workers.run_all, world)
        self.access = ValueAccess(self.opened.tiers, order.pools, device, self.weights, world)
        self.values = ParameterValues(self.places, self.access, has_optimizer=rule is not None)
        self.settings = RuleSettings(rule, self.values.spec)
        self._stepper: StreamedUpdates | PlainUpdates = self._streamed_updates()
        self.attached = Attached(self.model, self.units, self.opened, self.gradients)

    @property
    def num_ranks(self) -> int:
        """Processes that train the model together."""
        return 1 if self.access.world is None else self.access.world.size

    @property
    def has_cut_weights(self) -> bool:
        """Whether reading weights needs the other ranks."""
        return any(unit.ledger.cut.is_cut for unit in self.units)

    def _units_of(self, partition: Partition) -> list[Unit]:
        ledgers = self.opened.order.ledgers
        owners = [_Absence(self) for _ in ledgers]
        everything = zip(ledgers, partition.modules, partition.params, owners, strict=True)
        units = [Unit(ledger, module, list(params), owner) for ledger, module, params, owner in everything]
        for owner, unit in zip(owners, units, strict=True):
            owner.unit = unit
        return units

    def _gradients_of(self, promises: Promises, run_all: RunAll, world: World | None) -> BackwardGradients:
        order, tiers = self.opened.order, self.opened.tiers
        homes = GradientHomes(tiers, order.pools, self.device, run_all, world, clipping=promises.clipping)
        return BackwardGradients(self.units, order.gradients, homes, promises.accumulation_steps, self.run)

    def _streamed_updates(self) -> StreamedUpdates:
        opened, order = self.opened, self.opened.order.updates
        numbers = Numbers(self.access)
        early = EarlyUpdates(opened.order.out_of_place, self.access, opened.workers, self.settings.now, numbers)
        self.gradients.on_last = early.attempt
        self.run.parts += [early.clear, opened.order.activations.clear, opened.order.pools.clear]
        return StreamedUpdates(self.units, self.gradients, self.weights, order, early, self.access, opened.workers)

    def attach(self, values: Callable[[Unit], Values], compiling: Compiling | None = None) -> None:
        """Move the model in and take over forward and backward.

        Args:
            values: Gives the first values of a unit's parameters; called in module order.
            compiling: Compiles the blocks; None: they run as they are.
        """
        opened, plan = self.opened, self.opened.plan
        with opened.closed_on_error():
            self.attached.move_in(values)
            room = ActivationRoom(0)
            if plan.kept_bytes:
                room = ActivationRoom(plan.kept_bytes + plan.workspace_bytes, self.device.meter())
            if plan.plain:
                self._stepper = plain = PlainUpdates(self.units, self.device, Numbers(self.access))
                self.attached.watch_results(plain)
            self.calls = SharedByCalls(
                weights=self.weights,
                gradients=None if plan.plain else self.gradients,
                device=self.device,
                comparisons=PendingComparisons(self.device),
                access=self.access,
                room=room,
                activations=opened.order.activations,
                arguments=SharedArguments(),
                compiling=Compiling(options=False) if compiling is None else compiling,
            )
            self.attached.take_calls(self.calls, self._guard)

    def _guard(self) -> ModuleGuard:
        self.model.__dict__[ATTACHMENT] = Attachment(self)
        self.attached.undo_later(partial(self.model.__dict__.pop, ATTACHMENT, None))
        return ModuleGuard(self.model, self.units, self.values, self.weights, self.run, num_ranks=self.num_ranks)

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Submit the update of every parameter that has a gradient, and return. See [Note: forward window].

        Args:
            groups: Param groups; settings are read now.
        """
        self.run.refuse_if_closed()
        refuse_process_group("optimizer.step", self.num_ranks)
        self.device.check()
        self.calls.comparisons.settle()
        hypers = self.settings.of(groups)
        self._refuse_while_gathered()
        self.attached.guard.refuse_if_changed()
        if self.access.world is not None:
            self.access.world.begin_step()
        with self.weights.saved.all_given_back() if self.weights.saving else nullcontext():
            # Before anything is done.
            steps: Any = self._stepper.steps_of(hypers, self.attached.guard.refuse_if_adapted)
            with self._refusing_what_follows():
                self._stepper.take(steps)
        self.calls.room.end_step()
        self.attached.held_back.give_back_if_due()

    @contextmanager
    def _refusing_what_follows(self) -> Iterator[None]:
        """Refuse further use if a step is cut short: some units are updated, some not, and slots are not given back."""
        try:
            yield
        except BaseException as error:
            self.run.refusal = OutcoreError(
                "expected whole optimizer steps, but the last one was cut short, with some units updated and some not, "
                f"by {type(error).__name__}: {error}; close the model, and go on from what was saved before"
            )
            raise

    def _refuse_while_gathered(self) -> None:
        unit = next((u for u in self.units if u.presence.now is Beneath.GATHERED), None)
        if unit is not None:
            raise UnsupportedError(
                f"expected optimizer.step() outside of outcore.gathered(), but unit '{unit.label}' is gathered; leave "
                "the block first"
            )

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.run.is_closed

    def refuse_if_closed(self) -> None:
        """See ``Recovery``."""
        self.run.refuse_if_closed()

    def close(self) -> None:
        """Let running work end; give back memory, files and threads, and the module its own forward. Idempotent.

        Queued operations are dropped, and updates stop after the blocks that they have begun, except for what other
        ranks wait for. If a Ctrl-C ends the waiting, everything is given back all the same.
        """
        if self.run.is_closed:
            return
        self.run.is_closed = True
        with ExitStack() as rest:  # each is called even if an interrupt ends the one before
            rest.callback(self._forget)
            rest.callback(self.opened.close)
            rest.callback(self.opened.saves.finish)
            self.attached.undo()

    def _forget(self) -> None:
        for unit in self.units:
            unit.close()
        self.weights.close()
        self.opened.order.activations.close()
        self.opened.order.pools.close()
        self._stepper.close()
        self.access.close()


class _Absence:
    """Answers for the absent parameters of one unit."""

    unit: Unit

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    @property
    def num_ranks(self) -> int:
        """Processes that train the model together."""
        engine = self._engine()
        return 1 if engine is None else engine.num_ranks

    def name_of(self, param: torch.Tensor) -> str:
        """Return the fully qualified name."""
        names = (s.name for p, s in zip(self.unit.params, self.unit.spec.params, strict=True) if p is param)
        return next(names, "?")

    def make_present(self) -> bool:
        """Make parameters that live on the device present: they need only wait for their update. False for others."""
        engine = self._engine()
        if engine is None or engine.is_closed or not self.unit.ledger.cut.is_resident:
            return False
        engine.weights.present_on_demand(self.unit)
        return True

    def absence(self) -> str:
        """Say where the bytes are."""
        engine = self._engine()
        if engine is None or engine.is_closed:
            return "gone: the model that outcore prepared was closed"
        places = {"device": "cut over the ranks", "host": "in host memory", "disk": "in the disk tier"}
        return f"{places[self.unit.plan.weights]} between calls of its unit"


ATTACHMENT = "_outcore"
"""Key of the ``Attachment`` in the prepared model's ``__dict__``."""


class Attachment:
    """Ties engine and model together."""

    def __init__(self, engine: Engine) -> None:
        """Args: engine: The engine of the model."""
        self.engine = engine


def attachment_of(module: nn.Module) -> Attachment | None:
    """Return the attachment of a prepared model; None if it is not prepared."""
    found = module.__dict__.get(ATTACHMENT)
    return found if isinstance(found, Attachment) else None


def engine_of(module: nn.Module, what: str) -> Engine:
    """Return the engine of a prepared model.

    Args:
        module: The model.
        what: Names the caller in the error.

    Raises:
        ConfigError: The model is not prepared.
    """
    attachment = attachment_of(module)
    if attachment is None:
        raise ConfigError(
            f"{what}: expected a model that outcore.prepare() returned, but got a {type(module).__name__} that is not "
            "prepared"
        )
    return attachment.engine
