"""What a step does in a streamed plan: submit the updates of all units, in the order of their next use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from outcore.device.lanes import Handle
from outcore.optim.rules import Hyper, counts, said
from outcore.order.updates import UpdateOrder
from outcore.runtime.gradients.handle import GradHandle
from outcore.runtime.gradients.passes import Gradients
from outcore.runtime.unit.unit import Unit
from outcore.runtime.updates.early import EarlyUpdates
from outcore.runtime.updates.of_unit import Change, Factors, UnitUpdate
from outcore.runtime.updates.workers import UpdateWorkers
from outcore.runtime.values.access import Access
from outcore.runtime.values.edits import take_edits
from outcore.runtime.weights import Weights


class Stepper(Protocol):
    """How a step is made."""

    def steps_of(self, hypers: Mapping[int, Hyper], on_missing: Callable[[], None]) -> Any:
        """What is to be done, for ``take``.

        Args:
            hypers: Settings, by the id of the parameter. A parameter without keeps its gradient, as in a plain loop.
            on_missing: Called if a trained parameter has no gradient. May raise.

        Raises:
            UnsupportedError: It cannot be. Nothing was done then.
        """

    def take(self, steps: Any) -> None:
        """Do it, or submit it."""

    def forget(self) -> None:
        """Let go of all memory, so that it can be given back."""


_NONE: Mapping[str, float] = {}
_Steps = tuple[Mapping[str, Mapping[int, GradHandle]], Mapping[int, Hyper]]
"""Gradients that units hold, and settings."""


class StreamedUpdates:
    """Updates of units wherever they live. Submitted, not waited for."""

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Gradients,
        weights: Weights,
        order: UpdateOrder[Handle],
        early: EarlyUpdates,
        access: Access,
        workers: UpdateWorkers | None,
    ) -> None:
        """Args: units: All. workers: None if every unit is updated on the device."""
        self._units, self._gradients, self._weights = units, gradients, weights
        self._order, self._early, self._access, self._workers = order, early, access, workers

    def steps_of(self, hypers: Mapping[int, Hyper], on_missing: Callable[[], None]) -> _Steps:
        """What is to be done."""
        self._gradients.refuse_unfinished()
        held = {u.name: self._gradients.of[u.name].held_handles() for u in self._units}
        if any(len(held[u.name]) < u.num_trainable for u in self._units):
            on_missing()
        for unit in self._units:
            take_edits(unit, self._access)
        return held, hypers

    def take(self, steps: _Steps) -> None:
        """Submit it. What each unit needs, and after what, is said in ``order.updates``."""
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
        """What a step does, apart from numbers of gradients: each rank does it to its own part of the parameters."""
        facts = []
        for unit in self._units:
            for i, handle in held[unit.name].items():
                here = [float(factor) for factor in handle.factors if factor.is_cpu]
                facts.append((unit.ledger.index, i, handle.is_zero, len(handle.factors), here))
        settings = [said(hypers[id(p)]) for u in self._units for p in u.params if id(p) in hypers]
        return f"{facts} {settings}"

    def forget(self) -> None:
        """Nothing is held."""

    def _update_of(
        self,
        unit: Unit,
        held: Mapping[str, Mapping[int, GradHandle]],
        hypers: Mapping[int, Hyper],
        factors: Factors,
    ) -> UnitUpdate | None:
        """What the step does with a unit, if anything."""
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
    ) -> tuple[dict[int, Change], list[Handle]]:
        changes, copied, on_host = {}, [], unit.plan.is_updated_on_host
        of_group, number = None, True
        for i, handle in held.items():
            hyper = hypers.get(id(unit.params[i]))
            if hyper is None:  # trainable, but given to no optimizer: it keeps its gradient, as in a plain loop
                continue
            mine: list[torch.Tensor] = [*handle.averaging, *handle.factors]
            if on_host:
                mine, ready = factors.of(handle)
                copied += ready
            step = unit.steps[i] + 1
            if hyper is not of_group:  # one for all parameters of a group
                of_group, number = hyper, counts(hyper)
            unit.steps[i] += number
            before = self._early.numbers.advance(unit, i, hyper, step) if unit.views.numbers[i] else _NONE
            changes[i] = Change(step, hyper, tuple(mine), handle.is_zero, before)
        return changes, copied
