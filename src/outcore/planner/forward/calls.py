"""The arguments of blocks in a forward, on shapes alone: one call of each kind, and which units make it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.model.equal_calls import Shape, arguments_of, kind_of, stand_in
from outcore.model.partition import Partition
from outcore.planner.forward.shapes import on_shapes
from outcore.torch_private import pytree


class ShapeCall(NamedTuple):
    """A call of a unit, with shapes in place of tensors."""

    unit: str
    """The first unit that makes it."""
    leaves: Sequence[Any]
    """All parts of the arguments."""
    form: Any
    """The form of the arguments, in which the leaves stand."""
    result: Any


class Calls(NamedTuple):
    """The calls of one forward."""

    kinds: Mapping[Hashable, ShapeCall]
    of: Mapping[str, Sequence[Hashable]]
    """Unit -> kinds of its calls, in order."""


def calls_of(cut: Partition, sample: Mapping[str, Any], device: torch.device) -> Calls:
    """Follow a forward.

    Args:
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward. Only shapes and dtypes count.
        device: The device that will compute.

    Raises:
        ConfigError: The model cannot be run with these arguments, or not without values.

    Time: a forward in Python, 1 to 3 s for a large model. Memory: none.
    """
    kinds: dict[Hashable, ShapeCall] = {}
    made: defaultdict[str, list[Hashable]] = defaultdict(list)

    def call(name: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, form = arguments_of(args, kwargs)
        kind = kind_of(module, leaves, form)
        made[name].append(kind)
        values, named = pytree.tree_unflatten(leaves, form)
        result = forward(*values, **named)
        if kind not in kinds:
            kinds[kind] = ShapeCall(name, _shapes(leaves), form, _shapes(result))
        return result

    with on_shapes(cut, sample, device) as shapes, ExitStack() as undo:
        for unit, module in zip(cut.spec.units[1:], cut.modules[1:], strict=True):
            undo.callback(stand_in(module, functools.partial(call, unit.name, module, module.forward)))
        shapes.forward(lambda _: None)
    return Calls(kinds, made)


def _shapes(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, Shape, tree)
