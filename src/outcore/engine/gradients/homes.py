"""Gradients at rest: sent home, accumulated there, and read back when a value is needed.

See [Note: a gradient's way].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.unit_gradients import BackwardPass, UnitGradients
from outcore.engine.unit.tiers import Tiers
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, torch_dtype
from outcore.memory.arena import TEMPORARY, Buffer, Region
from outcore.optim.sums import RunAll, Sum, add_works, run_here, widen_rounds
from outcore.order.ledger import After, ByteSpan
from outcore.order.slots import Pools
from outcore.spec.lane_names import Lane
from outcore.torch_private import copy_each


class PassWork:
    """What is done with the gradients of one pass. See ``order.gradients.GradientWork``."""

    def __init__(
        self,
        gradients: UnitGradients,
        current: BackwardPass,
        held: Mapping[int, GradHandle],
        device: Device,
        run_all: RunAll,
    ) -> None:
        """Prepare to send a pass home.

        Args:
            gradients: Those of the unit; their form is kept up to date.
            current: The pass. Its bucket or loose tensors are written; loose ones are kept alive until they have left.
            held: Gradients at home that count. The pass is added to them where it has a gradient, too.
            device: Where the pass is.
            run_all: Runs sums in host memory.
        """
        self._gradients, self._current, self._held = gradients, current, held
        self._unit, self._device, self._run_all = gradients.unit, device, run_all

    @property
    def nbytes(self) -> int:
        """Bytes that the pass gave."""
        if self._unit.ledger.bucket is not None:
            return self._unit.spec.bucket_bytes
        return sum(grad.nbytes for grad in self._current.loose.values())

    def leave(self, target: ByteSpan) -> Callable[[], None]:
        """Return the deed that copies the pass to host memory, in native form."""
        unit, buffer, bucket = self._unit, target.memory, self._unit.ledger.bucket
        if bucket is not None:
            copies = [(buffer.bytes, bucket.slot.span(target.nbytes).memory.bytes)]
        else:
            views = unit.views.native(buffer)
            copies = [(views[i], grad) for i, grad in self._current.loose.items()]
            for grad in self._current.loose.values():
                self._device.hand_over(grad, Lane.D2H)

        def deed() -> None:
            for to, origin in copies:
                to.copy_(origin, non_blocking=True)

        return deed

    def landed(self) -> None:
        """Note that what is at home has the form in which autograd made it."""
        self._gradients.is_native = True

    def add_on_device(self) -> None:
        """Add the pass to what lives on the device."""
        unit, current, held = self._unit, self._current, self._held
        views, specs = unit.views.update(unit.ledger.gradients.memory), unit.spec.params
        first = [i for i in current.loose if i not in held]
        if first:
            copy_each([views[i] for i in first], [flat(specs[i], current.loose[i]) for i in first])
        for i in current.loose.keys() & held.keys():
            _add(flat(specs[i], current.loose[i]), views[i], held[i].factors)
        self._gradients.is_native = False

    def add_on_host(self, landing: ByteSpan, target: ByteSpan) -> Callable[[], None]:
        """Return the deed that adds what landed to what is at home. Pending factors are applied to the latter first."""
        unit, held, present = self._unit, self._held, self._current.present
        was_native, self._gradients.is_native = self._gradients.is_native, False
        factors = {i: [f.to("cpu") for f in held[i].factors] for i in present if i in held}
        indices = {i: held.get(i) for i in sorted(present)}
        for i in present & held.keys():
            held[i].factors.clear()
        landed, home = landing.memory, target.memory

        def deed() -> None:
            if was_native:
                promote(unit, home, list(held), self._run_all)
            sources, targets = unit.views.bucket(landed), unit.views.update(home)
            sums = [
                Sum(targets[i], sources[i], tuple(factors.get(i, ())), is_first=handle is None)
                for i, handle in indices.items()
            ]
            self._run_all(add_works(sums))

        return deed


class GradientHomes:
    """Gradients at rest: their values, changes to them, and what a pass adds."""

    def __init__(self, tiers: Tiers, pools: Pools[Handle], device: Device, run_all: RunAll = run_here) -> None:
        """Nothing is allocated: homes and slots exist.

        Args: run_all: Runs sums in host memory.
        """
        self._tiers, self._pools, self._device, self._run_all = tiers, pools, device, run_all

    def work(self, gradients: UnitGradients, current: BackwardPass, held: Mapping[int, GradHandle]) -> PassWork:
        """Return what is done to send a pass home. See ``PassWork``."""
        return PassWork(gradients, current, held, self._device, self._run_all)

    # Values, for operations that cannot be served without them.

    @torch.no_grad()
    def value(self, gradients: UnitGradients, handle: GradHandle) -> torch.Tensor:
        """Return a gradient times its factors, on the device (1D, update dtype). Slow if it must be fetched."""
        unit, i = gradients.unit, handle.index
        dtype = unit.gradient_form.update_dtypes[i]
        if handle.is_zero:
            value = torch.zeros(unit.spec.params[i].numel, dtype=dtype, device=self._device.torch_device)
        else:
            value = self._stored(gradients, i).to(self._device.torch_device, dtype)
        for factor in (*handle.averaging, *handle.factors):
            value = value * factor
        return value

    def _stored(self, gradients: UnitGradients, index: int) -> torch.Tensor:
        """Return one gradient as it is stored (1D), or the part of it that this rank has."""
        if gradients.unit.plan.gradients == "disk":
            return self._read_one(gradients, index)
        with self._at_hand(gradients.unit, is_write=False) as home:
            return gradients.stored_views(home)[index]

    def all_stored(self, gradients: UnitGradients) -> list[torch.Tensor]:
        """Return all gradients of a unit as they are stored (1D), at once; from disk as a copy."""
        with self._at_hand(gradients.unit, is_write=False) as home:
            return gradients.stored_views(home)

    def _read_one(self, gradients: UnitGradients, index: int) -> torch.Tensor:
        """Read one gradient as it is stored, straight from disk. Memory: host, that gradient."""
        unit, spec = gradients.unit, gradients.unit.spec
        part = (spec.bucket_parts if gradients.is_native else spec.update_parts)[index]
        home = unit.ledger.gradients
        extent = home.span(part.offset, part.offset + part.nbytes).memory
        self._wait(home.before_read())
        self._device.host_access(f"look at a gradient of {unit.label}", reads=[extent.region])
        found = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
        if part.nbytes:
            self._tiers.store().read(extent, found)
        return found.view(torch_dtype(part.dtype))

    @torch.no_grad()
    def change(self, gradients: UnitGradients, handle: GradHandle, change: Callable[[torch.Tensor], Any]) -> None:
        """Apply a pending zero, pending factors and then an in-place change to a stored gradient.

        If the change raises, the zero and the factors stay applied: what is at hand is written back all the same.
        """
        gradients.norms.pop(handle.index, None)
        failure: Exception | None = None
        with self._in_update_form(gradients) as views:
            view = views[handle.index]
            if handle.is_zero:
                view.zero_()
            for factor in handle.factors:
                view.mul_(factor.to(view.device))
            try:
                change(view)
            except Exception as error:
                failure = error
        handle.factors.clear()
        handle.is_zero = False
        if failure is not None:
            raise failure

    @torch.no_grad()
    def replace(self, gradients: UnitGradients, handle: GradHandle, value: torch.Tensor) -> None:
        """Store another value (1D), without factors and not zeroed."""
        gradients.norms.pop(handle.index, None)
        with self._in_update_form(gradients) as views:
            views[handle.index].copy_(value)
        handle.factors.clear()
        handle.is_zero = False

    @contextmanager
    def _in_update_form(self, gradients: UnitGradients) -> Iterator[list[torch.Tensor]]:
        """Yield all gradients of a unit in update form, to be changed. On disk they have it once they are written."""
        unit = gradients.unit
        with self._at_hand(unit, is_write=True) as home:
            if gradients.is_native:
                promote(unit, home, [i for i, h in gradients.held_handles().items() if not h.is_zero])
                gradients.is_native = unit.ledger.gradients.tier == "disk"
            yield unit.views.update(home)
        gradients.is_native = False

    @contextmanager
    def _at_hand(self, unit: Unit, *, is_write: bool) -> Iterator[Buffer]:
        """Yield the gradients' home, or a copy that is written back. Host and compute come after its last writer."""
        home = unit.ledger.gradients
        after = home.before_write() if is_write else home.before_read()
        regions: list[Region] = [] if home.memory is None else [home.memory.region]
        access: dict[str, Any] = {"writes": regions} if is_write else {"reads": regions}
        if home.tier == "device":
            self._device.compute(f"look at gradients of {unit.label}", after=after, **access)
            yield home.memory
            home.ready = self._device.mark(f"looked at gradients of {unit.label}")
            return
        self._wait(after)
        self._device.host_access(f"look at gradients of {unit.label}", **access)
        if home.tier == "host":
            yield home.memory
            return
        copy = Buffer(torch.empty(home.nbytes, dtype=torch.uint8, device="cpu"), Region(TEMPORARY, 0, home.nbytes))
        self._tiers.store().read(home.memory, copy.bytes)
        yield copy
        if is_write:
            self._tiers.store().write(home.memory, copy.bytes)
            self._pools.forget(home)

    def _wait(self, after: After[Handle]) -> None:
        for label, dependency in after.items():
            self._device.wait(label, dependency)


def _add(source: torch.Tensor, target: torch.Tensor, factors: list[torch.Tensor]) -> None:
    """Apply pending factors to what is there, then add in the update dtype."""
    for factor in factors:
        target.mul_(factor)
    factors.clear()
    target.add_(source)


def promote(unit: Unit, buffer: Buffer, indices: Sequence[int], run_all: RunAll = run_here) -> None:
    """Change gradients from native to update form in place.

    It goes from the last parameter to the first, so that nothing is overwritten before it is read: a parameter's place
    in the update layout never begins before its place in the weights layout.
    """
    if unit.gradient_form.is_one:
        return
    sources, targets = unit.views.flat(buffer), unit.views.update(buffer)
    for i in sorted(indices, reverse=True):
        for works in widen_rounds(targets[i], sources[i]):
            run_all(works)
