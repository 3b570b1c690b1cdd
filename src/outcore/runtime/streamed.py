"""What a step does in a streamed plan: submit the updates of all units, in the order of their next use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from outcore.optim.rules import Hyper
from outcore.runtime.access import Access
from outcore.runtime.device import Device
from outcore.runtime.early import EarlyUpdates
from outcore.runtime.edits import take_edits
from outcore.runtime.grad_handle import GradHandle
from outcore.runtime.gradients import Gradients
from outcore.runtime.lanes import Handle
from outcore.runtime.pieces import Change
from outcore.runtime.staged_updates import StagedUpdates
from outcore.runtime.supply import Supply
from outcore.runtime.unit import Unit
from outcore.runtime.updates import Updates
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


class Ways(NamedTuple):
    """In which the update of a unit is made."""

    updates: Updates
    staged: StagedUpdates
    early: EarlyUpdates
    supply: Supply
    access: Access


_Steps = tuple[Mapping[str, Mapping[int, GradHandle]], Mapping[int, Hyper]]
"""Gradients that units hold, and settings."""


class StreamedUpdates:
    """Updates of units wherever they live. Submitted, not waited for."""

    def __init__(
        self, units: Sequence[Unit], gradients: Gradients, weights: Weights, device: Device, ways: Ways
    ) -> None:
        """Args: units: All."""
        self._units, self._gradients, self._weights = units, gradients, weights
        self._device, self._ways = device, ways

    def steps_of(self, hypers: Mapping[int, Hyper], on_missing: Callable[[], None]) -> _Steps:
        """What is to be done."""
        held = {u.name: self._gradients.of[u.name].held_handles() for u in self._units}
        if any(len(held[u.name]) < u.num_trainable for u in self._units):
            on_missing()
        for unit in self._units:
            take_edits(unit, self._ways.access, self._device)
        return held, hypers

    def take(self, steps: _Steps) -> None:
        """Submit it."""
        (held, hypers), ways = steps, self._ways
        cache: dict[int, tuple[torch.Tensor, Handle | None]] = {}
        ways.early.settle()
        for unit in ways.supply.kept_first(self._weights.units_by_next_use()):
            changes, copied = self._changes(unit, held[unit.name], hypers, cache)
            gradients = self._gradients.of[unit.name]
            if ways.early.keep(gradients, changes, copied) or not changes:
                continue
            if unit.plan.update == "device":
                ways.staged.submit(gradients, changes)
            else:
                ways.updates.submit(unit, gradients, changes, copied)
        self._gradients.after_step()
        self._weights.prefetch_after_update()

    def forget(self) -> None:
        """Nothing is held."""

    def _changes(
        self,
        unit: Unit,
        held: Mapping[int, GradHandle],
        hypers: Mapping[int, Hyper],
        cache: dict[int, tuple[torch.Tensor, Handle | None]],
    ) -> tuple[dict[int, Change], list[Handle]]:
        changes, copied = {}, []
        for i, handle in held.items():
            hyper = hypers.get(id(unit.params[i]))
            if hyper is None:  # trainable, but given to no optimizer: it keeps its gradient, as in a plain loop
                continue
            factors: list[torch.Tensor] = list(handle.factors)
            if unit.is_updated_on_host:
                factors, ready = self._ways.updates.host_factors(handle, cache)
                copied += ready
            unit.steps[i] += 1
            changes[i] = Change(unit.steps[i], hyper, tuple(factors), handle.is_zero)
        return changes, copied
