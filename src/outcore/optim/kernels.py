"""The only file that calls torch's private kernels: the fused optimizer steps, and the norms for clipping.

[Note: first use] At its first use per device type and dtype, a kernel is compared with public torch, bit for bit. If
the private name is missing or changed, or gives other bits, outcore warns once and uses the public function from then
on: it is slower, with the same results. If ``torch.optim`` itself trains wrongly with ``fused=True``, it is used with
``fused=False``, and the warning says so. (In torch 2.11 to 2.13, SGD on the CPU skips most of every bf16 parameter,
pytorch issue 191763.)
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor

from outcore.optim.rule import LAST_STEP
from outcore.optim.rules import AdagradHyper, AdamHyper, SgdHyper

FusedHyper = AdamHyper | SgdHyper | AdagradHyper
"""Settings of the optimizers that have a fused kernel."""
_CHECKED_NUMELS = (199, 64, 1)  # a vector body with a scalar tail, a body alone, a tail alone
_CHANGED = (AttributeError, TypeError, ValueError, RuntimeError)  # errors of a missing or changed private name


@final
@dataclass(kw_only=True, slots=True, eq=False)
class FusedStep:
    """One step for several tensors with the same settings, for one kernel call. All tensors are 1D."""

    hyper: FusedHyper
    targets: list[Tensor]
    """Updated in place; one dtype, one device."""
    grads: list[Tensor]
    """Same dtype; only read."""
    states: list[tuple[Tensor, ...]]
    """States of each target in the order of ``hyper.state_names``; same dtype, updated in place."""
    steps: list[int]
    """Number of this step for each target, from 1. With SGD all are 1 (momentum buffers are only written), or none."""

    @property
    def first(self) -> bool:
        """Whether momentum buffers start with this step."""
        return self.steps[0] == 1

    def count(self, step: int) -> Tensor:
        """Return a step number as the tensor that torch expects; only read it."""
        target = self.targets[0]
        return _count_on_host(step) if target.is_cpu else _count(step, target.device)


def _count(step: int, device: torch.device) -> Tensor:
    return torch.full((), min(step, LAST_STEP), dtype=torch.float32, device=device)


@lru_cache(maxsize=64)  # shared by all blocks of a step; not on a device, where readers must wait until it is written
def _count_on_host(step: int) -> Tensor:
    return _count(step, torch.device("cpu"))


Stepper = Callable[[FusedStep], None]
_NormTaker = Callable[[list[Tensor]], list[Tensor]]

_lock = threading.Lock()
_steppers: dict[tuple[str, str, torch.dtype], Stepper] = {}
_norm_takers: dict[tuple[str, torch.dtype], _NormTaker] = {}


def apply(step: FusedStep) -> None:
    """Do one step of ``torch.optim`` with ``fused=True``, bit for bit. Call it under ``no_grad``.

    See [Note: first use].
    """
    if step.targets:
        stepper_for(step.hyper, step.targets[0].device, step.targets[0].dtype)(step)


def bound(hyper: FusedHyper, device: torch.device, dtype: torch.dtype) -> Stepper:
    """Return ``apply`` for many steps with the same settings, so that look-ups happen only once."""
    stepper = stepper_for(hyper, device, dtype)
    return _bound(hyper) if stepper is _private_step else stepper


def stepper_for(hyper: FusedHyper, device: torch.device, dtype: torch.dtype) -> Stepper:
    """Return the function that updates with these settings, on a device, in a dtype.

    The first call does the check of [Note: first use].
    """
    key = (_kernel_name(hyper), device.type, dtype)
    if key not in _steppers:  # first looked up without the lock, which workers would compete for at every block
        with _lock, torch.no_grad():
            if key not in _steppers:
                _steppers[key] = _choose_stepper(key[0], device, dtype)
    return _steppers[key]


def is_fused(hyper: FusedHyper, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a fused kernel updates with these settings, and not the single operations of an optimizer."""
    return stepper_for(hyper, device, dtype) is not _public_plain


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Take the 2-norm of each tensor, bit for bit as ``torch.nn.utils.clip_grad_norm_`` does for plain gradients.

    See [Note: first use].

    Returns:
        0-dim tensors in the order, on the device and in the dtype of ``tensors``.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    taken: dict[int, Tensor] = {}
    with torch.no_grad():
        for (device, dtype), indices in alike.items():
            key = (device.type, dtype)
            with _lock:
                if key not in _norm_takers:
                    _norm_takers[key] = _choose_norm_taker(device, dtype)
                take = _norm_takers[key]
            taken |= zip(indices, take([tensors[i] for i in indices]), strict=True)
    return [taken[i] for i in range(len(tensors))]


def copy_all(targets: list[Tensor], origins: list[Tensor]) -> None:
    """Copy each origin into its target, with one call if torch has it. Call it under ``no_grad``."""
    if len(targets) > 1 and _copies_together():
        torch._foreach_copy_(targets, origins)
    else:
        for target, origin in zip(targets, origins, strict=True):
            target.copy_(origin)


@lru_cache(maxsize=1)
def _copies_together() -> bool:
    """Whether torch copies several tensors with one call. See [Note: first use]."""
    wave = torch.arange(199, dtype=torch.float32, device="cpu").sin_()
    origins = [wave, wave.bfloat16()]
    targets = [torch.zeros_like(origin) for origin in reversed(origins)]
    reason = "other results than Tensor.copy_"
    try:
        torch._foreach_copy_(targets, origins)
        if all(torch.equal(t, o.to(t.dtype)) for t, o in zip(targets, origins, strict=True)):
            return True
    except _CHANGED as error:
        reason = f"{type(error).__name__}: {error}"
    _warn("_foreach_copy_", wave.device, wave.dtype, reason, "Tensor.copy_")
    return False


def _kernel_name(hyper: FusedHyper) -> str:
    if isinstance(hyper, AdamHyper):
        return "_fused_adamw_" if hyper.decoupled else "_fused_adam_"
    return "_fused_sgd_" if isinstance(hyper, SgdHyper) else "_fused_adagrad_"


def _private_step(step: FusedStep) -> None:
    _bound(step.hyper)(step)


def _bound(hyper: FusedHyper) -> Stepper:
    kernel = getattr(torch, _kernel_name(hyper))
    common = {"lr": hyper.lr, "weight_decay": hyper.weight_decay, "maximize": hyper.maximize}
    if isinstance(hyper, SgdHyper):
        common |= {"momentum": hyper.momentum, "dampening": hyper.dampening, "nesterov": hyper.nesterov}
    elif isinstance(hyper, AdagradHyper):
        common |= {"eps": hyper.eps, "lr_decay": hyper.lr_decay}
    else:
        common |= {"eps": hyper.eps, "beta1": hyper.beta1, "beta2": hyper.beta2, "amsgrad": hyper.amsgrad}
    is_sgd, num_states = isinstance(hyper, SgdHyper), len(hyper.state_names)
    lists = range(3 if isinstance(hyper, AdamHyper) else 1)

    def run(step: FusedStep) -> None:
        columns = [[state[i] for state in step.states] if i < num_states else [] for i in lists]
        if is_sgd:
            kernel(step.targets, step.grads, *columns, is_first_step=bool(columns[0]) and step.first, **common)
        else:
            counts = {n: step.count(n) for n in set(step.steps)}
            kernel(step.targets, step.grads, *columns, [counts[n] for n in step.steps], **common)

    return run


def _public_step(step: FusedStep, *, fused: bool) -> None:
    """Do a step with a new ``torch.optim`` optimizer that borrows the states."""
    for target, grad, state, number in zip(step.targets, step.grads, step.states, step.steps, strict=True):
        param = torch.nn.Parameter(target)
        param.grad = grad
        lent = dict(zip(step.hyper.state_names, state, strict=True))
        optimizer = _public_optimizer(step.hyper, param, fused=fused)
        if not isinstance(step.hyper, SgdHyper):
            optimizer.state[param] = {"step": step.count(number) - 1, **lent}
        elif number > 1:
            optimizer.state[param] = dict(lent)
        optimizer.step()
        for name, tensor in lent.items():
            made = optimizer.state[param][name]
            if made is not tensor:  # SGD makes a new momentum buffer at the first step
                tensor.copy_(made)


_public_fused = partial(_public_step, fused=True)
_public_plain = partial(_public_step, fused=False)


def _public_optimizer(hyper: FusedHyper, param: torch.nn.Parameter, *, fused: bool) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": hyper.lr, "weight_decay": hyper.weight_decay, "maximize": hyper.maximize}
    common |= {"fused": fused, "foreach": False}
    if isinstance(hyper, SgdHyper):
        common |= {"momentum": hyper.momentum, "dampening": hyper.dampening, "nesterov": hyper.nesterov}
        return torch.optim.SGD([param], **common)
    if isinstance(hyper, AdagradHyper):
        return torch.optim.Adagrad([param], lr_decay=hyper.lr_decay, eps=hyper.eps, **common)
    kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
    return kind([param], betas=(hyper.beta1, hyper.beta2), eps=hyper.eps, amsgrad=hyper.amsgrad, **common)


def _choose_stepper(name: str, device: torch.device, dtype: torch.dtype) -> Stepper:
    """Choose the private kernel if it has the bits of the public optimizer for every option, else a public optimizer.

    The public optimizer runs with ``fused=True`` if this trains as ``fused=False`` does.
    """
    hypers = tuple(_checked_hypers(name))
    if (reason := _difference(_public_fused, _public_plain, hypers, _TestNumbers(device, dtype), _close)) is not None:
        _warn(name, device, dtype, f"torch.optim with fused=True, {reason}", "torch.optim with fused=False")
        return _public_plain
    if (
        reason := _difference(_private_step, _public_fused, hypers, _TestNumbers(device, dtype), torch.equal)
    ) is not None:
        _warn(name, device, dtype, reason, "torch.optim with fused=True")
        return _public_fused
    return _private_step


@final
@dataclass(frozen=True, slots=True)
class _TestNumbers:
    """Numbers to check kernels on, made without any random generator."""

    device: torch.device
    dtype: torch.dtype

    def wave(self, numel: int, frequency: float) -> Tensor:
        count = torch.arange(1, numel + 1, dtype=torch.float32, device=self.device)
        return count.mul_(frequency).sin_().to(self.dtype)

    def two_steps(self, stepper: Stepper, hyper: FusedHyper) -> Tensor:
        """Return targets and states after two steps, in one tensor."""
        targets = [self.wave(n, 0.7) for n in _CHECKED_NUMELS]
        states = [tuple(torch.zeros_like(t) for _ in hyper.state_names) for t in targets]
        for number in (1, 2):
            grads = [self.wave(n, 1.3 * number) for n in _CHECKED_NUMELS]
            steps = [number] * len(targets)
            stepper(FusedStep(hyper=hyper, targets=targets, grads=grads, states=states, steps=steps))
        return torch.cat([*targets, *itertools.chain(*states)])


def _difference(
    stepper: Stepper,
    reference: Stepper,
    hypers: Iterable[FusedHyper],
    made: _TestNumbers,
    same: Callable[[Tensor, Tensor], bool],
) -> str | None:
    """Return what is wrong with a stepper; None if nothing is."""
    try:
        for hyper in hypers:
            if not same(made.two_steps(stepper, hyper), made.two_steps(reference, hyper)):
                return f"other results than the reference with {hyper}"
    except _CHANGED as error:
        return f"{type(error).__name__}: {error}"
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether results differ by no more than rounding does in two steps; a skipped update differs by more."""
    tolerance = 0.03 if a.dtype == torch.bfloat16 else 1e-4
    return torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def _checked_hypers(name: str) -> Iterable[FusedHyper]:
    """Settings that together reach every branch of a kernel."""
    for flag, other in itertools.product((False, True), repeat=2):
        if name == "_fused_sgd_":
            dampening = 0.0 if flag else 0.3  # torch allows nesterov only without dampening
            sgd: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "maximize": other}
            yield SgdHyper(momentum=0.9, dampening=dampening, nesterov=flag, **sgd)
            yield SgdHyper(momentum=0.0, dampening=0.0, nesterov=False, **sgd)
        elif name == "_fused_adagrad_":
            yield AdagradHyper(lr=0.1, lr_decay=0.2 * flag, eps=1e-10, weight_decay=0.01, maximize=other)
        else:
            adam: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
            yield AdamHyper(amsgrad=flag, maximize=other, decoupled=name == "_fused_adamw_", **adam)


def _private_norms(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, 2.0))


def _public_norms(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def _choose_norm_taker(device: torch.device, dtype: torch.dtype) -> _NormTaker:
    """Choose the private kernel if the total of its norms has the bits of torch's total norm, else public norms."""
    waves = [torch.arange(n, dtype=torch.float32, device=device).sin_().to(dtype) for n in (70001, 199, 1)]
    reason = "other results than torch.nn.utils.get_total_norm"
    try:
        total = torch.linalg.vector_norm(torch.stack(_private_norms(waves)))
        if torch.equal(total, torch.nn.utils.get_total_norm(waves)):
            return _private_norms
    except _CHANGED as error:
        reason = f"{type(error).__name__}: {error}"
    _warn("_foreach_norm", device, dtype, reason, "torch.linalg.vector_norm")
    return _public_norms


def _warn(name: str, device: torch.device, dtype: torch.dtype, reason: str, instead: str) -> None:
    message = f"torch.{name} of torch {torch.__version__} cannot be used for {dtype} on {device.type} ({reason})"
    warnings.warn(f"{message}; outcore uses {instead} instead", RuntimeWarning, stacklevel=2)
