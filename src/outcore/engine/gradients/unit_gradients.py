"""Gradients of one unit: what a pass has given so far, what is held at home and in which form, under which handles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.homes import GradientHomes
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, own_slice
from outcore.memory.arena import Buffer
from outcore.optim import kernels
from outcore.optim.sums import RunAll, Sum, add_works, run_here, widen_rounds
from outcore.order.ledger import ByteSpan
from outcore.spec.lane_names import Lane
from outcore.torch_private import copy_each, current_task


class UnitPass:
    """What one backward pass has given a unit so far, in its bucket or loose, and the work that sends it home.

    See ``order.gradients.GradientWork``. Loose tensors are kept alive until they have left.
    """

    __slots__ = ("gradients", "held", "loose", "made", "num_expected", "present", "reached", "stream")

    def __init__(self, gradients: UnitGradients, num_expected: int) -> None:
        """Args: gradients: Those of the unit. num_expected: Number of parameters that autograd will reach."""
        self.gradients, self.num_expected = gradients, num_expected
        self.present, self.reached = set[int](), set[int]()
        """Parameters with a gradient, and those for which no more gradients will come."""
        self.loose: dict[int, torch.Tensor] = {}
        self.made: Handle | None = None
        """Mark behind the compute that wrote the gradients."""
        self.stream = ""
        """The stream of that compute, not always the one on which the pass is closed."""
        self.held: Mapping[int, GradHandle] = {}
        """Gradients at home that count. The pass is added to them where it has a gradient, too."""

    def take_over(self) -> None:
        """Order compute behind what made the gradients: autograd does not, if it gives the hook no gradient.

        The hook that closes a pass then runs on the stream on which the parameter was first used.
        """
        device, unit = self.gradients.homes.device, self.gradients.unit
        stream = device.stream_name()
        if stream == self.stream:
            return
        bucket = unit.ledger.bucket
        regions = [] if bucket is None else [bucket.slot.span(unit.spec.bucket_bytes).memory.region]
        name, after = f"take over gradients of {unit.label}", {"gradients made": self.made}
        self.made, self.stream = device.compute(name, reads=regions, after=after), stream
        for grad in self.loose.values():
            device.hand_over(grad, None)

    def add_loose(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Add gradients to the loose ones, as autograd would."""
        self.take_over()
        unit, loose = self.gradients.unit, self.loose
        for i, grad in grads.items():
            known = loose.get(i)
            if known is None:
                loose[i] = grad.to(unit.gradient_form.update_dtypes[i]) if unit.spec.is_cut else grad
            elif known.dtype != grad.dtype:  # a sum of micro-batches, in memory of its own
                known.add_(grad)
            else:
                loose[i] = known + grad

    @property
    def nbytes(self) -> int:
        """Bytes that the pass gave."""
        unit = self.gradients.unit
        return sum(g.nbytes for g in self.loose.values()) if unit.ledger.bucket is None else unit.spec.bucket_bytes

    def leave(self, target: ByteSpan) -> Callable[[], None]:
        """Return the work that copies the pass to host memory, in native form."""
        unit, buffer, bucket = self.gradients.unit, target.memory, self.gradients.unit.ledger.bucket
        if bucket is not None:
            copies = [(buffer.bytes, bucket.slot.span(target.nbytes).memory.bytes)]
        else:
            views = unit.views.native(buffer)
            copies = [(views[i], grad) for i, grad in self.loose.items()]
            for grad in self.loose.values():
                self.gradients.homes.device.hand_over(grad, Lane.D2H)

        def work() -> None:
            for to, origin in copies:
                to.copy_(origin, non_blocking=True)

        return work

    def landed(self) -> None:
        """Mark the home as native: it has autograd's dtype and layout."""
        self.gradients.is_native = True

    def add_on_device(self) -> None:
        """Add the pass to what lives on the device."""
        unit, loose, held = self.gradients.unit, self.loose, self.held
        views, specs = unit.views.update(unit.ledger.gradients.memory), unit.spec.params
        first = [i for i in loose if i not in held]
        if first:
            copy_each([views[i] for i in first], [flat(specs[i], loose[i]) for i in first])
        for i in loose.keys() & held.keys():
            factors = held[i].factors  # pending ones are applied to what is there
            for factor in factors:
                views[i].mul_(factor)
            factors.clear()
            views[i].add_(flat(specs[i], loose[i]))
        self.gradients.is_native = False

    def add_on_host(self, landing: ByteSpan, target: ByteSpan) -> Callable[[], None]:
        """Return the work that adds the landed gradients to the sum at home, after its pending factors."""
        unit, held, present, run_all = self.gradients.unit, self.held, self.present, self.gradients.homes.run_all
        was_native, self.gradients.is_native = self.gradients.is_native, False
        factors = {i: [f.to("cpu") for f in held[i].factors] for i in present if i in held}
        indices = {i: held.get(i) for i in sorted(present)}
        for i in present & held.keys():
            held[i].factors.clear()
        landed, home = landing.memory, target.memory

        def work() -> None:
            if was_native:
                promote(unit, home, list(held), run_all)
            sources, targets = unit.views.bucket(landed), unit.views.update(home)
            sums = [
                Sum(targets[i], sources[i], tuple(factors.get(i, ())), is_first=handle is None)
                for i, handle in indices.items()
            ]
            run_all(add_works(sums))

        return work


class UnitGradients:
    """Gradients of one unit at home, and the owner of the handles on ``p.grad``.

    With several ranks each has the elements that it updates; reading a value or a norm is a collective.

    Attributes:
        handles: Handles by parameter index. A gradient is held as long as its handle is on ``p.grad``.
        norms: 2-norms of held gradients as stored, where known.
        is_native: Whether the home holds the sums of one pass in the weights layout, not yet the update layout.
        has_bucket: Whether a pass collects gradients in a bucket, if there is room; else in loose tensors.
        num_passes: Backward passes since the last step.
        open: The pass that is running.
        version: Counts changes of what is stored.
    """

    def __init__(
        self, unit: Unit, homes: GradientHomes, deposit: Callable[[Unit, dict[int, torch.Tensor]], None]
    ) -> None:
        """Begin without gradients. Args: deposit: Takes gradients that autograd itself has made."""
        self.unit, self.homes, self._deposit = unit, homes, deposit
        self.handles: dict[int, GradHandle] = {}
        self.norms: dict[int, torch.Tensor] = {}
        self.is_native = False
        is_off_device = unit.plan.gradients != "device" or unit.spec.num_ranks > 1
        self.has_bucket = (bool(unit.name) and is_off_device) or unit.spec.keeps_bucket
        self.num_passes, self._counted_pass = 0, -1
        self.open: UnitPass | None = None
        self.version = 0

    # Handles.

    def held_handles(self) -> dict[int, GradHandle]:
        """Return the handles on ``p.grad`` of the parameters whose gradients are held, zeroed ones included.

        Raises:
            UnsupportedError: The user has put another tensor there, or a gradient is incomplete.
        """
        held: dict[int, GradHandle] = {}
        for i, param in enumerate(self.unit.params[: self.unit.num_trainable]):
            grad, handle = param.grad, self.handles.get(i)
            if grad is None:
                self.handles.pop(i, None)  # put back later, it would stand for bytes that may be overwritten by then
            elif isinstance(grad, GradHandle) and grad.is_lost:
                self.refuse_lost(grad)
            elif handle is None or grad is not handle:
                raise UnsupportedError(
                    f"expected p.grad of '{self.unit.spec.params[i].name}' to be what backward left there, or None, "
                    f"but it was set to a {type(grad).__name__}; gradients can be clipped, scaled and zeroed, not "
                    "replaced"
                )
            else:
                held[i] = handle
        return held

    def put_handles(self, indices: Iterable[int], averaging: tuple[torch.Tensor, ...] = ()) -> None:
        """Put new handles on ``p.grad``. Args: averaging: See ``GradHandle``."""
        device = self.homes.device.torch_device
        for i in indices:
            handle = GradHandle(self.unit.gradient_form.likes[i], device, self, i)
            handle.averaging = averaging
            self.unit.params[i].grad = self.handles[i] = handle

    def lose(self) -> None:
        """Mark all gradients of the unit as lost: a backward that was at it ended in an exception."""
        for i, param in enumerate(self.unit.params[: self.unit.num_trainable]):
            if param.shape != self.unit.spec.params[i].shape:  # resized, which the step will refuse
                continue
            if param.grad is None and not param.requires_grad:  # zeroed in place, it would be updated
                continue
            handle = self.handles[i] = GradHandle(self.unit.gradient_form.likes[i], param.device, self, i)
            handle.is_lost = True
            param.grad = handle

    def refuse_lost(self, handle: GradHandle) -> NoReturn:
        """Raise for a gradient that is incomplete."""
        raise UnsupportedError(
            "backward ended in an exception; call optimizer.zero_grad() first (expected whole gradients, but that of "
            f"'{handle.param_name}' may be incomplete)"
        )

    def _refuse_stale(self, handle: GradHandle) -> None:
        if handle.is_lost:
            self.refuse_lost(handle)
        if self.unit.params[handle.index].grad is not handle:
            raise UnsupportedError(
                f"expected the gradient that is on p.grad of '{handle.param_name}' now, but got one that was "
                "there before it was set to None, whose bytes may be overwritten by now; clone a gradient to keep it"
            )

    def count_pass(self, number: int, promised: int | None, *, is_first: bool) -> None:
        """Count a pass. Args: number: The pass's. promised: Passes per step. is_first: Nothing is held yet."""
        if is_first:  # zeroed without a step, as after one that GradScaler skipped
            self.num_passes = 0
        if self._counted_pass != number:  # a unit may be closed more than once in a pass
            self.num_passes, self._counted_pass = self.num_passes + 1, number
        if promised is not None and self.num_passes > promised:
            raise UnsupportedError(
                f"expected {promised} backward passes per step, as accumulation_steps promised, "
                f"but unit '{self.unit.label}' got one more; call optimizer.step() in time, "
                "or prepare with accumulation_steps=None"
            )

    # Values, for operations that cannot be served without them. See ``HandleOwner``.

    def norm(self, handle: GradHandle, order: float) -> torch.Tensor:
        """Return the norm as the plain loop takes it: by the device's kernel, over the accumulated, scaled gradient.

        The tensor is the caller's own: an edit of it does not change what is known. With several ranks a 2-norm is that
        of [Note: one tree].
        """
        if not self.homes.clipping:
            raise ConfigError(
                "expected no gradient norm after outcore.prepare(..., clipping=False), "
                f"but that of '{handle.param_name}' was asked for; prepare with clipping=True"
            )
        self._refuse_stale(handle)
        if self.homes.norm_of_ranks is not None:
            if order == 2:
                return self.homes.norm_of_ranks(handle)
            return torch.linalg.vector_norm(self._value(handle), order)
        is_stored_norm = order == 2 and not handle.is_zero and not handle.factors
        if is_stored_norm and self.unit.plan.gradients == "device" and handle.index not in self.norms:
            self._take_norms_on_device()
        scale = handle.norm_scale if handle.factors else 1.0
        if order == 2 and not handle.is_zero and scale is not None and handle.index in self.norms:
            return self.norms[handle.index].clone() if scale == 1 else self.norms[handle.index] * scale
        value = self._value(handle)
        norm = kernels.norms([value])[0] if order == 2 else torch.linalg.vector_norm(value, order)
        if is_stored_norm:
            self.norms[handle.index] = norm.clone()
        return norm

    def _take_norms_on_device(self) -> None:
        """Take all norms that are not known: a caller that asks for one will ask for the others."""
        stored = self.all_stored()
        wanted = [i for i, h in self.handles.items() if i not in self.norms and not h.is_zero and not h.factors]
        self.norms.update(zip(wanted, kernels.norms([stored[i] for i in wanted]), strict=True))

    def known_norm(self, handle: GradHandle) -> torch.Tensor | None:
        """Return the stored gradient's norm if it is known and that of the handle, too. A collective."""
        if handle.factors or handle.is_zero:
            return None
        of_ranks = self.homes.norm_of_ranks
        return self.norms.get(handle.index) if of_ranks is None else of_ranks(handle)

    def value(self, handle: GradHandle) -> torch.Tensor:
        """Return the gradient as the user sees it, on the device (1D, in the order of memory). A collective."""
        self._refuse_stale(handle)
        return self._value(handle).to(handle.dtype)

    @torch.no_grad()
    def _value(self, handle: GradHandle) -> torch.Tensor:
        """Return a gradient times its factors, on the device (1D, update dtype). Slow if it must be fetched."""
        unit, i, homes = self.unit, handle.index, self.homes
        dtype, device = unit.gradient_form.update_dtypes[i], homes.device.torch_device
        if handle.is_zero:
            value = torch.zeros(unit.spec.params[i].numel, dtype=dtype, device=device)
        elif unit.plan.gradients == "disk":
            value = homes.read_one(unit, i, is_native=self.is_native).to(device, dtype)
        else:
            value = self.all_stored()[i].to(device, dtype)
        for factor in (*handle.averaging, *handle.factors):
            value = value * factor
        if homes.world is None or handle.is_zero:
            return value
        numels = [unit.spec.held(rank, i)[1] for rank in range(unit.spec.num_ranks)]
        return homes.world.gather_parts(value, numels, f"read the gradient of '{handle.param_name}'").to(device)

    def all_stored(self) -> list[torch.Tensor]:
        """Return all gradients as they are stored (1D), or what this rank has of them; from disk as a copy."""
        with self.homes.at_hand(self.unit, is_write=False) as home:
            return self.stored_views(home)

    def stored_views(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return all gradients as they are stored now (1D), in ``buffer``: the home or a copy of it."""
        return self.unit.views.bucket(buffer) if self.is_native else self.unit.views.update(buffer)

    @torch.no_grad()
    def change(self, handle: GradHandle, change: Callable[[torch.Tensor], Any]) -> None:
        """Apply a pending zero, pending factors and then an in-place change to a stored gradient.

        If the change raises, the zero and the factors stay applied: what is at hand is written back all the same. It is
        made element by element, so it needs no other rank.
        """
        self._refuse_stale(handle)
        failure: Exception | None = None
        with self._to_change(handle) as view:
            if handle.is_zero:
                view.zero_()
            for factor in (*handle.averaging, *handle.factors):
                view.mul_(factor.to(view.device))
            try:
                change(view)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    @torch.no_grad()
    def replace(self, handle: GradHandle, value: torch.Tensor) -> None:
        """Write another value home, without factors and not zeroed; a rank stores what it updates."""
        self._refuse_stale(handle)
        spec = self.unit.spec
        with self._to_change(handle) as view:
            view.copy_(own_slice(spec, handle.index, flat(spec.params[handle.index], value)))

    @contextmanager
    def _to_change(self, handle: GradHandle) -> Iterator[torch.Tensor]:
        """Yield one gradient in update form, to be changed. On disk all have it once they are written."""
        unit = self.unit
        self.version += 1
        self.norms.pop(handle.index, None)
        with self.homes.at_hand(unit, is_write=True) as home:
            if self.is_native:
                promote(unit, home, [i for i, h in self.held_handles().items() if not h.is_zero])
                self.is_native = unit.ledger.gradients.tier == "disk"
            yield unit.views.update(home)[handle.index]
        self.is_native = handle.is_zero = False
        handle.averaging = ()
        handle.factors.clear()

    def add(self, handle: GradHandle, more: torch.Tensor) -> bool:
        """Take what autograd itself adds for a parameter used outside of its unit. False outside of a backward."""
        if current_task() < 0:
            return False
        self._deposit(self.unit, self.unit.gradient_form.native({handle.index: more}))
        return True


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
