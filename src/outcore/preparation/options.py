"""Checks the model and the optimizer that ``prepare`` gets, and cuts the model into units."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.checkpoint.weights.conversions import refuse_prefixes
from outcore.core.errors import ConfigError
from outcore.engine.module_guard import is_guarded
from outcore.engine.unit.one_process import refuse_wrapped
from outcore.model.partition import Partition, partition
from outcore.optim.joined import members
from outcore.optim.rules import UpdateRule, rule_for
from outcore.preparation.plan_choice import Options, check_counts
from outcore.spec.budget import Budget
from outcore.spec.plan import Plan
from outcore.torch_private import pytree

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
    check_counts(options)
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
            "outcore.prepare first, and give what it returns to accelerator.prepare (docs/moving.md, From Accelerate)"
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
