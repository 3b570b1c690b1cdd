"""Gradients at rest: sent home, accumulated there, read back when somebody needs their value.

See [Note: a gradient's way].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outcore.memory.arena import TEMPORARY, Buffer, Region
from outcore.memory.disk import Extent
from outcore.optim.sums import RunAll, Sum, add_works, run_here, widen_rounds
from outcore.runtime.device import Device
from outcore.runtime.disk_transfers import Answer, DiskTransfers
from outcore.runtime.grad_handle import GradHandle
from outcore.runtime.homes import Homes, Slot, SlotPool
from outcore.runtime.lanes import After, Handle, newest
from outcore.runtime.traffic import Traffic
from outcore.runtime.unit import Unit, expect_buffer, expect_extent, flat, torch_dtype
from outcore.runtime.unit_gradients import Pass, UnitGradients
from outcore.spec.lanes import Lane


class GradientHomes:
    """Moves gradients between device and home, and accumulates them at home."""

    def __init__(self, homes: Homes, device: Device, traffic: Traffic, run_all: RunAll = run_here) -> None:
        """Nothing is allocated: homes and slots exist.

        Args: run_all: Who accumulates in host memory.
        """
        self._homes, self._device, self._traffic, self._run_all = homes, device, traffic, run_all
        self._transfers = DiskTransfers(homes, device, traffic)

    def send(self, gradients: UnitGradients, current: Pass, held: Mapping[int, GradHandle]) -> Handle | None:
        """Send the sums of a pass home.

        Args:
            gradients: Of the unit; its form is kept up to date.
            current: The pass. Its bucket or loose tensors are written; loose ones are kept alive until they have left.
            held: Gradients already at home that count; those also in the pass are added to.

        Returns:
            The copy out of the bucket, or None where nothing is copied by a lane.
        """
        unit = gradients.unit
        if unit.plan.gradients == "device":
            self._accumulate_on_device(gradients, current, held)
            return None
        if unit.plan.gradients == "host" and not held:
            return self._land_at_home(gradients, current)
        return self._land_and_accumulate(gradients, current, held)

    def _accumulate_on_device(self, gradients: UnitGradients, current: Pass, held: Mapping[int, GradHandle]) -> None:
        unit = gradients.unit
        home = expect_buffer(unit.gradients, unit.label)
        after: After = {"gradients read": unit.gradients_readers, "gradients stored": unit.gradients_ready}
        self._device.compute(f"accumulate {unit.label}", writes=[home.region], after=after)
        views, specs = unit.update_views(home), unit.spec.params
        first = [i for i in current.loose if i not in held]
        if first:
            torch._foreach_copy_([views[i] for i in first], [flat(specs[i], current.loose[i]) for i in first])
        for i in current.loose.keys() & held.keys():
            _add(flat(specs[i], current.loose[i]), views[i], held[i].factors)
        gradients.is_native = False
        unit.gradients_ready, unit.gradients_readers = self._device.mark(f"accumulated {unit.label}"), []

    def _land_at_home(self, gradients: UnitGradients, current: Pass) -> Handle:
        unit = gradients.unit
        home = expect_buffer(unit.gradients, unit.label)
        done = self._copy_out(
            unit, current, home, {"gradients read": unit.gradients_readers, "gradients stored": unit.gradients_ready}
        )
        gradients.is_native = True
        unit.gradients_ready, unit.gradients_readers = done, []
        return done

    def _land_and_accumulate(self, gradients: UnitGradients, current: Pass, held: Mapping[int, GradHandle]) -> Handle:
        unit = gradients.unit
        pool, slot = self._homes.take("host", "landing", unit.spec.trainable_bytes)
        landing = slot.buffer.part(0, unit.spec.trainable_bytes)
        landed = self._copy_out(unit, current, landing, {"landing free": slot.free_after})
        if unit.plan.gradients == "disk" and not held:
            extent, written = self._write_to_disk(unit, landing, {"gradients landed": landed})
            self._homes.give_kept(pool, slot, extent, landed, written)
            gradients.is_native = True
        else:
            added = self._accumulate_on_host(gradients, current.present, held, landing, landed)
            poison = self._device.poison(landing, lane=Lane.UPDATE)
            pool.give(slot, [h for h in (added, poison) if h is not None])
        return landed

    def _accumulate_on_host(
        self,
        gradients: UnitGradients,
        present: set[int],
        held: Mapping[int, GradHandle],
        landing: Buffer,
        landed: Handle,
    ) -> Handle:
        """Add what landed to what is at home, on the update lane; on disk by reading and writing back."""
        unit = gradients.unit
        slot: tuple[SlotPool, Slot] | None = None
        if unit.plan.gradients == "host":
            target = expect_buffer(unit.gradients, unit.label)
            after: After = {"gradients read": unit.gradients_readers, "gradients stored": unit.gradients_ready}
        else:
            target, slot, after = self.fetch_from_disk(unit)
        was_native, gradients.is_native = gradients.is_native, False
        factors = {i: [f.to("cpu") for f in held[i].factors] for i in present if i in held}
        indices = {i: held.get(i) for i in sorted(present)}
        for i in present & held.keys():
            held[i].factors.clear()

        def work() -> None:
            if was_native:
                promote(unit, target, list(held), self._run_all)
            sources, targets = unit.flat_views(landing), unit.update_views(target)
            sums = [
                Sum(targets[i], sources[i], tuple(factors.get(i, ())), is_first=handle is None)
                for i, handle in indices.items()
            ]
            self._run_all(add_works(sums))

        added = self._device.submit(
            Lane.UPDATE,
            f"accumulate {unit.label}",
            work,
            reads=[landing.region],
            writes=[target.region],
            after={"gradients landed": landed, **after},
        )
        if slot is None:
            unit.gradients_ready, unit.gradients_readers = added, []
        else:
            extent, written = self._write_to_disk(unit, target, {"gradients accumulated": added})
            self._homes.give_kept(*slot, extent, added, written)
        return added

    def _copy_out(self, unit: Unit, current: Pass, target: Buffer, after: After) -> Handle:
        """Copy a pass's sums to host memory in native form."""
        written = self._device.mark(f"gradients of {unit.label} made")
        nbytes = unit.spec.trainable_bytes
        if current.bucket is not None:
            source = current.bucket[1].buffer.part(0, nbytes)
            copies = [(target.bytes[:nbytes], source.bytes)]
            reads = [source.region]
        else:
            views = unit.native_views(target)
            copies = [(views[i], grad) for i, grad in current.loose.items()]
            reads = []
            for grad in current.loose.values():
                self._device.hand_over(grad, Lane.D2H)

        def work() -> None:
            for to, origin in copies:
                to.copy_(origin, non_blocking=True)

        self._traffic.add(Lane.D2H, sum(to.nbytes for to, _ in copies))
        region = target.part(0, nbytes).region
        return self._device.submit(
            Lane.D2H,
            f"gradients of {unit.label}",
            work,
            reads=reads,
            writes=[region],
            after={"gradients made": written, **after},
        )

    def _write_to_disk(self, unit: Unit, source: Buffer, after: After) -> tuple[Extent, Handle]:
        extent = expect_extent(unit.gradients, unit.label).part(0, source.nbytes)
        after = {**after, "gradients read": unit.gradients_readers, "gradients stored": unit.gradients_ready}
        done = self._transfers.write(f"write gradients of {unit.label}", source, extent, after)
        unit.gradients_ready, unit.gradients_readers = done, []
        return extent, done

    def take_kept(self, unit: Unit) -> tuple[Buffer, tuple[SlotPool, Slot], After] | None:
        """Gradients whose home is disk, if they are still in the slot that they were written from.

        In native form where they passed through a landing slot, in update form after accumulation.
        """
        home = expect_extent(unit.gradients, unit.label)
        native = home.part(0, unit.spec.trainable_bytes)
        kept = self._homes.take_kept("landing", native) or self._homes.take_kept("gradients", home)
        return None if kept is None else (kept[1].buffer, kept, {"gradients kept": kept[1].kept_after})

    def fetch_from_disk(self, unit: Unit, is_due: Answer | None = None) -> tuple[Buffer, tuple[SlotPool, Slot], After]:
        """Start reading gradients from disk into a host slot, which the caller gives back."""
        extent = expect_extent(unit.gradients, unit.label)
        pool, slot = self._homes.take("host", "gradients", extent.nbytes)
        buffer = slot.buffer.part(0, extent.nbytes)
        after: After = {"gradient slot free": slot.free_after, "gradients stored": unit.gradients_ready}
        read = self._transfers.read(Lane.STATES_READ, f"read gradients of {unit.label}", extent, buffer, after, is_due)
        unit.gradients_readers = newest([*unit.gradients_readers, read])
        slot.free_after = newest([*slot.free_after, read])
        return buffer, (pool, slot), {"gradients fetched": read}

    def fetch_from_device(self, unit: Unit) -> tuple[Buffer, tuple[SlotPool, Slot], After]:
        """Start copying gradients that live on the device into a host slot, which the caller gives back."""
        home = expect_buffer(unit.gradients, unit.label)
        pool, slot = self._homes.take("host", "gradients", home.nbytes)
        buffer = slot.buffer.part(0, home.nbytes)
        copied = self._device.submit(
            Lane.D2H,
            f"gradients of {unit.label}",
            lambda: buffer.bytes.copy_(home.bytes, non_blocking=True),
            reads=[home.region],
            writes=[buffer.region],
            after={"gradient slot free": slot.free_after, "gradients stored": unit.gradients_ready},
        )
        self._traffic.add(Lane.D2H, home.nbytes)
        unit.gradients_readers = newest([*unit.gradients_readers, copied])
        slot.free_after = newest([*slot.free_after, copied])  # who uses the slot may be skipped, and wait for nothing
        return buffer, (pool, slot), {"gradients fetched": copied}

    # Values, for what cannot be answered otherwise.

    @torch.no_grad()
    def value(self, gradients: UnitGradients, handle: GradHandle) -> torch.Tensor:
        """A gradient times its factors, on the device (1D, update dtype). Slow where it is not there: it is fetched."""
        unit, i = gradients.unit, handle.index
        dtype = unit.update_dtypes[i]
        if handle.is_zero:
            value = torch.zeros(unit.spec.params[i].numel, dtype=dtype, device=self._device.torch_device)
        else:
            if unit.plan.gradients == "disk":
                stored = self._read_one(gradients, i)
            else:
                with self._at_hand(unit, is_write=False) as home:
                    stored = gradients.stored_views(home)[i]
            value = stored.to(self._device.torch_device, dtype)
        for factor in handle.factors:
            value = value * factor
        return value

    def stored_on_device(self, gradients: UnitGradients) -> list[torch.Tensor]:
        """All gradients of a unit whose home is the device, as they are stored (1D), in one look."""
        with self._at_hand(gradients.unit, is_write=False) as home:
            return gradients.stored_views(home)

    def _read_one(self, gradients: UnitGradients, index: int) -> torch.Tensor:
        """One gradient as it is stored, straight from disk. Memory: host, that gradient."""
        unit, spec = gradients.unit, gradients.unit.spec
        offsets, dtype = (spec.update_offsets, unit.update_dtypes[index])
        if gradients.is_native:
            offsets, dtype = spec.weight_offsets, torch_dtype(spec.params[index].dtype)
        nbytes = spec.params[index].numel * dtype.itemsize
        part = expect_extent(unit.gradients, unit.label).part(offsets[index], offsets[index] + nbytes)
        self._device.wait("gradients stored", unit.gradients_ready)
        self._device.host_access(f"look at a gradient of {unit.label}", reads=[part.region])
        found = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self._homes.store().read(part, found)
        return found.view(dtype)

    @torch.no_grad()
    def change(self, gradients: UnitGradients, handle: GradHandle, change: Callable[[torch.Tensor], Any]) -> None:
        """Apply pending factors and then an in-place change to a stored gradient."""
        gradients.norms.pop(handle.index, None)
        if handle.is_zero:
            return
        with self._in_update_form(gradients) as views:
            view = views[handle.index]
            for factor in handle.factors:
                view.mul_(factor.to(view.device))
            handle.factors.clear()
            change(view)

    @torch.no_grad()
    def replace(self, gradients: UnitGradients, handle: GradHandle, value: torch.Tensor) -> None:
        """Store another value (1D): it has no factors and is not zeroed."""
        gradients.norms.pop(handle.index, None)
        with self._in_update_form(gradients) as views:
            views[handle.index].copy_(value)
            handle.factors.clear()
            handle.is_zero = False

    @contextmanager
    def _in_update_form(self, gradients: UnitGradients) -> Iterator[list[torch.Tensor]]:
        """All gradients of a unit, to be changed."""
        unit = gradients.unit
        with self._at_hand(unit, is_write=True) as home:
            if gradients.is_native:
                promote(unit, home, [i for i, h in gradients.held_handles().items() if not h.is_zero])
                gradients.is_native = False
            yield unit.update_views(home)

    @contextmanager
    def _at_hand(self, unit: Unit, *, is_write: bool) -> Iterator[Buffer]:
        """The gradients' home, or a copy that is written back; host and compute come after its last writer."""
        after: dict[str, Any] = {"gradients stored": unit.gradients_ready}
        if is_write:
            after["gradients read"] = unit.gradients_readers
        regions: list[Region] = [unit.gradients.region] if unit.gradients is not None else []
        access: dict[str, Any] = {"writes": regions} if is_write else {"reads": regions}
        if unit.plan.gradients == "device":
            self._device.compute(f"look at gradients of {unit.label}", after=after, **access)
            yield expect_buffer(unit.gradients, unit.label)
            unit.gradients_ready = self._device.mark(f"looked at gradients of {unit.label}")
            return
        for label, handles in after.items():
            self._device.wait(label, handles)
        self._device.host_access(f"look at gradients of {unit.label}", **access)
        if unit.plan.gradients == "host":
            yield expect_buffer(unit.gradients, unit.label)
            return
        extent, disk = expect_extent(unit.gradients, unit.label), self._homes.store()
        copy = Buffer(torch.empty(extent.nbytes, dtype=torch.uint8), Region(TEMPORARY, 0, extent.nbytes))
        disk.read(extent, copy.bytes)
        yield copy
        if is_write:
            disk.write(extent, copy.bytes)
            self._homes.forget(extent)


def _add(source: torch.Tensor, target: torch.Tensor, factors: list[torch.Tensor]) -> None:
    """Scale what is there as it was meant to be, then add in the update dtype."""
    for factor in factors:
        target.mul_(factor)
    factors.clear()
    target.add_(source)


def promote(unit: Unit, buffer: Buffer, indices: Sequence[int], run_all: RunAll = run_here) -> None:
    """Change gradients from native to update form in place.

    Backwards, so that nothing is overwritten before it is read: a parameter's place in the update layout never begins
    before its place in the weights layout.
    """
    if unit.has_one_layout:
        return
    sources, targets = unit.flat_views(buffer), unit.update_views(buffer)
    for i in sorted(indices, reverse=True):
        for works in widen_rounds(targets[i], sources[i]):
            run_all(works)
