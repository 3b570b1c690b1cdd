"""Update rules: which ``torch.optim`` optimizers are supported, what they keep, and what a step needs of a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from outcore.core.errors import ConfigError

Group = Mapping[str, Any]
"""One entry of ``optimizer.param_groups``."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamHyper:
    """What one step of Adam or AdamW needs of a param group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool
    """Weight decay acts on the weights (AdamW), not on the gradient (Adam)."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Optimizer states that the step reads and writes, torch's names."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SgdHyper:
    """What one step of SGD needs of a param group."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """Optimizer states that the step reads and writes, torch's names."""
        return ("momentum_buffer",) if self.momentum else ()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradHyper:
    """What one step of Adagrad needs of a param group."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """Optimizer states that the step reads and writes, torch's names."""
        return ("sum",)


Hyper = AdamHyper | SgdHyper | AdagradHyper
"""A snapshot of a param group: plain numbers, so that no scheduler reaches an update under way."""


@final
@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """How one optimizer updates: the states it keeps per element, where they start, its settings as numbers."""

    name: str
    """Class in ``torch.optim``."""
    initial_sum: float
    """Where Adagrad's ``sum`` starts: set once for all groups, as in torch."""

    def hyper(self, group: Group) -> Hyper:
        """Take what a step needs of a param group, now.

        Raises:
            ConfigError: The group asks for an implementation other than the fused one.
        """
        _refuse_other_implementations(self.name, group)
        return _READERS[self.name](group)

    def state_names(self, groups: Iterable[Group]) -> tuple[str, ...]:
        """States per trainable element, in torch's names and order: the union over all groups."""
        return tuple(dict.fromkeys(name for group in groups for name in self.hyper(group).state_names))

    def initial_value(self, name: str) -> float:
        """What every element of a state starts with."""
        return self.initial_sum if name == "sum" else 0.0


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Find the update rule of an optimizer.

    Raises:
        ConfigError: Not a supported optimizer, a subclass with a step of its own, or a group that asks for an
            implementation other than the fused one.
    """
    kind = next((cls for cls in _SUPPORTED if isinstance(optimizer, cls) and _steps_like(type(optimizer), cls)), None)
    if kind is None:
        raise ConfigError(
            f"optimizer: expected one of torch.optim.{', '.join(_READERS)} (or a subclass with the same step), but got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    rule = UpdateRule(name=kind.__name__, initial_sum=float(optimizer.defaults.get("initial_accumulator_value", 0.0)))
    for group in optimizer.param_groups:
        rule.hyper(group)
    return rule


def _adam(group: Group) -> AdamHyper:
    beta1, beta2 = group["betas"]
    return AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
        decoupled=bool(group["decoupled_weight_decay"]),
    )


def _sgd(group: Group) -> SgdHyper:
    return SgdHyper(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
        maximize=bool(group["maximize"]),
    )


def _adagrad(group: Group) -> AdagradHyper:
    return AdagradHyper(
        lr=float(group["lr"]),
        lr_decay=float(group["lr_decay"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
    )


_READERS: dict[str, Callable[[Group], Hyper]] = {"AdamW": _adam, "Adam": _adam, "SGD": _sgd, "Adagrad": _adagrad}
_SUPPORTED = tuple(getattr(torch.optim, name) for name in _READERS)  # AdamW before Adam, which it derives from


def _steps_like(cls: type, supported: type) -> bool:
    """Whether a subclass steps as torch's class does; torch itself wraps ``step`` per class, hence the unwrapping."""
    return all(
        inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(supported, name))
        for name in ("step", "_init_group")
    )


def _refuse_other_implementations(name: str, group: Group) -> None:
    refused = [f"{key}=True" for key in ("foreach", "capturable", "differentiable") if group.get(key)]
    if group.get("fused") is False:
        refused.append("fused=False")
    if refused:
        raise ConfigError(
            f"optimizer: expected torch.optim.{name} with fused=True or fused left unset (updates run in fused kernels)"
            f", but got {', '.join(refused)} in a param group; leave {'it' if len(refused) == 1 else 'them'} out"
        )
