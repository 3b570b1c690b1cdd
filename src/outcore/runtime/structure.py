"""Tensors inside nested arguments and results: taken out, changed, put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def still_holds(self, nest: Any, tensors: Sequence[torch.Tensor], where: str) -> bool:
        """Whether a nest that ``fill`` made is still as it was made: nobody added, took out or replaced anything."""
        found, now = take_apart(nest, where)
        return (
            len(found) == len(tensors)
            and all(a is b for a, b in zip(found, tensors, strict=True))
            and self._equals(now)
        )

    def _equals(self, other: Structure) -> bool:
        if self.spec != other.spec:
            return False
        return all(_same_leaf(a, b) for a, b in zip(self.leaves, other.leaves, strict=True))


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
            values = {
                f.name: _skeleton(getattr(leaf, f.name), place, where)
                for f in dataclasses.fields(leaf)
                if hasattr(leaf, f.name)
            }
            shell = copy.copy(leaf)
            for name in values:  # the shell lives as long as the graph and must hold no tensors
                object.__setattr__(shell, name, None)
            kept.append(_Fields(shell, values))
        else:
            for hidden in _hidden(leaf):
                if hidden.requires_grad:
                    raise UnsupportedError(
                        f"{where}: expected tensors in tuples, lists, dicts or dataclasses, but a tensor that needs a "
                        "gradient is "
                        f"inside a {type(leaf).__name__}, where it cannot be followed; register the class with "
                        "torch.utils._pytree.register_pytree_node or make it a dataclass"
                    )
            kept.append(leaf)
    return Structure(tuple(kept), spec)


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory; 0 where it has none of its own (sparse, wrapped by a transform)."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, _Place) and isinstance(b, _Place):
        return a.index == b.index
    if isinstance(a, _Fields) and isinstance(b, _Fields):
        return a.values.keys() == b.values.keys() and all(a.values[k]._equals(b.values[k]) for k in a.values)
    return a is b


def _hidden(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Tensors inside an object that is no registered container, as far as one can reasonably look."""
    if isinstance(value, torch.Tensor):
        yield value
    elif (
        depth and value is not None and not isinstance(value, bool | int | float | str | bytes | type | torch.nn.Module)
    ):
        slots = (getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        parts = [*getattr(value, "__dict__", {}).values(), *slots]
        if isinstance(value, Mapping):
            parts += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            parts += value
        for part in parts:
            yield from _hidden(part, depth - 1)
