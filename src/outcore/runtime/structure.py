"""Tensors inside nested arguments and results: taken out, changed, put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from outcore.core.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stood."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """Where a dataclass stood: a copy of it without its tensors, and what its fields held."""

    shell: Any
    values: dict[str, Structure]


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """A nest of containers with places for tensors. ``leaves`` are places, dataclasses or plain values."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put tensors back, in the order in which ``take_apart`` returned them."""
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, _Place):
                leaves.append(tensors[leaf.index])
            elif isinstance(leaf, _Fields):
                filled = copy.copy(leaf.shell)
                for name, value in leaf.values.items():
                    object.__setattr__(filled, name, value.fill(tensors))
                leaves.append(filled)
            else:
                leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self.spec)


def take_apart(nest: Any, where: str) -> tuple[list[torch.Tensor], Structure]:
    """Take the tensors out of a nest of tuples, lists, dicts, dataclasses and registered containers.

    Returns:
        The tensors, each once however often it stands in the nest, and what is left.

    Raises:
        UnsupportedError: A tensor that needs a gradient is hidden in an object that cannot be looked into.
    """
    tensors: list[torch.Tensor] = []
    index_of: dict[int, int] = {}

    def place(tensor: torch.Tensor) -> _Place:
        index = index_of.setdefault(id(tensor), len(tensors))
        if index == len(tensors):
            tensors.append(tensor)
        return _Place(index)

    return tensors, _skeleton(nest, place, where)


def _skeleton(nest: Any, place: Callable[[torch.Tensor], _Place], where: str) -> Structure:
    leaves, spec = pytree.tree_flatten(nest)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            kept.append(place(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = {f.name: _skeleton(getattr(leaf, f.name), place, where) for f in dataclasses.fields(leaf)}
            kept.append(_Fields(copy.copy(leaf), values))
        else:
            for hidden in _hidden(leaf):
                if hidden.requires_grad:
                    raise UnsupportedError(
                        f"{where}: expected tensors in tuples, lists, dicts or dataclasses, but a tensor that needs a gradient is "
                        f"inside a {type(leaf).__name__}, where it cannot be followed; register the class with "
                        "torch.utils._pytree.register_pytree_node or make it a dataclass"
                    )
            kept.append(leaf)
    return Structure(tuple(kept), spec)


def _hidden(leaf: Any) -> Iterator[torch.Tensor]:
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes | torch.nn.Module):
        return
    for value in getattr(leaf, "__dict__", {}).values():
        if isinstance(value, torch.Tensor):
            yield value
