"""Updates: what ``step()`` submits, unit by unit, so that they run behind the next forward.

[Note: forward window] ``step()`` takes a snapshot of settings and clip factors, submits every update and returns.
Units are submitted in the order in which forward will need them, and a unit's fetch waits for its own update only.
Units whose states live on the device are updated on compute at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outcore.memory.arena import Buffer, Region
from outcore.optim.blocks import Piece, update_blocks
from outcore.runtime.device import Device
from outcore.runtime.disk_transfers import DiskTransfers
from outcore.runtime.grad_handle import GradHandle
from outcore.runtime.homes import Homes
from outcore.runtime.lanes import After, Handle
from outcore.runtime.pieces import Change, pieces_of
from outcore.runtime.supply import Borrowed, Supply
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer, expect_extent
from outcore.runtime.unit_gradients import UnitGradients
from outcore.runtime.weights import Weights
from outcore.runtime.workers import UpdateWorkers
from outcore.spec.lanes import Lane
from outcore.spec.layout import SCRATCH_BYTES


class Updates:
    """Runs the update rule over units, wherever their bytes live."""

    def __init__(
        self,
        homes: Homes,
        device: Device,
        traffic: Traffic,
        weights: Weights,
        supply: Supply,
        workers: UpdateWorkers | None,
    ) -> None:
        """Args: workers: None if every unit is updated on the device."""
        self._homes, self._device, self._traffic = homes, device, traffic
        self._weights, self._supply, self._workers = weights, supply, workers
        self._transfers = DiskTransfers(homes, device, traffic)

    def submit(
        self, unit: Unit, gradients: UnitGradients, changes: Mapping[int, Change], copied: Sequence[Handle]
    ) -> None:
        """Start the update of a unit.

        Args:
            unit: Its parameters are not bound.
            gradients: Only read, also by the update: without zeroing, the next backward accumulates on them.
            changes: By parameter index; others keep weights and states.
            copied: Copies of clip factors to the host that may be under way.
        """
        self.begin(unit, changes)
        if unit.plan.states == "device":
            self._on_device(unit, gradients, changes)
        else:
            self._on_host(unit, gradients, changes, copied)

    def begin(self, unit: Unit, changes: Mapping[int, Change]) -> None:
        """Note that the weights of a unit are about to change, or did."""
        self._weights.invalidate(unit)
        unit.weights_version += 1
        if unit.is_resident:  # as the plain step would: a graph that saved the old weights must not be walked any more
            for i in changes:
                torch.autograd.graph.increment_version(unit.params[i])
            unit.note_versions()

    def host_factors(
        self, handle: GradHandle, cache: dict[int, tuple[torch.Tensor, Handle | None]]
    ) -> tuple[list[torch.Tensor], list[Handle]]:
        """Bring a handle's factors to the host without blocking it.

        Args:
            handle: Of a gradient that is updated on the host.
            cache: Of this step, by identity: one clip factor serves all parameters.
        """
        found, ready = [], []
        for factor in handle.factors:
            if id(factor) not in cache:
                cache[id(factor)] = self._factor_to_host(factor)
            value, copied = cache[id(factor)]
            found.append(value)
            if copied is not None:
                ready.append(copied)
        return found, ready

    def _factor_to_host(self, factor: torch.Tensor) -> tuple[torch.Tensor, Handle | None]:
        if factor.device.type == "cpu":
            return factor, None
        target = torch.empty((), dtype=factor.dtype, pin_memory=True)
        self._device.hand_over(factor, Lane.D2H)
        made = self._device.mark("clip factor made")
        copied = self._device.submit(
            Lane.D2H, "clip factor", lambda: target.copy_(factor, non_blocking=True), after={"clip factor made": made}
        )
        return target, copied

    # On the device: no transfer, no lane.

    def _on_device(self, unit: Unit, gradients: UnitGradients, changes: Mapping[int, Change]) -> None:
        weights, grads = expect_buffer(unit.weights, unit.label), expect_buffer(unit.gradients, unit.label)
        states = unit.states if isinstance(unit.states, Buffer) else None
        writes = [weights.region] + ([states.region] if states is not None else [])
        pool = self._homes.pool("device", "scratch", min(SCRATCH_BYTES, unit.spec.update_bytes))
        scratch = pool.slots[0].buffer.part(0, min(pool.slot_bytes, self._device.update_block_bytes))
        after: After = {
            "gradients stored": unit.gradients_ready,
            "states written": unit.states_ready,
            "weights updated": unit.weights_ready,
        }
        self._device.compute(
            f"update {unit.label}", reads=[grads.region], writes=[*writes, scratch.region], after=after
        )
        update_blocks(pieces_of(gradients, changes, grads, states, weights), scratch.bytes)
        unit.weights_ready = unit.states_ready = self._device.mark(f"updated {unit.label}")

    # On the host: fetch what is missing, update, write back.

    def _on_host(
        self, unit: Unit, gradients: UnitGradients, changes: Mapping[int, Change], copied: Sequence[Handle]
    ) -> None:
        grads = self._supply.gradients(unit)
        states = self._supply.states(unit)
        target = self._supply.new_weights(unit)
        pieces = pieces_of(gradients, changes, grads.buffer, None if states is None else states.buffer, target.buffer)
        unchanged = self._unchanged(unit, changes, states, target)

        def work() -> None:
            self.run(pieces)
            for to, origin in unchanged:
                to.copy_(origin)

        regions: list[Region] = [target.buffer.region] + ([states.buffer.region] if states is not None else [])
        after: dict[str, object] = {**grads.after, **target.after, "clip factor copied": list(copied)}
        if states is not None:
            after |= states.after
        done = self._device.submit(
            Lane.UPDATE,
            f"update {unit.label}",
            work,
            reads=[grads.buffer.region],
            writes=regions,
            after=after,  # type: ignore[arg-type]
        )
        self._supply.give_back_gradients(unit, grads, done)
        self._write_back_states(unit, states, done)
        self._write_back_weights(unit, target, done)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update pieces in host memory; on the update lane."""
        if self._workers is None:
            raise AssertionError("an update on the host without workers")
        self._workers.run(pieces)

    def _unchanged(
        self, unit: Unit, changes: Mapping[int, Change], states: Borrowed | None, target: Borrowed
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weights that the slot must carry home although they were not updated: the home is overwritten as a whole."""
        if target.slot is None or states is None:
            return []
        masters, weights = unit.state_views(states.buffer, "master"), unit.flat_views(target.buffer)
        return [(weights[i], masters[i]) for i in range(unit.num_trainable) if i not in changes]

    def _write_back_states(self, unit: Unit, states: Borrowed | None, done: Handle) -> None:
        if states is None:
            return
        if states.slot is None:
            unit.states_ready, unit.states_readers = done, []
            return
        extent = expect_extent(unit.states, unit.label)
        unit.states_ready = self._supply.write_states(unit, states, extent, done)
        unit.states_readers = []

    def _write_back_weights(self, unit: Unit, target: Borrowed, done: Handle) -> None:
        if target.slot is None:
            unit.weights_ready, unit.weights_readers = done, []
            return
        lane = Lane.WRITE_BACK if unit.plan.weights == "device" else Lane.DISK_WRITE
        self._supply.give(target, self.send_weights(unit, target.buffer, done), lane)

    def send_weights(self, unit: Unit, buffer: Buffer, done: Handle) -> Handle:
        """Send new trained weights from host memory to their home on the device or on disk.

        Args:
            unit: Neither bound nor cached.
            buffer: What to send; may be overwritten after the returned handle.
            done: The update that makes them.
        """
        name, after = f"write weights of {unit.label}", {"weights updated on the host": done}
        send = self._to_device if unit.is_resident else self._to_disk
        unit.weights_ready = send(unit, name, buffer, {**after, "weights written": unit.weights_ready})
        unit.weights_readers = []
        if unit.is_resident:
            unit.mark_absent()  # reading one before the copy is done must wait for it
        return unit.weights_ready

    def _to_device(self, unit: Unit, name: str, buffer: Buffer, after: After) -> Handle:
        home = expect_buffer(unit.weights, unit.label).part(0, buffer.nbytes)
        self._traffic.add(Lane.WRITE_BACK, buffer.nbytes)
        return self._device.submit(
            Lane.WRITE_BACK,
            name,
            lambda: home.bytes.copy_(buffer.bytes, non_blocking=True),
            reads=[buffer.region],
            writes=[home.region],
            after={**after, "weights used": self._device.mark(f"weights of {unit.label} used")},
        )

    def _to_disk(self, unit: Unit, name: str, buffer: Buffer, after: After) -> Handle:
        extent = expect_extent(unit.weights, unit.label).part(0, buffer.nbytes)
        return self._transfers.write(name, buffer, extent, {**after, "weights read from disk": unit.weights_readers})
