"""Updates of a streamed plan: those of a step, in the order of the units' next use, and early ones inside backward.

[Note: early updates] When the last promised gradient of a unit is home, its update starts at once, beside the rest of
backward instead of beside the next forward. It takes the settings that the param groups have now, and no factor. It
works *out of place*: from the homes of states and weights into a second pair of homes. ``step()`` compares what it was
asked to do with what was done. If both are the same, the homes change places; weights that live on the device or on
disk are sent there. They differ if gradients were clipped, scaled or dropped, if a setting changed, or if anything else
wrote weights, states or gradients. Then the attempt is forgotten, and the unit is updated as usual. So the result never
depends on it.

A write to the second homes waits only for saves, which may still read them: their other readers finished before the
gradients of the next attempt existed.

With ``clipping=False`` no attempt is lost to a factor (the backward window). With clipping, attempts are lost in steps
that clip (speculation).

``order.attempts`` decides which attempts are made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from outcore.core.errors import OutcoreError
from outcore.device.lanes import SKIPPED, Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.gradients.unit_gradients import UnitGradients
from outcore.engine.streamed_weights import StreamedWeights
from outcore.engine.unit.unit import Unit
from outcore.engine.updates.unit_update import (
    Copies,
    Factors,
    Numbers,
    ParameterChange,
    UnitUpdate,
    copy_all,
    pieces_of,
    run_on,
)
from outcore.engine.updates.workers import UpdateWorkers
from outcore.engine.values.access import ValueAccess
from outcore.engine.values.parameter_values import let_masters_follow
from outcore.memory.arena import Buffer
from outcore.optim.rules import Hyper, counts, said
from outcore.order.attempts import Attempt, Attempts, OutOfPlaceUpdates
from outcore.order.ledger import ByteSpan
from outcore.order.updates import UpdateOrder

Hypers = Callable[[], Mapping[int, Hyper]]
"""Function that returns the current settings of the param groups, by parameter id."""


class _EarlyAttempt(Attempt):
    """An update that may turn out to be the one that ``step()`` asks for. See ``order.attempts.EarlyWork``."""

    def __init__(
        self, gradients: UnitGradients, changes: Mapping[int, ParameterChange], workers: UpdateWorkers | None
    ) -> None:
        ledger, home = gradients.unit.ledger, gradients.unit.ledger.gradients.ready
        super().__init__(
            lambda: home is None or home.is_over(),
            lambda: (made := ledger.next_weights.ready) is None or made.is_over(),
        )
        self.changes, self.gradients, self._workers = changes, gradients, workers
        self._versions = _versions(gradients)
        self._is_wanted = True

    def is_wanted(self) -> bool:
        """Return False once ``step()`` has asked for something else. What has not begun by then does nothing."""
        return self._is_wanted

    def close(self) -> None:
        """Give the attempt up, since it is not wanted."""
        self.settle()
        self._is_wanted = False

    def is_what(self, changes: Mapping[int, ParameterChange]) -> bool:
        """Return whether it did what ``step()`` asks for, apart from factors, with data that has not changed since."""
        if self._versions != _versions(self.gradients) or self.changes.keys() != changes.keys():
            return False
        return all(self.changes[i].hyper == c.hyper and self.changes[i].step == c.step for i, c in changes.items())

    def out_of_place(
        self, grads: ByteSpan, new: tuple[ByteSpan | None, ByteSpan], old: tuple[ByteSpan | None, ByteSpan | None]
    ) -> Callable[[], object]:
        """Return the work for the update lane, which makes new states and weights from old ones."""
        unit, (new_states, old_states, old_weights) = self.gradients.unit, map(_memory, (new[0], *old))
        new_weights: Buffer = new[1].memory
        pieces = pieces_of(
            self.gradients,
            self.changes,
            grads.memory,
            new_states,
            new_weights,
            old_states=old_states,
            old_weights=old_weights,
        )
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(unit.num_trainable):
            if i not in self.changes:
                copies += _carried(unit, i, (new_states, new_weights), (old_states, old_weights))

        def work() -> object:
            if not self._is_wanted:
                return SKIPPED
            run_on(self._workers, pieces)
            copy_all(copies)
            return None

        return work


class EarlyUpdates:
    """Attempts of the units that the plan updates early. See [Note: early updates]."""

    def __init__(
        self,
        order: OutOfPlaceUpdates[Handle],
        access: ValueAccess,
        workers: UpdateWorkers | None,
        hypers: Hypers,
        numbers: Numbers,
    ) -> None:
        """Args: hypers: Called during backward."""
        self.numbers = numbers
        self._order, self._access, self._device = order, access, access.device
        self._workers, self._hypers = workers, hypers
        self._attempts: dict[str, _EarlyAttempt] = {}
        self._of_step: Attempts | None = None
        """All attempts of the loop, step by step; None before the first one."""

    # In backward.

    def attempt(self, gradients: UnitGradients) -> None:
        """Start the update of a unit whose last promised gradient is on its way home."""
        unit = gradients.unit
        self._drop(unit)
        if self._access.edited.get(unit.name):  # step() must first let the masters follow
            return
        try:
            handles, hypers = gradients.held_handles(), self._hypers()
        except OutcoreError:  # step() will raise it
            return
        if any(handle.is_zero or handle.factors for handle in handles.values()) or not self.numbers.are_known(unit):
            return
        changes = {
            i: ParameterChange(
                unit.steps[i] + 1, hypers[id(unit.params[i])], (), is_zero=False, numbers=self.numbers.of(unit, i)
            )
            for i in handles
            if id(unit.params[i]) in hypers
        }
        self._of_step = of_step = self._of_step or Attempts()
        if changes and of_step.wants_next():
            attempt = self._attempts[unit.name] = _EarlyAttempt(gradients, changes, self._workers)
            of_step.add(attempt)
            self._order.attempt(unit.ledger, attempt)

    # In step().

    def settle(self) -> None:
        """Wait for the end of backward, and give up the attempts whose turn has not come."""
        if self._attempts:
            self._device.mark("backward is over").wait()  # orders nothing; it only gives attempts time to be made
        if self._of_step is not None:
            self._of_step.settle(self._attempts.values())

    def keep(self, unit: Unit, changes: Mapping[int, ParameterChange], copied: Sequence[Handle]) -> bool:
        """Return whether the unit's attempt is the update that is asked for. If not, the attempt is forgotten.

        Args:
            unit: The unit; its parameters must not be bound.
            changes: Changes that ``step()`` asks for.
            copied: Copies of clip factors to the host that may be under way.
        """
        attempt = self._attempts.get(unit.name)
        if attempt is None:
            return False
        if not attempt.is_what(changes) or not self._are_ones(changes, copied) or not attempt.is_due():
            self._drop(unit)
            return False
        del self._attempts[unit.name]
        return True

    def _are_ones(self, changes: Mapping[int, ParameterChange], copied: Sequence[Handle]) -> bool:
        if any(change.is_zero for change in changes.values()):
            return False
        factors = {id(f): f for change in changes.values() for f in change.factors}
        if factors:
            self._device.wait("clip factor copied", copied)
        return all(bool(factor == 1) for factor in factors.values())

    def clear(self) -> None:
        """Forget all attempts. See [Note: cut short]."""
        while self._attempts:
            self._attempts.popitem()[1].close()
        if self._of_step is not None:
            self._of_step.clear()

    def _drop(self, unit: Unit) -> None:
        attempt = self._attempts.pop(unit.name, None)
        if attempt is not None:
            attempt.close()
            self._order.forget_attempt(unit.ledger)


def _versions(gradients: UnitGradients) -> tuple[int, int, int]:
    return gradients.unit.weights_version, gradients.unit.states_version, gradients.version


def _memory(span: ByteSpan | None) -> Buffer | None:
    return None if span is None else span.memory


def _carried(
    unit: Unit, index: int, new: tuple[Buffer | None, Buffer], old: tuple[Buffer | None, Buffer | None]
) -> Copies:
    """Return copies that carry a parameter without gradient over to the second homes: its states and its weight."""
    (new_states, new_weights), (old_states, old_weights) = new, old
    copies = []
    weight = unit.views.own(new_weights)[index]
    if new_states is not None and old_states is not None:
        for name in unit.ledger.state_specs:
            copies.append((unit.views.state(new_states, name)[index], unit.views.state(old_states, name)[index]))
    if unit.views.is_compact[index] or not unit.ledger.has_master:
        if old_weights is not None:
            copies.append((weight, unit.views.own(old_weights)[index]))
    elif new_states is not None:
        copies.append((weight, unit.views.state(new_states, "master")[index]))
    return copies


_NONE: Mapping[str, float] = {}
_Steps = tuple[Mapping[str, Mapping[int, GradHandle]], Mapping[int, Hyper]]
"""Gradients by unit and parameter, and settings by parameter id."""


class StreamedUpdates:
    """Updates of units wherever their bytes live. They are submitted, not waited for."""

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: BackwardGradients,
        weights: StreamedWeights,
        order: UpdateOrder[Handle],
        early: EarlyUpdates,
        access: ValueAccess,
        workers: UpdateWorkers | None,
    ) -> None:
        """Args: units: All units. workers: None if every unit is updated on the device."""
        self._units, self._gradients, self._weights = units, gradients, weights
        self._order, self._early, self._access, self._workers = order, early, access, workers

    def steps_of(self, hypers: Mapping[int, Hyper], on_missing: Callable[[], None]) -> _Steps:
        """Return what is to be done, for ``take``.

        Args:
            hypers: Settings by the id of the parameter. A parameter without settings keeps its gradient, as in a plain
                loop.
            on_missing: Called if a trained parameter has no gradient. May raise.
        """
        self._gradients.refuse_unfinished()
        held = {u.name: self._gradients.of[u.name].held_handles() for u in self._units}
        if any(len(held[u.name]) < u.num_trainable for u in self._units):
            on_missing()
        for unit in self._units:
            let_masters_follow(unit, self._access)
        return held, hypers

    def take(self, steps: _Steps) -> None:
        """Submit the updates. ``order.updates`` says what each unit needs, and what each operation waits for."""
        held, hypers = steps
        factors = Factors(self._access.device)
        self._early.settle()
        world, meet = self._access.world, None
        if world is not None:
            world.last_step = hashlib.sha256(self._facts(held, hypers).encode()).hexdigest()
            meet = partial(world.meet, world.facts, "end the reads of weights before a step")
        ledgers = (unit.ledger for unit in self._weights.units_to_update())
        self._order.step(
            ledgers, lambda ledger: self._update_of(self._units[ledger.index], held, hypers, factors), meet
        )
        self._gradients.after_step()
        self._weights.prefetch_after_update()

    def _facts(self, held: Mapping[str, Mapping[int, GradHandle]], hypers: Mapping[int, Hyper]) -> str:
        """Describe the step as text, without values of gradients. It must be the same on all ranks.

        Each rank makes the step on its own part of the parameters.
        """
        facts = []
        for unit in self._units:
            for i, handle in held[unit.name].items():
                here = [float(factor) for factor in handle.factors if factor.is_cpu]
                facts.append((unit.ledger.index, i, handle.is_zero, len(handle.factors), here))
        settings = [said(hypers[id(p)]) for u in self._units for p in u.params if id(p) in hypers]
        return f"{facts} {settings}"

    def close(self) -> None:
        """Do nothing, since no memory is held."""

    def _update_of(
        self,
        unit: Unit,
        held: Mapping[str, Mapping[int, GradHandle]],
        hypers: Mapping[int, Hyper],
        factors: Factors,
    ) -> UnitUpdate | None:
        """Return the unit's update in this step, or None if nothing changes."""
        changes, copied = self._changes(unit, held[unit.name], hypers, factors)
        is_early = self._early.keep(unit, changes, copied)
        if not changes:
            return None
        gradients, device = self._gradients.of[unit.name], self._access.device
        return UnitUpdate(
            gradients, changes, copied, device, self._workers, is_early=is_early, world=self._access.world
        )

    def _changes(
        self, unit: Unit, held: Mapping[int, GradHandle], hypers: Mapping[int, Hyper], factors: Factors
    ) -> tuple[dict[int, ParameterChange], list[Handle]]:
        changes, copied, on_host = {}, [], unit.plan.is_updated_on_host
        of_group, number = None, True
        for i, handle in held.items():
            hyper = hypers.get(id(unit.params[i]))
            if hyper is None:  # trainable, but in no param group: it keeps its gradient, as in a plain loop
                continue
            mine: list[torch.Tensor] = [*handle.averaging, *handle.factors]
            if on_host:
                mine, ready = factors.of(handle)
                copied += ready
            step = unit.steps[i] + 1
            if hyper is not of_group:  # all parameters of a group share one object
                of_group, number = hyper, counts(hyper)
            unit.steps[i] += number
            before = self._early.numbers.advance(unit, i, hyper, step) if unit.views.numbers[i] else _NONE
            changes[i] = ParameterChange(step, hyper, tuple(mine), handle.is_zero, before)
        return changes, copied
