"""Updates on the device of states that live in host memory.

[Note: staged updates] The device updates faster than the CPU, and the link has room beside the fetches. So a plan may
give it a share of the units whose states live in host memory: states and gradients go to a staging slot on the device,
are updated there, and states and new weights go home, each on a lane of its own, so that with two slots one unit comes
while another one leaves. The rule and its blocks are those of every update; on a GPU results agree to the rounding of
one kernel with those of the CPU.

The idea is that of Deep Optimizer States (arXiv:2410.21316, section 4), without its limit of one half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.memory.arena import Buffer, Region
from outcore.optim.blocks import update_blocks
from outcore.runtime.device import Device
from outcore.runtime.homes import Homes
from outcore.runtime.lanes import Handle, newest
from outcore.runtime.pieces import Change, pieces_of
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer
from outcore.runtime.unit_gradients import UnitGradients
from outcore.runtime.updates import Updates
from outcore.spec.lanes import Lane
from outcore.spec.layout import staging
from outcore.spec.model import ModelSpec


class StagedUpdates:
    """Runs updates of units whose plan says ``update: device``. See [Note: staged updates]."""

    def __init__(self, updates: Updates, homes: Homes, device: Device, traffic: Traffic, model: ModelSpec) -> None:
        """Args: updates: Shares how an update is cut into pieces."""
        self._updates, self._homes, self._device, self._traffic, self._model = updates, homes, device, traffic, model

    def submit(self, gradients: UnitGradients, changes: Mapping[int, Change]) -> None:
        """Start the update of a unit; see ``Updates.submit``."""
        unit = gradients.unit
        self._updates.begin(unit, changes)
        layout = staging(unit.spec, unit.plan, self._model)
        pool, slot = self._homes.take("device", "staging", layout.scratch[1])
        parts = [slot.buffer.part(*span) for span in layout]
        states, grads, weights, scratch = parts
        after: dict[str, Any] = {"staged": self._bring(unit, slot.free_after, states, grads, weights)}
        if unit.plan.gradients == "device":
            grads = expect_buffer(unit.gradients, unit.label)
            after["gradients stored"] = unit.gradients_ready
        after["clip factor made"] = self._factors(changes)
        updated = self._update(gradients, changes, (states, grads, weights, scratch), after)
        if unit.plan.gradients == "device":
            unit.gradients_readers = newest([*unit.gradients_readers, updated])
        left = self._take_home(unit, states, weights, updated)
        poison = self._device.poison(slot.buffer, Lane.DEVICE_UPDATE, {"staged bytes home": left})
        pool.give(slot, [h for h in (*left, poison) if h is not None])

    def _bring(self, unit: Unit, free_after: list[Handle], states: Buffer, grads: Buffer, weights: Buffer) -> Handle:
        """Copy what the update reads: states, gradients that rest in host memory, weights without a master."""
        copies: list[tuple[Buffer, Buffer]] = []
        after: dict[str, Any] = {"staging free": free_after}
        if states.nbytes:
            copies.append((states, expect_buffer(unit.states, unit.label)))
            after["states written"] = unit.states_ready
        if grads.nbytes:
            copies.append((grads, expect_buffer(unit.gradients, unit.label)))
            after["gradients stored"] = unit.gradients_ready
        if not unit.has_master:
            copies.append((weights, expect_buffer(unit.weights, unit.label).part(0, weights.nbytes)))
            after["weights updated"] = unit.weights_ready
        brought = self._copy(Lane.STATES_H2D, f"stage {unit.label}", copies, after)
        unit.states_readers = newest([*unit.states_readers, brought])
        if grads.nbytes:
            unit.gradients_readers = newest([*unit.gradients_readers, brought])
        if not unit.has_master:
            unit.weights_readers = newest([*unit.weights_readers, brought])
        return brought

    def _factors(self, changes: Mapping[int, Change]) -> Handle | None:
        """What the update must wait for to read the factors, if compute makes them on a device of its own."""
        factors = [f for change in changes.values() for f in change.factors if f.device.type != "cpu"]
        for factor in factors:
            self._device.hand_over(factor, Lane.DEVICE_UPDATE)
        return self._device.mark("clip factor made") if factors else None

    def _update(
        self,
        gradients: UnitGradients,
        changes: Mapping[int, Change],
        parts: tuple[Buffer, Buffer, Buffer, Buffer],
        after: Mapping[str, Any],
    ) -> Handle:
        unit, (states, grads, weights, scratch) = gradients.unit, parts
        held = states if states.nbytes else None
        pieces = pieces_of(gradients, changes, grads, held, weights)
        others = [i for i in range(unit.num_trainable) if i not in changes and unit.has_master]
        room = scratch.bytes[: min(scratch.nbytes, self._device.update_block_bytes)]
        masters = unit.state_views(states, "master") if others else []
        copies = [(unit.flat_views(weights)[i], masters[i]) for i in others]

        def work() -> None:
            update_blocks(pieces, room)
            for to, origin in copies:
                to.copy_(origin)

        return self._device.submit(
            Lane.DEVICE_UPDATE,
            f"update {unit.label}",
            work,
            reads=[grads.region] if grads.nbytes else [],
            writes=[part.region for part in (states, weights, scratch) if part.nbytes],
            after=after,
        )

    def _take_home(self, unit: Unit, states: Buffer, weights: Buffer, updated: Handle) -> list[Handle]:
        """Copy states and new weights to their homes; the handles after which the slot is free."""
        left = []
        if states.nbytes:
            home = expect_buffer(unit.states, unit.label)
            after: dict[str, Any] = {"updated on the device": updated, "states read": unit.states_readers}
            unit.states_ready = self._copy(Lane.STATES_D2H, f"states of {unit.label}", [(home, states)], after)
            left.append(unit.states_ready)
        unit.states_readers = []
        home = expect_buffer(unit.weights, unit.label).part(0, weights.nbytes)
        is_resident = unit.plan.weights == "device"
        readers = [self._device.mark(f"weights of {unit.label} used")] if is_resident else unit.weights_readers
        label = "weights used" if is_resident else "weights fetched"
        lane = Lane.DEVICE_UPDATE if is_resident else Lane.STATES_D2H
        after = {"updated on the device": updated, label: readers, "weights written": unit.weights_ready}
        unit.weights_ready = self._copy(lane, f"new weights of {unit.label}", [(home, weights)], after)
        unit.weights_readers = []
        if is_resident:
            unit.mark_absent()  # reading one before the copy is done must wait for it
        return [*left, unit.weights_ready]

    def _copy(self, lane: Lane, name: str, copies: list[tuple[Buffer, Buffer]], after: Mapping[str, Any]) -> Handle:
        def work() -> None:
            for to, origin in copies:
                to.bytes.copy_(origin.bytes, non_blocking=True)

        reads: list[Region] = [origin.region for _, origin in copies]
        writes: list[Region] = [to.region for to, _ in copies]
        self._traffic.add(lane, sum(to.nbytes for to, _ in copies))
        return self._device.submit(lane, name, work, reads=reads, writes=writes, after=after)
