"""What is asked of ``prepare``: its arguments as one value, what each may be, and the model cut into units."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from outcore.checkpoint.weights.conversions import refuse_prefixes
from outcore.core.errors import ConfigError
from outcore.engine.module_guard import is_guarded
from outcore.model.partition import Partition, partition
from outcore.optim.joined import members
from outcore.optim.rules import UpdateRule, rule_for
from outcore.preparation.forecast import Loop, NamedHardware
from outcore.ranks.world import refuse_wrapped
from outcore.spec.budget import Budget
from outcore.spec.model import Precision
from outcore.spec.plan import AwayTier, Plan
from outcore.torch_private import pytree

Reduction = Literal["exact", "fast"]
"""When several ranks exchange gradients: with each micro-batch, or once per step."""


_WHAT_IS_FREE = Budget()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked of ``prepare`` beside model and optimizer. See there."""

    sample: Mapping[str, torch.Tensor] | None = None
    budget: Budget = _WHAT_IS_FREE
    precision: Precision | None = None
    accumulation_steps: int | None = None
    clipping: bool = True
    weights: str | Path | None = None
    units: Sequence[str | type] | None = None
    plan: Plan | None = None
    device: torch.device | str | None = None
    activations: AwayTier | None = None
    hardware: NamedHardware | None = None
    loop: Loop | None = None
    """What one of our own loops does in every step. Such a loop promises what plans need."""
    compile: bool | Mapping[str, Any] = False
    micro_batches_in_unit: int | None = None
    checkpoint: str | Path | None = None
    reduction: Reduction = "exact"

    def __post_init__(self) -> None:
        """Let None stand for the default, but not of ``clipping``, where it may be meant as False."""
        for field in fields(self):
            if getattr(self, field.name) is None and field.name != "clipping":
                object.__setattr__(self, field.name, field.default)

    @property
    def early_steps(self) -> int | None:
        """Micro-batches of a step if promised and nothing clips, so that updates may run inside backward; else None."""
        if self.loop is None:
            return None if self.clipping else self.accumulation_steps
        return self.loop.micro_batches if self.loop.is_promised and not self.loop.clips else None


_GIVEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that were prepared before. Their states ended with that run, or live on elsewhere."""


class _ArgumentType(NamedTuple):
    """What an argument must be."""

    kinds: type | tuple[type, ...]
    said: str
    advice: str


_FOLDER = _ArgumentType((str, os.PathLike), "a folder or None", "name the folder")
_EXPECTED = {
    "budget": _ArgumentType(Budget, "an outcore.Budget or None", "build one, such as outcore.Budget(device='8GiB')"),
    "plan": _ArgumentType(Plan, "an outcore.Plan or None", "read one from its file with outcore.Plan.load(path)"),
    "clipping": _ArgumentType(bool, "True or False", "False promises to ask for no gradient norm"),
    "units": _ArgumentType(Iterable, "a list of classes or names of modules, or None", "put it into a list"),
    "weights": _FOLDER,
    "checkpoint": _FOLDER,
}


def cut_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options
) -> tuple[UpdateRule | None, Partition]:
    """Check the arguments and cut the model into units. Without an optimizer, this freezes everything.

    Raises:
        ConfigError: An argument cannot be used.
        UnsupportedError: Something cannot work with streamed weights.
    """
    _check_arguments(model, optimizer, options)
    _check_counts(options)
    _check_sample(model, options)
    if optimizer is None:
        model.requires_grad_(requires_grad=False)
    rule = None if optimizer is None else rule_for(*members(optimizer))
    groups = [] if optimizer is None else optimizer.param_groups
    return rule, partition(
        model,
        units=options.units,
        keeps=None if rule is None else rule.kept(groups),
        precision=options.precision,
        micro_batches_in_unit=options.micro_batches_in_unit or 1,
    )


def tier_of_activations(options: Options) -> AwayTier | None:
    """Return the tier to which the user wants activations to leave; None if left to the planner."""
    if options.activations is None:
        return None
    if options.activations not in ("host", "disk"):
        raise ConfigError(
            f"activations: expected 'host' or 'disk', or None to keep what fits on the device, but got "
            f"{options.activations!r}"
        )
    if options.sample is None:
        raise ConfigError(
            "activations: expected sample= beside it, the largest micro-batch as keyword arguments of the model's "
            "forward, which shows how much memory activations take, but got none"
        )
    if options.activations == "disk" and options.budget.disk is None:
        raise ConfigError(
            "activations: expected a folder for the disk tier beside activations='disk', but the budget has none; give "
            "outcore.Budget(disk=...), or --disk DIR in the command"
        )
    return options.activations


def trained_in(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, for ``thaw``; none of something that is no module."""
    return [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []


def thaw(trained: Iterable[nn.Parameter]) -> None:
    """Undo what ``cut_model`` has frozen. Args: trained: From ``trained_in``, before."""
    for param in trained:
        param.requires_grad = True


def note_given(optimizer: torch.optim.Optimizer) -> None:
    """Remember that an optimizer was prepared: it cannot be prepared again."""
    _GIVEN.update((optimizer, *members(optimizer)))


def _check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"prepare: expected a torch.nn.Module as model, but got a {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"prepare: expected a torch.optim.Optimizer or None as optimizer, but got a {type(optimizer).__name__}"
        )
    _check_types(options)
    if any(is_guarded(m) for m in model.modules()):
        raise ConfigError(
            "prepare: expected a model that is not prepared yet, but it is; outcore.close(model) ends the first "
            "preparation"
        )
    if optimizer is None and options.checkpoint is not None:
        raise ConfigError("prepare: expected an optimizer beside checkpoint=, but got none; pass one or leave both out")
    refuse_wrapped("prepare", model)
    refuse_prefixes(model)
    if optimizer is not None:
        _check_optimizer(model, optimizer)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wrapped = next((one for one in members(optimizer) if type(one).__module__.startswith("accelerate.")), None)
    if wrapped is not None:
        raise ConfigError(
            f"prepare: expected an optimizer before Accelerate prepares it, but got its {type(wrapped).__name__}; call "
            "outcore.prepare first, and give what it returns to accelerator.prepare (docs/how-to/moving.md)"
        )
    earlier = next((one for one in members(optimizer) if one in _GIVEN), None)
    if earlier is not None:
        raise ConfigError(
            f"prepare: expected a new optimizer, but this {type(earlier).__name__} was prepared before, and its "
            "states ended with that run; build a new one, and to keep the states, load the earlier "
            "state_dict() into the optimizer that prepare returns for it"
        )
    names = {id(p): n for n, p in model.named_parameters()}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if id(param) not in names:
            raise ConfigError(
                f"prepare: expected an optimizer over the model's parameters, but one of shape {tuple(param.shape)} is "
                "not in the model; build it from model.parameters() after all changes to it (adapters, resized "
                "embeddings)"
            )
    held = next((n for n, p in model.named_parameters() if p.grad is not None), None)
    if held is not None:
        raise ConfigError(f"prepare: expected no gradients yet, but '{held}' has one; call optimizer.zero_grad() first")


def _check_types(options: Options) -> None:
    for name, expected in _EXPECTED.items():
        value = getattr(options, name)
        if not isinstance(value, expected.kinds) and (value is not None or name == "clipping"):
            raise ConfigError(f"prepare: expected {expected.said} as {name}, but got {value!r}; {expected.advice}")


def _check_counts(options: Options) -> None:
    """Refuse numbers of micro-batches, samples and reductions that are not valid, and samples with too few rows."""
    for name in ("accumulation_steps", "micro_batches_in_unit"):
        count = getattr(options, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"prepare: expected {name} to be a positive integer or None, but got {count!r}")
    if not isinstance(options.sample, Mapping | None):
        raise ConfigError(
            "prepare: expected sample to be keyword arguments of the model's forward, such as "
            f"{{'input_ids': ids}}, but got a {type(options.sample).__name__}"
        )
    if options.reduction not in get_args(Reduction):
        raise ConfigError(
            f"prepare: expected reduction to be one of {', '.join(get_args(Reduction))}, but got {options.reduction!r}"
        )
    count = options.micro_batches_in_unit or 1
    sizes = {name: len(t) for name, t in (options.sample or {}).items() if isinstance(t, torch.Tensor) and t.dim()}
    if sizes and max(sizes.values()) < count:
        raise ConfigError(
            f"prepare: expected a sample of at least {count} rows, one for each of micro_batches_in_unit, but got "
            f"{', '.join(f'{name} with {rows}' for name, rows in sizes.items())}; pass a larger batch as sample, or "
            "ask for fewer pieces"
        )


def _check_sample(model: nn.Module, options: Options) -> None:
    """Refuse a sample that forward cannot take. Nothing runs: this is for models of which everything fits, too."""
    sample = options.sample
    if sample is None:
        return
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(dict(sample))):
        raise ConfigError(
            f"prepare: expected a sample with tensors, whose shapes serve to plan, but got {dict(sample)!r}; give a "
            "micro-batch as the loop does"
        )
    signature = None if options.loop is not None else _signature_of(model)  # the sample of such a loop is a guess
    if signature is None:
        return
    try:
        signature.bind(**sample)
    except TypeError as error:
        raise ConfigError(
            f"prepare: expected sample to be keyword arguments of {type(model).__name__}.forward{signature}, but got "
            f"{', '.join(map(repr, sample))}: {error}; give a micro-batch under the names of these arguments"
        ) from error


def _signature_of(model: Any) -> inspect.Signature | None:
    """Return the signature of forward; None if it is not known, or if a hook or ``__call__`` may change arguments."""
    if type(model).__call__ is not nn.Module.__call__ or vars(model)["_forward_pre_hooks"]:
        return None
    try:
        return inspect.signature(model.forward, follow_wrapped=False)  # a wrapper may take more than what it wraps
    except (TypeError, ValueError):
        return None
