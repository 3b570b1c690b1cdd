"""Calls of blocks that do the same, as far as shapes tell: one of each kind is followed, and stands for the others."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.torch_private import pytree

_OWN = "_is_of_one_run"
_NUMBERS = ("idx", "index", "id", "number", "depth")
"""How names of attributes end in which a layer has its own number."""


def is_cache(value: Any) -> bool:
    """Return whether a value is a key-value cache of Transformers."""
    return _is_cache_class(type(value))  # type: ignore[arg-type]  # classes can be hashed


@functools.lru_cache(maxsize=256)
def _is_part_of_cache(kind: type) -> bool:
    """Return whether objects of this class are such caches, or layers in one."""
    return any(c.__module__ == "transformers.cache_utils" for c in kind.__mro__)


@functools.lru_cache(maxsize=256)
def _is_cache_class(kind: type) -> bool:
    return any(c.__name__ == "Cache" and c.__module__.startswith("transformers") for c in kind.__mro__)


def own_cache(part: Any) -> Any:
    """Copy an empty cache, down to its layers' lists. Memory: what its tensors take, usually none."""
    kind = type(part)
    if kind is list:
        return [own_cache(p) for p in part]
    if kind is dict:
        return {name: own_cache(p) for name, p in part.items()}
    if isinstance(part, torch.Tensor | dict | list | tuple | set | deque):
        return copy.deepcopy(part)
    if not _is_part_of_cache(kind):  # type: ignore[arg-type]  # classes can be hashed
        return part
    own = object.__new__(kind)
    own.__dict__.update({name: own_cache(p) for name, p in part.__dict__.items()})
    own.__dict__[_OWN] = True
    return own


def is_own(value: Any) -> bool:
    """Return whether a value is a copy that ``own_cache`` made, which nothing will read again."""
    return is_cache(value) and _OWN in value.__dict__


class Shape:
    """The shape, strides, dtype and device of a tensor, and whether it needs a gradient."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype, self.device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
        self.requires_grad = tensor.requires_grad

    def empty(self) -> torch.Tensor:
        """Make a tensor of this shape, without values, that needs no gradient."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def arguments_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], of_cache: Callable[[Any], Any] = lambda _: None
) -> tuple[list[Any], Any]:
    """Return all parts of a call's arguments, and their form. Args: of_cache: Replaces a key-value cache."""
    values = [of_cache(value) if is_cache(value) else value for value in args]
    named = {name: of_cache(value) if is_cache(value) else value for name, value in kwargs.items()}
    return pytree.tree_flatten((values, named))


def kind_of(module: nn.Module, leaves: Sequence[Any], form: Any) -> Hashable:
    """Return a key that is equal for calls that do the same.

    Types of modules count, and whole numbers and switches among their attributes, such as a window of attention or the
    strides of a convolution. The number of a layer does not, nor do other numbers, such as a rate of dropout.

    Args:
        module: That is called.
        leaves: Parts of the arguments, from ``arguments_of``.
        form: The form of the arguments, from there, too.
    """
    settings = [
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if (type(value) in (bool, int) or (type(value) is tuple and all(type(each) is int for each in value)))
        and not name.startswith("_")
        and not name.endswith(_NUMBERS)
    ]
    shapes = (*map(_shape, module.parameters()), *map(_shape, leaves))
    return *map(type, module.modules()), module.training, *settings, *shapes, str(form)


def _shape(value: Any) -> Any:
    """Return a key, equal for parts of arguments with which a block does the same, as far as shapes tell."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def stand_in(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Replace a module's forward by a function. Returns a function that undoes it."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = call

    def undo() -> None:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own

    return undo
