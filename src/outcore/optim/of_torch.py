"""The optimizers of ``torch.optim`` as rules, which call torch's own functional optimizers on pieces.

So every bit is torch's, whichever implementation a group asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from outcore.optim.rule import LAST_STEP, Settings, State

_States = Mapping[str, Tensor]
_Call = Callable[[Tensor, Tensor, _States, int, Settings], None]


@final
class TensorNumber(NamedTuple):
    """A tensor among settings, as a hashable value with its dtype.

    Torch computes with such a tensor in its dtype, and so rounds differently than with a Python number.
    """

    value: float
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorNumber:
        """Return the current value of a tensor."""
        return cls(tensor.item(), tensor.dtype)


def _given(value: Any) -> Any:
    """Convert a setting to the form that torch's function expects."""
    if isinstance(value, TensorNumber):
        return torch.tensor(value.value, dtype=value.dtype, device="cpu")
    return tuple(map(_given, value)) if isinstance(value, tuple) else value


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRule:
    """One of torch's optimizers. ``outcore.optim.rule.Rule`` explains fields and methods of the same names."""

    name: str
    named: Callable[[tuple[int, ...], Settings], Iterable[str]]
    """Names of the states of a parameter of a shape."""
    call: _Call
    is_whole: bool = False
    temporaries: float = 6.0
    cost: float = 1.0
    flops: Callable[[tuple[int, ...], Settings], float] = lambda _, __: 0.0
    """FLOPs of bf16 matrix products per element of a parameter of a shape."""
    has_step: bool = True
    """Whether its states include ``step``."""
    may_be_foreach: bool = False
    """Whether torch uses ``foreach`` on an accelerator if a group leaves it open."""

    def states(self, shape: tuple[int, ...], settings: Settings) -> Mapping[str, State]:
        """Return the states of a parameter, by name."""
        given = {name: _given(value) for name, value in settings.items()}
        return {name: _form(name, shape, given) for name in self.named(shape, given)}

    def update(self, weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
        """Do one step of torch's optimizer."""
        self.call(weight, grad, states, step, {name: _given(value) for name, value in settings.items()})


def _form(name: str, shape: tuple[int, ...], settings: Settings) -> State:
    if name == "mu_product":
        return State(initial=1.0, shape=(), dtype=torch.float32)
    if name == "row_var":
        return State(shape=(*shape[:-1], 1))
    if name == "col_var":
        return State(shape=(*shape[:-2], 1, shape[-1]))
    initial = settings["initial_accumulator_value"] if name == "sum" else 0.0
    return State(initial=initial, is_unsigned=name in UNSIGNED)


def _function(module: str, name: str) -> Callable[..., None]:
    return getattr(importlib.import_module(f"torch.optim.{module}"), name)


def _before(step: int) -> list[Tensor]:
    """Return the step count before this step, to which torch adds one."""
    return [torch.tensor(float(min(step, LAST_STEP) - 1), dtype=torch.float32, device="cpu")]


def _taken(settings: Settings, *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names}


UNSIGNED = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "sum"))
"""Torch's states that are never negative."""
_COMMON = ("lr", "weight_decay", "foreach", "maximize")


def _moments(settings: Settings) -> dict[str, Any]:
    beta1, beta2 = settings["betas"]
    return {"beta1": beta1, "beta2": beta2, "eps": settings["eps"], **_taken(settings, *_COMMON)}


def _adam(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    lists = [[states[name]] if name in states else [] for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    flags = _taken(settings, "amsgrad", "decoupled_weight_decay")
    adam = _function("adam", "adam")
    adam([weight], [grad], *lists, _before(step), fused=False, **flags, **_moments(settings))


def _sgd(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    buffer = states.get("momentum_buffer")
    buffers = [None if step == 1 else buffer]
    taken = _taken(settings, "momentum", "dampening", "nesterov", *_COMMON)
    _function("sgd", "sgd")([weight], [grad], buffers, fused=False, **taken)
    if buffer is not None and step == 1 and (made := buffers[0]) is not None:
        buffer.copy_(made)  # torch makes a new buffer at the first step


def _adagrad(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    taken = _taken(settings, "lr_decay", "eps", *_COMMON)
    _function("adagrad", "adagrad")([weight], [grad], [states["sum"]], _before(step), fused=False, **taken)


def _rmsprop(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    names = ("square_avg", "grad_avg", "momentum_buffer")
    lists = [[states[name]] if name in states else [] for name in names]
    taken = _taken(settings, "alpha", "eps", "momentum", "centered", *_COMMON)
    _function("rmsprop", "rmsprop")([weight], [grad], *lists, _before(step), **taken)


def _adadelta(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    lists = [states["square_avg"]], [states["acc_delta"]], _before(step)
    _function("adadelta", "adadelta")([weight], [grad], *lists, **_taken(settings, "rho", "eps", *_COMMON))


def _adamax(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    lists = [states["exp_avg"]], [states["exp_inf"]], _before(step)
    _function("adamax", "adamax")([weight], [grad], *lists, **_moments(settings))


def _radam(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    lists = [states["exp_avg"]], [states["exp_avg_sq"]], _before(step)
    flags = _taken(settings, "decoupled_weight_decay")
    _function("radam", "radam")([weight], [grad], *lists, **flags, **_moments(settings))


def _nadam(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    lists = [states["exp_avg"]], [states["exp_avg_sq"]], [states["mu_product"]], _before(step)
    flags = _taken(settings, "momentum_decay", "decoupled_weight_decay")
    _function("nadam", "nadam")([weight], [grad], *lists, **flags, **_moments(settings))


def _adafactor(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    lists = [[states.get(name)] for name in ("row_var", "col_var", "variance")]
    eps1, eps2 = settings["eps"]
    _function("_adafactor", "adafactor")(
        [weight],
        [grad],
        *lists,
        _before(step),
        eps1=eps1,
        eps2=eps2,
        **_taken(settings, "d", "beta2_decay", *_COMMON),
    )


def _muon(weight: Tensor, grad: Tensor, states: _States, step: int, settings: Settings) -> None:
    names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    buffers = [states["momentum_buffer"]]
    _function("_muon", "muon")([weight], [grad], buffers, has_complex=False, **_taken(settings, *names))


def _flops_of_muon(shape: tuple[int, ...], settings: Settings) -> float:
    """Per Newton-Schulz step: the matrix times its transpose, the square of that, and a product with the matrix.

    Muon transposes the matrix if it has more rows than columns.
    """
    rows, columns = sorted(shape)
    return settings["ns_steps"] * (4 * rows + 2 * rows * rows / max(columns, 1))


def _named(*names: str) -> Callable[[tuple[int, ...], Settings], Iterable[str]]:
    return lambda _, __: names


def _of_adam(_: tuple[int, ...], settings: Settings) -> Iterable[str]:
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else []))


def _of_rmsprop(_: tuple[int, ...], settings: Settings) -> Iterable[str]:
    momentum, centered = settings["momentum"] > 0, settings["centered"]
    return ("square_avg", *(["momentum_buffer"] if momentum else []), *(["grad_avg"] if centered else []))


def _of_sgd(_: tuple[int, ...], settings: Settings) -> Iterable[str]:
    return ("momentum_buffer",) if settings["momentum"] else ()


def _of_adafactor(shape: tuple[int, ...], _: Settings) -> Iterable[str]:
    return ("row_var", "col_var") if len(shape) > 1 else ("variance",)


_RULES = (
    TorchRule(name="AdamW", named=_of_adam, cost=2.5, call=_adam),
    TorchRule(name="Adam", named=_of_adam, cost=2.5, call=_adam),
    TorchRule(name="SGD", named=_of_sgd, cost=1.5, call=_sgd, has_step=False),
    TorchRule(name="Adagrad", named=_named("sum"), cost=2.0, call=_adagrad),
    TorchRule(name="RMSprop", named=_of_rmsprop, cost=2.2, call=_rmsprop, may_be_foreach=True),
    TorchRule(name="Adadelta", named=_named("square_avg", "acc_delta"), cost=3.6, call=_adadelta, may_be_foreach=True),
    TorchRule(name="Adamax", named=_named("exp_avg", "exp_inf"), cost=2.3, call=_adamax, may_be_foreach=True),
    TorchRule(
        name="NAdam", named=_named("mu_product", "exp_avg", "exp_avg_sq"), cost=3.4, call=_nadam, may_be_foreach=True
    ),
    TorchRule(name="RAdam", named=_named("exp_avg", "exp_avg_sq"), cost=3.6, call=_radam, may_be_foreach=True),
    TorchRule(name="Adafactor", named=_of_adafactor, cost=10.0, call=_adafactor, is_whole=True, temporaries=4.0),
    TorchRule(
        name="Muon",
        named=_named("momentum_buffer"),
        cost=5.0,
        flops=_flops_of_muon,
        call=_muon,
        is_whole=True,
        temporaries=6.0,
        has_step=False,
    ),
)
RULES: Mapping[str, TorchRule] = {rule.name: rule for rule in _RULES if hasattr(torch.optim, rule.name)}
"""Rules by class name in ``torch.optim``. AdamW comes before Adam, because it is a subclass of it."""
