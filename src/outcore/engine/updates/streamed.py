"""A step of a streamed plan: it submits the updates of all units, in the order of their next use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.streamed_weights import StreamedWeights
from outcore.engine.unit.unit import Unit
from outcore.engine.updates.early_updates import EarlyUpdates
from outcore.engine.updates.unit_update import Factors, ParameterChange, UnitUpdate
from outcore.engine.updates.workers import UpdateWorkers
from outcore.engine.values.access import ValueAccess
from outcore.engine.values.edits import let_masters_follow
from outcore.optim.rules import Hyper, counts, said
from outcore.order.updates import UpdateOrder

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
