"""Early updates: run inside backward, and kept if ``step()`` finds that nothing came between.

[Note: early updates] When the last promised gradient of a unit is home, its update starts at once, with the settings
that the param groups have now and no factor: behind the rest of backward instead of behind the next forward. It works
*out of place*: from the homes of states and weights into a second pair of homes. ``step()`` compares what it was asked
to do with what was done. If both are the same, the homes change places (weights that live on the device or on disk are
sent there); if not, because gradients were clipped or scaled or dropped, a setting changed, or anybody wrote weights,
states or gradients, the attempt is forgotten and the unit is updated as ever. So the result never depends on it.

Nobody needs to wait for the second homes: what was there was last used before the gradients that the next attempt waits
for were made.

With ``clipping=False`` no attempt is lost to a factor (the backward window); with clipping those of steps that clip are
(speculation).

[Note: as many as there is time for] Backward may give gradients faster than updates take them. If all attempts were
made in order, the units that forward needs first would be updated last, and forward would wait for everything. So an
attempt whose turn comes when the gradients of a later one are home too is *overtaken*: it is not made. What remains is
spread evenly over the model, as dense as backward has time for, whatever the rates are. ``step()`` waits for the end of
backward, gives up the attempts whose turn has not come, and updates all these units in the order of their next use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.core.errors import OutcoreError
from outcore.memory.arena import Buffer
from outcore.memory.disk import Extent
from outcore.optim.rules import Hyper
from outcore.runtime.device import Device
from outcore.runtime.lanes import SKIPPED, Handle, newest
from outcore.runtime.pieces import Change, pieces_of
from outcore.runtime.supply import Borrowed, Supply
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer, expect_extent
from outcore.runtime.unit_gradients import UnitGradients
from outcore.runtime.updates import Updates
from outcore.spec.lanes import Lane

Hypers = Callable[[], Mapping[int, Hyper]]
"""Settings by parameter id, as the param groups have them now."""


@dataclass(eq=False, slots=True)
class _Attempt:
    """An update that may turn out to be the one that ``step()`` asks for."""

    changes: Mapping[int, Change]
    versions: tuple[int, int, int]
    gradients_ready: Handle | None
    next: _Attempt | None = None
    """The one that was started after it."""
    updated: Handle | None = None
    states_ready: Handle | None = None
    moved: Mapping[str, int] = field(default_factory=dict)
    """Lane -> bytes that it moves if it is made."""
    is_wanted: bool = True
    """Not any more once ``step()`` asked for something else: what is under way comes to its end, but does nothing."""
    _is_made: bool | None = None
    """None until its turn comes, or ``step()`` does."""
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def is_made(self) -> bool:
        """Asked by its operations, of which the first one decides. See [Note: as many as there is time for]."""
        with self._deciding:
            if self._is_made is None:
                self._is_made = self.next is None or not self.next.has_gradients()
            return self._is_made

    def settle(self) -> bool:
        """Give it up if its turn has not come. Returns whether it was made, or is under way."""
        with self._deciding:
            self._is_made = bool(self._is_made)
            return self._is_made

    def has_gradients(self) -> bool:
        """Whether its gradients are home."""
        return self.gradients_ready is None or self.gradients_ready.is_over()

    def is_what(self, changes: Mapping[int, Change], versions: object) -> bool:
        """Whether it did what ``step()`` asks for, factors apart."""
        if self.versions != versions or self.changes.keys() != changes.keys():
            return False
        return all(self.changes[i].hyper == c.hyper and self.changes[i].step == c.step for i, c in changes.items())


class EarlyUpdates:
    """Attempts of the units that the plan updates early. See [Note: early updates]."""

    def __init__(self, updates: Updates, supply: Supply, device: Device, traffic: Traffic, hypers: Hypers) -> None:
        """Args: hypers: Asked during backward."""
        self._updates, self._supply, self._device = updates, supply, device
        self._traffic, self._hypers = traffic, hypers
        self._attempts: dict[str, _Attempt] = {}
        self._last: _Attempt | None = None

    # In backward.

    def attempt(self, gradients: UnitGradients) -> None:
        """Start the update of a unit whose last promised gradient is on its way home."""
        unit = gradients.unit
        self._drop(unit)
        try:
            handles, hypers = gradients.held_handles(), self._hypers()
        except OutcoreError:  # step() will say it
            return
        if any(handle.is_zero or handle.factors for handle in handles.values()):
            return
        changes = {
            i: Change(unit.steps[i] + 1, hypers[id(unit.params[i])], (), is_zero=False)
            for i in handles
            if id(unit.params[i]) in hypers
        }
        if changes:
            attempt = _Attempt(changes, _versions(gradients), unit.gradients_ready)
            self._attempts[unit.name] = attempt
            if self._last is not None:
                self._last.next = attempt
            self._last, before = attempt, self._traffic.totals()
            self._start(gradients, attempt)
            attempt.moved = self._traffic.since(before)

    def _start(self, gradients: UnitGradients, attempt: _Attempt) -> None:
        unit = gradients.unit
        grads = self._supply.gradients(unit, attempt.is_made)
        old = self._supply.states(unit, attempt.is_made)
        new_weights = expect_buffer(unit.next_weights, unit.label).part(0, unit.spec.trainable_bytes)
        new_states = None
        if old is not None:
            # From disk they come as a copy, which may be changed in place.
            new_states = unit.next_states if isinstance(unit.next_states, Buffer) else old.buffer
        old_weights = None if unit.has_master else expect_buffer(unit.weights, unit.label)
        work = self._work(gradients, attempt, (grads.buffer, new_states, new_weights), (old, old_weights))
        reads = [grads.buffer.region] + ([old_weights.region] if old_weights is not None else [])
        writes = [new_weights.region] + ([new_states.region] if new_states is not None else [])
        after: dict[str, Any] = dict(grads.after)
        if old is not None:
            reads += [old.buffer.region] if new_states is not old.buffer else []
            after |= old.after
        if old_weights is not None:
            after["weights updated"] = unit.weights_ready
        updated = self._device.submit(
            Lane.UPDATE,
            f"update early {unit.label}",
            work,
            reads=reads,
            writes=writes,
            after=after,
            is_due=attempt.is_made,
        )
        self._supply.give_back_gradients(unit, grads, updated)
        unit.states_readers = [updated]
        if old_weights is not None:
            unit.weights_readers = newest([*unit.weights_readers, updated])
        attempt.updated = attempt.states_ready = updated
        if old is not None and old.slot is not None:
            extent = expect_extent(unit.next_states, unit.label)
            attempt.states_ready = self._supply.write_states(
                unit, old, extent, updated, attempt.is_made, lambda: attempt.is_wanted
            )

    def _work(
        self,
        gradients: UnitGradients,
        attempt: _Attempt,
        new: tuple[Buffer, Buffer | None, Buffer],
        old: tuple[Borrowed | None, Buffer | None],
    ) -> Callable[[], object]:
        """What the update lane does: old bytes to new ones."""
        unit, (grads, new_states, new_weights), (borrowed, old_weights) = gradients.unit, new, old
        old_states = borrowed.buffer if borrowed is not None and borrowed.buffer is not new_states else None
        pieces = pieces_of(
            gradients, attempt.changes, grads, new_states, new_weights, old_states=old_states, old_weights=old_weights
        )
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(unit.num_trainable):
            if i not in attempt.changes:
                copies += _carried(unit, i, (new_states, new_weights), (old_states, old_weights))
        run = self._updates.run

        def work() -> object:
            if not attempt.is_wanted:
                return SKIPPED
            run(pieces)
            for to, origin in copies:
                to.copy_(origin)
            return None

        return work

    # In step().

    def settle(self) -> None:
        """Backward is over: give up the attempts whose turn has not come. Waits for the end of backward."""
        if not self._attempts:
            return
        self._device.mark("backward is over").wait()  # orders nothing: only so that attempts have their chance
        for attempt in self._attempts.values():
            attempt.settle()

    def keep(self, gradients: UnitGradients, changes: Mapping[int, Change], copied: Sequence[Handle]) -> bool:
        """Let the unit's attempt be its update, if it is the one that is asked for.

        Args:
            gradients: Of the unit; its parameters are not bound.
            changes: What ``step()`` asks for.
            copied: Copies of clip factors to the host that may be under way.

        Returns:
            False if the unit must be updated still; the attempt is forgotten.
        """
        unit = gradients.unit
        attempt = self._attempts.get(unit.name)
        if attempt is None:
            return False
        is_wanted = attempt.is_what(changes, _versions(gradients)) and self._are_ones(changes, copied)
        if not is_wanted or not attempt.is_made():
            self._drop(unit)
            return False
        del self._attempts[unit.name]
        self._updates.begin(unit, changes)
        self._change_places(unit, attempt)
        return True

    def _are_ones(self, changes: Mapping[int, Change], copied: Sequence[Handle]) -> bool:
        if any(change.is_zero for change in changes.values()):
            return False
        factors = {id(f): f for change in changes.values() for f in change.factors}
        if factors:
            self._device.wait("clip factor copied", copied)
        return all(bool(factor == 1) for factor in factors.values())

    def _change_places(self, unit: Unit, attempt: _Attempt) -> None:
        updated = attempt.updated
        if updated is None:
            raise AssertionError("an attempt that was not started")
        unit.states, unit.next_states = unit.next_states, unit.states
        unit.states_ready, unit.states_readers = attempt.states_ready, []
        if unit.plan.weights == "host":
            unit.weights, unit.next_weights = unit.next_weights, unit.weights
            unit.weights_ready, unit.weights_readers, sent = updated, [], None
        else:
            made = expect_buffer(unit.next_weights, unit.label).part(0, unit.spec.trainable_bytes)
            sent = self._updates.send_weights(unit, made, updated)
        for home in (unit.next_states, unit.next_weights):
            if isinstance(home, Buffer):
                self._device.poison(home, lane=Lane.UPDATE, after={"new weights sent": sent})

    def reset(self) -> None:
        """Forget all attempts. See [Note: cut short]."""
        while self._attempts:
            _, attempt = self._attempts.popitem()
            attempt.settle()
            attempt.is_wanted = False
        self._last = None

    def _drop(self, unit: Unit) -> None:
        attempt = self._attempts.pop(unit.name, None)
        if attempt is not None:
            if not attempt.settle():
                self._traffic.take_back(attempt.moved)
            attempt.is_wanted = False
            if isinstance(unit.next_states, Extent):
                self._supply.forget(unit.next_states)


def _versions(gradients: UnitGradients) -> tuple[int, int, int]:
    return gradients.unit.weights_version, gradients.unit.states_version, gradients.version


def _carried(
    unit: Unit, index: int, new: tuple[Buffer | None, Buffer], old: tuple[Buffer | None, Buffer | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a parameter without gradient takes along to the second homes: states, and its weight."""
    (new_states, new_weights), (old_states, old_weights) = new, old
    copies = []
    weight = unit.flat_views(new_weights)[index]
    if new_states is not None and old_states is not None:
        for name in unit.state_names:
            copies.append((unit.state_views(new_states, name)[index], unit.state_views(old_states, name)[index]))
    if old_weights is not None:
        copies.append((weight, unit.flat_views(old_weights)[index]))
    elif new_states is not None:
        copies.append((weight, unit.state_views(new_states, "master")[index]))
    return copies
