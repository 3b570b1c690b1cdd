"""Early updates: run inside backward, and kept if ``step()`` finds that nothing came between.

[Note: early updates] When the last promised gradient of a unit is home, its update starts at once, with the settings
that the param groups have now and no factor: behind the rest of backward instead of behind the next forward. It works
*out of place*: from the homes of states and weights into a second pair of homes. ``step()`` compares what it was asked
to do with what was done. If both are the same, the homes change places (weights that live on the device or on disk are
sent there); if not, because gradients were clipped or scaled or dropped, a setting changed, or anybody wrote weights,
states or gradients, the attempt is forgotten and the unit is updated as ever. So the result never depends on it.

Nobody needs to wait for the second homes: what was there was last used before the gradients that the next attempt waits
for were made.

With ``clipping=False`` every attempt is kept (the backward window); with clipping those of steps that do not clip
(speculation). Then ``step()`` must know the clip factor, and on an accelerator waits for the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.core.errors import OutcoreError
from outcore.memory.arena import Buffer
from outcore.memory.disk import DiskStore
from outcore.optim.rules import Hyper
from outcore.runtime.device import Device
from outcore.runtime.lanes import Handle, Lane, newest
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer, expect_extent
from outcore.runtime.unit_gradients import UnitGradients
from outcore.runtime.updates import Borrowed, Change, Updates

Hypers = Callable[[], Mapping[int, Hyper]]
"""Settings by parameter id, as the param groups have them now."""


@dataclass(eq=False, slots=True)
class _Attempt:
    """An update that may turn out to be the one that ``step()`` asks for."""

    changes: Mapping[int, Change]
    versions: tuple[int, int, int]
    updated: Handle | None = None
    states_ready: Handle | None = None
    is_dropped: bool = False

    def is_what(self, changes: Mapping[int, Change], versions: object) -> bool:
        """Whether it did what ``step()`` asks for, factors apart."""
        if self.versions != versions or self.changes.keys() != changes.keys():
            return False
        return all(self.changes[i].hyper == c.hyper and self.changes[i].step == c.step for i, c in changes.items())


class EarlyUpdates:
    """Attempts of the units that the plan updates early. See [Note: early updates]."""

    def __init__(self, updates: Updates, device: Device, traffic: Traffic, hypers: Hypers) -> None:
        """Args: updates: Shares its way of bringing bytes together. hypers: Asked during backward."""
        self._updates, self._device, self._traffic, self._hypers = updates, device, traffic, hypers
        self._attempts: dict[str, _Attempt] = {}

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
            self._attempts[unit.name] = self._start(gradients, _Attempt(changes, _versions(gradients)))

    def _start(self, gradients: UnitGradients, attempt: _Attempt) -> _Attempt:
        unit = gradients.unit
        grads, old = self._updates.gradients(unit), self._updates.states(unit)
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
            Lane.UPDATE, f"update {unit.label} early", work, reads=reads, writes=writes, after=after
        )
        self._updates.give_back_gradients(unit, grads, updated)
        unit.states_readers = [updated]
        if old_weights is not None:
            unit.weights_readers = newest([*unit.weights_readers, updated])
        attempt.updated = attempt.states_ready = updated
        if old is not None and old.slot is not None:
            attempt.states_ready = self._write_states(unit, old, attempt)
        return attempt

    def _work(
        self,
        gradients: UnitGradients,
        attempt: _Attempt,
        new: tuple[Buffer, Buffer | None, Buffer],
        old: tuple[Borrowed | None, Buffer | None],
    ) -> Callable[[], None]:
        """What the update lane does: old bytes to new ones."""
        unit, (grads, new_states, new_weights), (borrowed, old_weights) = gradients.unit, new, old
        old_states = borrowed.buffer if borrowed is not None and borrowed.buffer is not new_states else None
        pieces = self._updates.pieces(
            gradients, attempt.changes, grads, new_states, new_weights, old_states=old_states, old_weights=old_weights
        )
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(unit.num_trainable):
            if i not in attempt.changes:
                copies += _carried(unit, i, (new_states, new_weights), (old_states, old_weights))
        run = self._updates.run

        def work() -> None:
            if attempt.is_dropped:  # its turn came too late: nobody will read what it makes
                return
            run(pieces)
            for to, origin in copies:
                to.copy_(origin)

        return work

    def _write_states(self, unit: Unit, states: Borrowed, attempt: _Attempt) -> Handle:
        extent, buffer = expect_extent(unit.next_states, unit.label), states.buffer
        disk: DiskStore = self._updates.disk()

        def work() -> None:
            if not attempt.is_dropped:
                disk.write(extent, buffer.bytes)

        written = self._device.submit(
            Lane.DISK_WRITE,
            f"write states of {unit.label}",
            work,
            reads=[buffer.region],
            writes=[extent.region],
            after={"states updated": attempt.updated},
        )
        self._traffic.add(Lane.DISK_WRITE, extent.nbytes)
        self._updates.give(states, written, Lane.DISK_WRITE)
        return written

    # In step().

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
        if not attempt.is_what(changes, _versions(gradients)) or not self._are_ones(changes, copied):
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

    def _drop(self, unit: Unit) -> None:
        attempt = self._attempts.pop(unit.name, None)
        if attempt is not None:
            attempt.is_dropped = True


def _versions(gradients: UnitGradients) -> tuple[int, int, int]:
    return gradients.unit.weights_version, gradients.unit.states_version, gradients.version


def _carried(
    unit: Unit, index: int, new: tuple[Buffer | None, Buffer], old: tuple[Buffer | None, Buffer | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a parameter without gradient takes along to the second homes: states, and its weight."""
    (new_states, new_weights), (old_states, old_weights) = new, old
    copies = []
    weight = unit.native_views(new_weights)[index].view(-1)
    if new_states is not None and old_states is not None:
        for name in unit.state_names:
            copies.append((unit.state_views(new_states, name)[index], unit.state_views(old_states, name)[index]))
    if old_weights is not None:
        copies.append((weight, unit.native_views(old_weights)[index].view(-1)))
    elif new_states is not None:
        copies.append((weight, unit.state_views(new_states, "master")[index]))
    return copies
