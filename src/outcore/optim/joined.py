"""Several optimizers over the parameters of one model, joined into one optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from outcore.core.errors import ConfigError

HOOKS = tuple(
    f"_optimizer_{name}_hooks"
    for name in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
)
"""Attributes in which an optimizer keeps its hooks."""


class _Hooks(OrderedDict[int, Any]):
    """Own hooks, followed by the hooks that the members have at the time of the call."""

    def __init__(self, others: Iterable[OrderedDict[int, Any]]) -> None:
        super().__init__()
        self._others = tuple(others)

    def values(self) -> Any:
        return [*super().values(), *(hook for hooks in self._others for hook in hooks.values())]


class Joined(torch.optim.Optimizer):
    """An optimizer with the param groups of its members, in order, and with their states and hooks.

    No parameter may be in two members. Its defaults are the settings that all members have.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        """Args: members: Optimizers, which keep their groups and states."""
        self.members = tuple(members)
        groups = [group for member in members for group in member.param_groups]
        params = [param for group in groups for param in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise ConfigError(
                "prepare: expected optimizers that share no parameter, but one is in two of them; give each parameter "
                "to one optimizer"
            )
        if len({"param_names" in group for group in groups}) > 1:
            raise ConfigError(
                "prepare: expected optimizers that all have names of their parameters, or none, but got both; give "
                "all of them named_parameters(), or parameters()"
            )
        super().__init__(groups, {})
        common = set.intersection(*(set(member.defaults) for member in members))
        self.defaults = {name: value for name, value in members[0].defaults.items() if name in common}
        for member in members:
            self.state.update(member.state)
        for name in HOOKS:
            setattr(self, name, _Hooks(getattr(member, name) for member in members))

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Never called: the optimizer that ``prepare`` returns does the steps."""
        raise NotImplementedError


def as_one(optimizer: Any) -> Any:
    """Join a list of optimizers into one; return anything else as it is.

    Raises:
        ConfigError: The list is empty, contains something that is not an optimizer, or has two optimizers with the same
            parameter.
    """
    if not isinstance(optimizer, list | tuple):
        return optimizer
    other = next((one for one in optimizer if not isinstance(one, torch.optim.Optimizer)), None)
    if other is not None or not optimizer:
        raise ConfigError(
            "prepare: expected torch.optim.Optimizers in the list of optimizers, but got "
            f"{'none' if other is None else f'a {type(other).__name__}'}"
        )
    return optimizer[0] if len(optimizer) == 1 else Joined(optimizer)


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that an optimizer was joined from, or the optimizer itself."""
    return optimizer.members if isinstance(optimizer, Joined) else (optimizer,)
