"""Update rules: the optimizers whose updates can run in pieces, their states, and the settings that a step needs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from outcore.core.errors import ConfigError
from outcore.optim.formats import CODING_BYTES, CODING_COST, coded, format_of, is_named, master_format_of
from outcore.optim.of_torch import RULES, UNSIGNED, TensorNumber, TorchRule
from outcore.optim.rule import Rule, State, checked_states, name_of, settings_of
from outcore.spec.layout import SCRATCH_BYTES
from outcore.spec.model import DTYPE_BYTES, MasterFormat, StateForm, StateFormat

_FLOPS_OF_ADAMW = 300.0
"""FLOPs of bf16 matrix products that the host does in the time in which AdamW updates an element
(benchmarks/cpu_update.py)."""
Group = Mapping[str, Any]
"""One entry of ``optimizer.param_groups``."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamHyper:
    """Settings of a param group for one step of Adam or AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    decoupled: bool
    """Whether weight decay acts on the weights (AdamW) instead of the gradient (Adam)."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Optimizer states that the step reads and writes, by torch's names."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SgdHyper:
    """Settings of a param group for one step of SGD."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """Optimizer states that the step reads and writes, by torch's names."""
        return ("momentum_buffer",) if self.momentum else ()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradHyper:
    """Settings of a param group for one step of Adagrad."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """Optimizer states that the step reads and writes, by torch's names."""
        return ("sum",)


AnyRule = Rule | TorchRule
"""Both have ``states`` and ``update``."""


@final
@dataclass(frozen=True, slots=True)
class RuleHyper:
    """Settings of a param group for one step of an optimizer by rule."""

    rule: AnyRule
    values: tuple[tuple[str, Any], ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by name."""
        return dict(self.values)


Hyper = AdamHyper | SgdHyper | AdagradHyper | RuleHyper
"""A snapshot of a param group: plain values, so that a scheduler cannot change an update under way."""


def said(hyper: Hyper) -> str:
    """Return a snapshot as text, the same in every process."""
    return f"{type(hyper.rule).__qualname__} {hyper.values}" if isinstance(hyper, RuleHyper) else repr(hyper)


def counts(hyper: Hyper) -> bool:
    """Whether a step with these settings counts as a step of the states.

    With dampening, torch's SGD begins its momentum at the first step with momentum; the steps before leave no trace.
    """
    if isinstance(hyper, SgdHyper):
        return bool(hyper.momentum or not hyper.dampening)
    if isinstance(hyper, RuleHyper) and hyper.rule is RULES["SGD"]:
        settings = hyper.settings
        return bool(settings["momentum"] or not settings["dampening"])
    return True


@final
@dataclass(frozen=True, kw_only=True)
class RuleKind:
    """How one optimizer updates."""

    name: str
    """Name of its class, in ``torch.optim`` or elsewhere."""
    rule: AnyRule
    keys: Mapping[str, Any]
    """The optimizer's defaults, whose keys are the settings that a step needs."""
    initial_sum: float | None = None
    """Initial value of ``sum`` in torch's Adagrad, the same for all groups; None for other optimizers."""
    groups: Sequence[Group] = ()
    """The optimizer's own list of param groups."""

    @property
    def has_step(self) -> bool:
        """Whether its states include ``step``."""
        return getattr(self.rule, "has_step", True)

    def hyper(self, group: Group) -> Hyper:
        """Take a snapshot of a group's settings now."""
        if isinstance(self.rule, Rule):  # even if its class has the name of one of torch's
            return RuleHyper(self.rule, settings_of(group, self.keys))
        _refuse_other_implementations(self.name, group)
        is_fused = self.name in _READERS and not group.get("foreach") and group.get("fused") is not False
        if is_fused:
            return _READERS[self.name](group)
        values = settings_of(group, self.keys, TensorNumber.of)
        if self.rule.may_be_foreach and group["foreach"] is None and group["params"]:
            is_foreach = not group["params"][0].is_cpu  # torch's choice there; an update elsewhere makes the same one
            values = tuple((name, is_foreach if name == "foreach" else value) for name, value in values)
        return RuleHyper(self.rule, values)

    def states(self, shape: tuple[int, ...], hyper: Hyper) -> Mapping[str, State]:
        """The states of a parameter, by name."""
        if isinstance(hyper, RuleHyper) and isinstance(hyper.rule, Rule):
            return checked_states(hyper.rule, shape, hyper.settings)
        if self.initial_sum is not None:
            return {"sum": State(initial=self.initial_sum, is_unsigned=True)}
        if not isinstance(hyper, RuleHyper):
            return {name: State(is_unsigned=name in UNSIGNED) for name in hyper.state_names}
        return self.rule.states(shape, hyper.settings)


class StateCost(NamedTuple):
    """The states, temporary memory and cost of the update of one parameter."""

    states: tuple[StateForm, ...]
    temporary_bytes: int
    is_whole: bool
    cost: float
    """Time of the update on the host, as a multiple of AdamW's."""
    flops: float
    """FLOPs of matrix products in the update on the device."""
    master_format: MasterFormat


@final
class UpdateRule:
    """How parameters are updated: by one optimizer, or each by one of several."""

    def __init__(self, kinds: Sequence[RuleKind]) -> None:
        """Args: kinds: The kind of every optimizer."""
        self.kinds = kinds

    def kind(self, group: Group) -> RuleKind:
        """Return the kind of the optimizer that a group belongs to."""
        if len(self.kinds) == 1:
            return self.kinds[0]
        found = next((kind for kind in self.kinds if any(mine is group for mine in kind.groups)), None)
        if found is None:
            raise ConfigError(
                "optimizer: expected param groups of the optimizers that outcore.prepare() was given, but one was "
                "added later, which belongs to none of them; add it before prepare"
            )
        return found

    def hyper(self, group: Group) -> Hyper:
        """Take a snapshot of a param group's settings now.

        Raises:
            ConfigError: The group asks for an implementation that cannot run in pieces.
        """
        return self.kind(group).hyper(group)

    def states(self, param: Tensor, group: Group) -> Mapping[str, State]:
        """Return the states that a parameter needs with the current settings of its group."""
        kind = self.kind(group)
        return kind.states(tuple(param.shape), kind.hyper(group))

    def state_names(self, groups: Iterable[Group]) -> tuple[str, ...]:
        """Names of states, as in torch and in torch's order: the union over all groups."""
        params = ((param, group) for group in groups for param in group["params"])
        return tuple(dict.fromkeys(name for param, group in params for name in self.states(param, group)))

    def kept(self, groups: Sequence[Group]) -> Callable[[Tensor, str], StateCost]:
        """Return a function that maps a parameter and its update dtype to its ``StateCost``.

        States for the settings of every group of the same kind count, since a parameter's group may change to them.
        """
        owners = {id(param): group for group in groups for param in group["params"]}

        def kept(param: Tensor, dtype: str) -> StateCost:
            group = owners.get(id(param), groups[0])
            kind, shape = self.kind(group), tuple(param.shape)
            hypers = [kind.hyper(g) for g in groups if self.kind(g) is kind]
            states = {name: state for hyper in hypers for name, state in kind.states(shape, hyper).items()}
            forms = tuple(
                StateForm(n, name_of(s.dtype) if s.dtype else dtype, s.shape, 1, s.initial, is_unsigned=s.is_unsigned)
                for n, s in states.items()
            )
            hyper, chosen = kind.hyper(group), format_of(group)
            cost, flops = _work_of(hyper, shape)
            made, is_whole = _temporaries(hyper, param.numel() * DTYPE_BYTES[dtype])
            if is_named(group, dtype) and not (is_whole and chosen == "fp32"):
                _refuse_format(kind.name, chosen, dtype, is_whole=is_whole)
                stored = tuple(each for form in forms for each in coded(form, param.numel(), dtype, chosen))
                made += CODING_BYTES
                cost += CODING_COST[chosen] * len(set(forms) - set(stored))
                forms = stored
            master = master_format_of(group)
            if master == "compact":
                made += param.numel() * DTYPE_BYTES[dtype] if is_whole else 0
            return StateCost(forms, made, is_whole, cost, flops * param.numel(), master)

        return kept


def _refuse_format(name: str, chosen: StateFormat, dtype: str, *, is_whole: bool) -> None:
    if is_whole or dtype not in ("float32", "bfloat16"):
        why = "which updates whole parameters" if is_whole else f"whose parameters are updated in {dtype}"
        raise ConfigError(
            f"optimizer: expected state_format 'fp32' with {name}, {why}, but got {chosen!r}; leave it out "
            "(as an optim without 8bit in its name does), or choose "
            f"{'an optimizer that works by element' if is_whole else 'precision bf16, fp32 or pure_bf16'}"
        )


def _work_of(hyper: Hyper, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the cost of an element on the host (AdamW: 1), and its FLOPs of matrix products."""
    if not isinstance(hyper, RuleHyper):
        return 1.0, 0.0
    flops = hyper.rule.flops(shape, hyper.settings) if isinstance(hyper.rule, TorchRule) else 0.0
    return hyper.rule.cost + flops / _FLOPS_OF_ADAMW, flops


def _temporaries(hyper: Hyper, update_bytes: int) -> tuple[int, bool]:
    if not isinstance(hyper, RuleHyper):
        return 0, False
    times = hyper.rule.temporaries
    if hyper.rule.is_whole:
        return math.ceil((times + 1) * update_bytes), True  # + 1: a gradient in the update dtype
    return math.ceil(min(SCRATCH_BYTES, times * update_bytes)), False


def rule_for(*optimizers: torch.optim.Optimizer) -> UpdateRule:
    """Find the update rule of an optimizer, or of several that share a model.

    Raises:
        ConfigError: An optimizer is not supported, is a subclass with its own step, or has a group that asks for an
            implementation that cannot run in pieces.
    """
    rule = UpdateRule([_kind_of(optimizer) for optimizer in optimizers])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule.hyper(group)
    return rule


def _kind_of(optimizer: torch.optim.Optimizer) -> RuleKind:
    groups, keys, kind = optimizer.param_groups, optimizer.defaults, type(optimizer)
    if isinstance(optimizer, Rule):
        if inspect.unwrap(kind.step) is not inspect.unwrap(Rule.step):
            raise ConfigError(
                f"optimizer: expected an outcore.optim.Rule with the step() that it inherits, which calls update(), "
                f"but {kind.__qualname__} has a step() of its own; leave it out, and do in update() what it does"
            )
        return RuleKind(name=kind.__name__, rule=optimizer, keys=keys, groups=groups)
    name = next((n for n, cls in _SUPPORTED.items() if isinstance(optimizer, cls) and _steps_like(kind, cls)), None)
    if name is None:
        where = f"{kind.__module__}.{kind.__qualname__}"
        raise ConfigError(
            f"optimizer: expected one of torch.optim.{', '.join(RULES)} (or a subclass with the same step), or an "
            f"outcore.optim.Rule, but got {where}; {_advice_on(where)}"
        )
    initial = float(keys["initial_accumulator_value"]) if name == "Adagrad" else None
    return RuleKind(name=name, rule=RULES[name], keys=keys, initial_sum=initial, groups=groups)


def _advice_on(name: str) -> str:
    """Advise what to use instead of an optimizer whose step cannot run in pieces."""
    stored = ' with state_format="8bit" in its param groups' if "8bit" in name.lower() else ""
    for word, instead in _INSTEAD.items():
        if word in name.lower():
            return f"take {instead}{stored}"
    return "write its update as an outcore.optim.Rule (docs/explanation/updates.md), which takes a few lines"


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
_SUPPORTED = {name: getattr(torch.optim, name) for name in RULES}
_INSTEAD = {
    "lion": "outcore.optim.Lion",
    "muon": "torch.optim.Muon for matrices, beside another one for the rest: prepare(model, [muon, adamw])",
    "adafactor": "torch.optim.Adafactor",
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
}


def _steps_like(cls: type, supported: type) -> bool:
    """Whether a subclass steps like torch's class. Unwraps ``step`` first, since torch wraps it per class."""
    return all(
        inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(supported, name))
        for name in ("step", "_init_group")
    )


def _refuse_other_implementations(name: str, group: Group) -> None:
    refused = [f"{key}=True" for key in ("capturable", "differentiable") if group.get(key)]
    if refused:
        raise ConfigError(
            f"optimizer: expected torch.optim.{name} in its fused, foreach or plain implementation (updates run piece "
            f"by piece), but got {', '.join(refused)} in a param group; leave "
            f"{'it' if len(refused) == 1 else 'them'} out"
        )
