"""Gradient handles: what stands on ``p.grad`` while the gradient itself is on its way home, or rests there.

A handle gives the gradient's norm, remembers factors from clipping and loss scaling, and can be zeroed, all without
moving the gradient. So ``torch.nn.utils.clip_grad_norm_``, ``GradScaler`` and every way of zeroing work unchanged. Any
other use fetches the gradient, see [Note: on demand].

[Note: rounded factors] A GPU's kernel that multiplies or divides by a 0-dim tensor on the device first converts that to
the dtype of the other tensor. A CPU's kernel does not, and neither converts a number in host memory. A model of bf16
with a few fp32 parameters has a norm, and so a clip factor, in fp32. So factors that come from a GPU are rounded at
once, and an update on the host multiplies by the same number. Torch's kernel that unscales gradients rounds no scale.
So that of a ``GradScaler`` becomes a number in host memory, which no kernel rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, Self

import torch

from outcore.engine.gradients.homes import GradientHomes
from outcore.engine.gradients.on_demand import DistantTensor, on_values
from outcore.engine.unit.unit import Unit

aten = torch.ops.aten
_LEAST_NORM = 2.0**-30


class HandleOwner(Protocol):
    """What a handle asks of the gradients of its unit."""

    unit: Unit
    homes: GradientHomes
    version: int

    def norm(self, handle: GradHandle, order: float) -> torch.Tensor:
        """Return the norm as the plain loop takes it."""

    def known_norm(self, handle: GradHandle) -> torch.Tensor | None:
        """Return the 2-norm if it is known."""

    def value(self, handle: GradHandle) -> torch.Tensor:
        """Return the gradient as the user sees it, on the device (1D, in the order of memory)."""

    def change(self, handle: GradHandle, change: Callable[[torch.Tensor], Any]) -> None:
        """Change the gradient in place, where it rests."""

    def replace(self, handle: GradHandle, value: torch.Tensor) -> None:
        """Write another value home."""

    def add(self, handle: GradHandle, more: torch.Tensor) -> bool:
        """Take what autograd itself adds. False outside of a backward."""

    def refuse_lost(self, handle: GradHandle) -> NoReturn:
        """Raise for a gradient that is incomplete."""


class GradHandle(DistantTensor):
    """Stands for a gradient: shape, dtype and device of the parameter, no storage.

    Attributes:
        index: Index of the parameter among its unit's trainable ones.
        factors: 0-dim tensors by which the gradient is to be multiplied, in order.
        averaging: With several ranks the factor that makes the sum over them a mean. It comes before the others.
        exact: A factor that may multiply the norm in place of the gradient, and its value.
        is_zero: Whether it was zeroed in place; the stored bytes then no longer count.
        is_lost: Whether it is incomplete; it can then only be zeroed or set to None.
    """

    index: int  # type: ignore[assignment]  # torch.Tensor inherits a method of that name
    factors: list[torch.Tensor]
    averaging: tuple[torch.Tensor, ...] = ()
    exact: tuple[torch.Tensor, float] | None
    is_zero: bool
    is_lost: bool
    owner: HandleOwner

    def __init__(self, like: torch.Tensor, device: torch.device, owner: HandleOwner, index: int) -> None:
        """Args: like, device: See ``DistantTensor``. owner: Keeps the gradient. index: The parameter's."""
        self.owner, self.index, self.factors, self.is_zero, self.is_lost = owner, index, [], False, False
        self.exact = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show name and shape: the values are elsewhere."""
        return f"GradHandle('{self.param_name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def param_name(self) -> str:
        """The name of the parameter."""
        return self.owner.unit.spec.params[self.index].name

    @property
    def norm_scale(self) -> float | None:
        """The factor that makes the stored gradient's norm that of the scaled gradient; None if that may round."""
        return self.exact[1] if self.exact and len(self.factors) == 1 and self.factors[0] is self.exact[0] else None

    def fetch(self) -> torch.Tensor:
        """Return a copy, on the device."""
        return self.owner.value(self).clone().as_strided(self.shape, self.stride())

    def store(self, value: torch.Tensor) -> None:
        """Replace what is stored."""
        self.owner.replace(self, value)

    def scale_by(self, factor: torch.Tensor | float, dtype: torch.dtype | None = None) -> Self:
        """Remember a factor. Tensors, of one element, are copied: GradScaler changes its own in place.

        Args:
            factor: The factor.
            dtype: To which a tensor is rounded; None: its own.
        """
        if isinstance(factor, torch.Tensor):
            self.factors.append(self.owner.homes.snapshot(factor, dtype or factor.dtype))
        else:
            self.factors.append(torch.tensor(factor, dtype=torch.float64, device="cpu"))  # no copy, no wait
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Serve what loops do to gradients where these rest; run any other operation on their values."""
        serve, is_ours = _SERVED.get(func), False
        for handle in args[0] if isinstance(args[0], list) else args[:1]:
            if isinstance(handle, GradHandle):
                is_ours = True
                if handle.is_lost and func not in _ZEROING:
                    handle.owner.refuse_lost(handle)
        if serve is not None and is_ours:
            result = serve(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return on_values(func, args, kwargs or {})


def _vector_norm(handle: GradHandle, order: float = 2, dim: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    if dim is not None or any(args) or kwargs.get("dtype") is not None:
        return NotImplemented
    return handle.owner.norm(handle, float(order))


def _norms(gradients: Sequence[torch.Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Serve norms one by one. Some of the gradients may be plain tensors."""
    return NotImplemented if dtype is not None else [torch.linalg.vector_norm(g, order) for g in gradients]


def _is_as_a_number(handle: GradHandle, value: torch.Tensor | float) -> bool:
    """Return whether an operand acts on every element as a number does, without promotion beyond the update dtype."""
    if not isinstance(value, torch.Tensor):
        return True
    if value.numel() != 1 or isinstance(value, DistantTensor):
        return False
    form = handle.owner.unit.gradient_form
    dtype = torch.result_type(form.likes[handle.index], value)
    return dtype in (handle.dtype, form.update_dtypes[handle.index])


def _rounded_to(handle: GradHandle, factor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which a factor is rounded; None: its own. See [Note: rounded factors]."""
    dtype = handle.owner.unit.gradient_form.update_dtypes[handle.index]
    return dtype if not factor.is_cpu and dtype.is_floating_point else None


def _multiply(handle: GradHandle, factor: torch.Tensor | float) -> GradHandle:
    if not _is_as_a_number(handle, factor):
        return NotImplemented
    if isinstance(factor, torch.Tensor) and not factor.is_cpu:
        return handle.scale_by(factor, _rounded_to(handle, factor))
    return handle.scale_by(factor)


def _divide(handle: GradHandle, divisor: torch.Tensor | float) -> GradHandle:
    if not _is_as_a_number(handle, divisor):
        return NotImplemented
    # Division by a power of two is multiplication by its inverse; any other rounds differently, so the bytes are
    # changed.
    if (
        not isinstance(divisor, torch.Tensor)
        and divisor != 0
        and float(divisor).hex().startswith(("0x1.0000000000000p", "-0x1.0000000000000p"))
    ):
        return handle.scale_by(1.0 / divisor)

    def divide(gradient: torch.Tensor) -> torch.Tensor:
        """Divide the gradient wherever it rests; the divisor may be on the device."""
        if not isinstance(divisor, torch.Tensor):
            return gradient.div_(divisor)
        return gradient.div_(divisor.to(gradient.device, _rounded_to(handle, divisor) or divisor.dtype))

    handle.owner.change(handle, divide)
    return handle


def _change(operation: Callable[..., Any]) -> Callable[..., GradHandle]:
    """Serve an in-place operation without other tensors: the stored bytes are changed."""

    def serve(handle: GradHandle, *args: Any, **kwargs: Any) -> GradHandle:
        if any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values())):
            return NotImplemented
        handle.owner.change(handle, lambda gradient: operation(gradient, *args, **kwargs))
        return handle

    return serve


def _zero(handle: GradHandle) -> GradHandle:
    handle.is_zero, handle.is_lost = True, False
    handle.factors.clear()
    return handle


def _add(handle: GradHandle, more: torch.Tensor, *, alpha: float = 1) -> GradHandle:
    is_plain = isinstance(more, torch.Tensor) and not isinstance(more, DistantTensor) and more.shape == handle.shape
    return handle if alpha == 1 and is_plain and handle.owner.add(handle, more) else NotImplemented


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscale gradients, and look for infinities in those that no finite norm proves to be finite.

    The host waits for the device once at most. If a gradient is multiplied by a power of two, so is its norm, to the
    bit: partial sums of squares that are so tiny that they round do not count beside a norm of ``_LEAST_NORM``. The
    host keeps what it learns of ``found_inf`` for the step.
    """
    plain = [g for g in gradients if not isinstance(g, GradHandle)]
    if plain:
        aten._amp_foreach_non_finite_check_and_unscale_.default(plain, found_inf, inverse_scale)
    handles = [g for g in gradients if isinstance(g, GradHandle)]
    known = {h: norm for h in handles if (norm := h.owner.known_norm(h)) is not None}
    for handle in handles:
        if handle not in known:
            _look_for_infinities(handle, found_inf)
    scale, found, *values = torch.stack([t.double() for t in (inverse_scale, found_inf, *known.values())]).tolist()
    norms = dict(zip(known, values, strict=True))
    for handle in handles:
        norm = norms.get(handle, math.inf)
        if handle in known and not math.isfinite(norm):
            found = math.nan
            _look_for_infinities(handle, found_inf)
        if scale == 1:
            continue
        is_power_of_two = math.frexp(scale)[0] == 0.5
        handle.scale_by(scale)
        if is_power_of_two and (_LEAST_NORM <= norm * scale < math.inf or (norm == 0 and scale <= 1)):
            handle.exact = handle.factors[0], scale
    handles[0].owner.homes.is_infinite = None if math.isnan(found) else bool(found)


def _look_for_infinities(handle: GradHandle, found_inf: torch.Tensor) -> None:
    value = handle.owner.value(handle)
    found_inf.copy_(torch.maximum(found_inf, (~torch.isfinite(value).all()).to(found_inf)))


def _each_in_place(operation: Callable[..., Any]) -> Callable[..., None]:
    """Serve an operation on a list of gradients one by one. Some of them may be plain tensors."""

    def serve(gradients: Sequence[torch.Tensor], *args: Any) -> None:
        for gradient in gradients:
            operation(gradient, *args)

    return serve


def _detach(handle: GradHandle) -> GradHandle:
    return handle


_ZEROING = (aten.zero_.default, aten._foreach_zero_.default)
_SERVED: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten.mul_.Tensor: _multiply,
    aten.mul_.Scalar: _multiply,
    aten.div_.Tensor: _divide,
    aten.div_.Scalar: _divide,
    aten.zero_.default: _zero,
    aten.clamp_.default: _change(torch.clamp_),
    aten.clamp_min_.default: _change(torch.clamp_min_),
    aten.clamp_max_.default: _change(torch.clamp_max_),
    aten.nan_to_num_.default: _change(torch.nan_to_num_),
    aten._foreach_norm.Scalar: _norms,
    aten._foreach_zero_.default: _each_in_place(torch.zero_),
    aten._foreach_mul_.Tensor: _each_in_place(torch.Tensor.mul_),
    aten._foreach_mul_.Scalar: _each_in_place(torch.Tensor.mul_),
    aten._foreach_div_.Tensor: _each_in_place(torch.Tensor.div_),
    aten._foreach_div_.Scalar: _each_in_place(torch.Tensor.div_),
    aten._foreach_clamp_min_.Scalar: _each_in_place(torch.clamp_min_),
    aten._foreach_clamp_max_.Scalar: _each_in_place(torch.clamp_max_),
    aten.add_.Tensor: _add,
    aten.detach.default: _detach,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
