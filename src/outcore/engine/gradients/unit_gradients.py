"""Gradients of one unit: what is held, in which form, under which handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat
from outcore.memory.arena import Buffer
from outcore.optim import kernels
from outcore.torch_private import current_task

if TYPE_CHECKING:
    from outcore.engine.gradients.homes import GradientHomes
    from outcore.engine.gradients.passes import BackwardGradients


@dataclass(slots=True, eq=False)
class BackwardPass:
    """What one backward pass has given a unit so far: in its bucket, or loose."""

    num_expected: int
    """Number of parameters that autograd will reach."""
    present: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    """Parameters for which no more gradients will come."""
    loose: dict[int, torch.Tensor] = field(default_factory=dict)
    made: Handle | None = None
    """Mark behind the compute that wrote the gradients."""
    stream: str = ""
    """The stream of that compute, not always the one on which the pass is closed."""


class UnitGradients:
    """Bookkeeping of one unit, and the owner of the handles on ``p.grad``.

    Attributes:
        handles: Handles by parameter index. A gradient is held as long as its handle is on ``p.grad``.
        norms: 2-norms of held gradients as stored, where known.
        is_native: Whether the home holds the sums of one pass in the weights layout, not yet the update layout.
        has_bucket: Whether a pass collects gradients in a bucket, if there is room; else in loose tensors.
        num_passes: Backward passes since the last step.
        counted_pass: The pass that was counted last.
        open: The pass that is running.
        version: Counts changes of what is stored.
    """

    def __init__(self, unit: Unit, store: BackwardGradients, home: GradientHomes) -> None:
        """Begin without gradients.

        Args:
            unit: The unit.
            store: Gradients of all units.
            home: Has the values.
        """
        self.unit, self.store, self._home = unit, store, home
        self.handles: dict[int, GradHandle] = {}
        self.norms: dict[int, torch.Tensor] = {}
        self.is_native = False
        self.has_bucket = bool(unit.name) and (unit.plan.gradients != "device" or unit.spec.num_ranks > 1)
        self.num_passes = 0
        self.counted_pass = -1
        self.open: BackwardPass | None = None
        self.version = 0

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

    def stored_views(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return all gradients as they are stored now (1D), in ``buffer``: the home or a copy of it."""
        return self.unit.views.bucket(buffer) if self.is_native else self.unit.views.update(buffer)

    def gradient_name(self, handle: GradHandle) -> str:
        """Return the name of the parameter."""
        return self.unit.spec.params[handle.index].name

    def gradient_norm(self, handle: GradHandle, order: float) -> torch.Tensor:
        """Return the norm as the plain loop takes it: by the device's kernel, over the accumulated, scaled gradient.

        The tensor is the caller's own: an edit of it does not change what is known.
        """
        if not self.store.clipping:
            raise ConfigError(
                "expected no gradient norm after outcore.prepare(..., clipping=False), "
                f"but that of '{self.gradient_name(handle)}' was asked for; prepare with clipping=True"
            )
        self._refuse_stale(handle)
        is_stored_norm = order == 2 and not handle.is_zero and not handle.factors
        if is_stored_norm and self.unit.plan.gradients == "device" and handle.index not in self.norms:
            self._take_norms_on_device()
        scale = handle.norm_scale if handle.factors else 1.0
        if order == 2 and not handle.is_zero and scale is not None and handle.index in self.norms:
            return self.norms[handle.index].clone() if scale == 1 else self.norms[handle.index] * scale
        value = self._home.value(self, handle)
        norm = kernels.norms([value])[0] if order == 2 else torch.linalg.vector_norm(value, order)
        if is_stored_norm:
            self.norms[handle.index] = norm.clone()
        return norm

    def _take_norms_on_device(self) -> None:
        """Take all norms that are not known: a caller that asks for one will ask for the others."""
        stored = self._home.all_stored(self)
        wanted = [i for i, h in self.handles.items() if i not in self.norms and not h.is_zero and not h.factors]
        self.norms.update(zip(wanted, kernels.norms([stored[i] for i in wanted]), strict=True))

    def known_norm(self, handle: GradHandle) -> torch.Tensor | None:
        """Return the stored gradient's norm if it is known and that of the handle, too."""
        return None if handle.factors or handle.is_zero else self.norms.get(handle.index)

    def gradient_value(self, handle: GradHandle) -> torch.Tensor:
        """Return the gradient as the user sees it, on the device (1D, in the order of memory)."""
        self._refuse_stale(handle)
        return self._home.value(self, handle).to(handle.dtype)

    def replace_gradient(self, handle: GradHandle, value: torch.Tensor) -> None:
        """Write another value home."""
        self._refuse_stale(handle)
        self.version += 1
        self._home.replace(self, handle, flat(self.unit.spec.params[handle.index], value))

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

    def refuse_lost(self, handle: GradHandle) -> None:
        """Raise for a gradient that is incomplete."""
        raise UnsupportedError(
            "backward ended in an exception; call optimizer.zero_grad() first (expected whole gradients, but that of "
            f"'{self.gradient_name(handle)}' may be incomplete)"
        )

    def _refuse_stale(self, handle: GradHandle) -> None:
        if handle.is_lost:
            self.refuse_lost(handle)
        if self.unit.params[handle.index].grad is not handle:
            raise UnsupportedError(
                f"expected the gradient that is on p.grad of '{self.gradient_name(handle)}' now, but got one that was "
                "there before it was set to None, whose bytes may be overwritten by now; clone a gradient to keep it"
            )

    def add_to_gradient(self, handle: GradHandle, more: torch.Tensor) -> bool:
        """Take what autograd itself adds for a parameter used outside of its unit. False outside of a backward."""
        if current_task() < 0:
            return False
        self.store.deposit(self.unit, self.unit.gradient_form.native({handle.index: more}))
        return True

    def change_gradient(self, handle: GradHandle, change: Callable[[torch.Tensor], Any]) -> None:
        """Fetch, change, write back."""
        self._refuse_stale(handle)
        self.version += 1
        self._home.change(self, handle, change)
