"""Tensors inside nested arguments and results: taken out, changed, put back.

[Note: caches] In training a key-value cache of Transformers is of no use, but models create one by default. Attention
then computes with the keys and values that the cache returns. They are copies, whose products may round differently. So
each run of a unit gets an empty cache of its own: recompute would fill a shared one a second time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from outcore.core.errors import UnsupportedError
from outcore.engine.activations.saved import storage_of
from outcore.model.equal_calls import is_cache, own_cache
from outcore.torch_private import pytree

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of most arguments that are not tensors. No tensor can be hidden in their values."""


class _TensorPlace(NamedTuple):
    """Stands for a tensor."""

    number: int


class _Container(NamedTuple):
    """Stands for a tuple, list, dict (whose keys are ``names``) or instance of a registered class."""

    kind: type
    parts: list[Any]
    names: tuple[Any, ...] | None = None
    spec: pytree.TreeSpec | None = None

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        parts = [_filled(part, tensors) for part in self.parts]
        if self.kind is tuple:
            return tuple(parts)
        if self.names is not None:
            return dict(zip(self.names, parts, strict=True))
        return parts if self.spec is None else pytree.tree_unflatten(parts, self.spec)


class _Fields(NamedTuple):
    """Stands for a dataclass: a copy of it without its tensors, and what its fields held."""

    shell: Any
    values: dict[str, Any]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        filled = copy.copy(self.shell)
        for name, value in self.values.items():
            object.__setattr__(filled, name, _filled(value, tensors))
        return filled


class _EmptyCache(NamedTuple):
    """Stands for an empty key-value cache. Each ``fill`` gives an empty cache of its own."""

    empty: Any

    def fill(self, _: Sequence[torch.Tensor]) -> Any:
        return own_cache(self.empty)


class Structure(NamedTuple):
    """A nest of containers with places for tensors."""

    content: Any
    """A place, container, dataclass or cache, nested in each other, or a plain value."""
    is_fixed: bool
    """Whether all containers are tuples, so that nothing can be added or replaced."""
    objects: list[Any]
    """Objects that cannot be taken apart, as they came. A block may change them."""

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put tensors back, in the order in which ``take_apart`` returned them."""
        return _filled(self.content, tensors)

    def is_like(self, other: Structure) -> bool:
        """Whether another structure has the same parts in the same places."""
        return _same(self.content, other.content)

    def still_holds(self, nest: Any, tensors: Sequence[torch.Tensor], where: str) -> bool:
        """Whether a nest that ``fill`` made is unchanged: nothing was added, taken out or replaced."""
        if self.is_fixed:
            return True
        found, now = take_apart(nest, where, are_results=True)  # a run may have filled its caches
        return (
            len(found) == len(tensors)
            and all(a is b for a, b in zip(found, tensors, strict=True))
            and _same(self.content, now.content)
        )


def take_apart(nest: Any, where: str, *, are_results: bool = False) -> tuple[list[torch.Tensor], Structure]:
    """Take the tensors out of a nest of tuples, lists, dicts, dataclasses and registered containers.

    Args:
        nest: Arguments or results of a call.
        where: Names the unit in errors.
        are_results: Whether a block returned the nest. Filled key-value caches, which training does not use, become
            None then.

    Returns:
        The tensors, each once however often it is in the nest, and the rest.

    Raises:
        UnsupportedError: A tensor that needs a gradient is hidden in an object that cannot be taken apart.
    """
    taking = _Disassembly(where, are_results=are_results)
    content = taking.apart(nest)
    return taking.tensors, Structure(content, taking.is_fixed, taking.objects)


class _Disassembly:
    def __init__(self, where: str, *, are_results: bool) -> None:
        self._are_results = are_results
        self.tensors: list[torch.Tensor] = []
        self.is_fixed = True
        self.objects: list[Any] = []
        self._where = where
        self._place_of: dict[int, _TensorPlace] = {}

    def apart(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            place = self._place_of.get(id(value))
            if place is None:
                place = self._place_of[id(value)] = _TensorPlace(len(self.tensors))
                self.tensors.append(value)
            return place
        if kind is tuple:
            return _Container(tuple, [self.apart(part) for part in value])
        if kind is list or kind is dict:
            self.is_fixed = False
            parts = value if kind is list else value.values()
            return _Container(kind, [self.apart(part) for part in parts], tuple(value) if kind is dict else None)
        return self._object_apart(value)

    def _object_apart(self, value: Any) -> Any:
        if is_cache(value) and not _is_filled(value):
            return _EmptyCache(own_cache(value))
        if is_cache(value) and self._are_results:
            return None
        asked = iter([False])  # first about the value itself. The question must not hold it: pytree leaves a cycle
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda _: next(asked, True))
        if not (len(parts) == 1 and parts[0] is value):  # its class is registered
            self.is_fixed = False
            return _Container(type(value), [self.apart(part) for part in parts], None, spec)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.is_fixed = False
            names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            shell = copy.copy(value)
            for name in names:  # the shell lives as long as the graph and must hold no tensors
                object.__setattr__(shell, name, None)
            return _Fields(shell, {name: self.apart(getattr(value, name)) for name in names})
        for hidden in _hidden(value):
            if hidden.requires_grad:
                raise UnsupportedError(
                    f"{self._where}: expected tensors in tuples, lists, dicts or dataclasses, but a tensor that needs "
                    f"a gradient is inside a {type(value).__name__}, where it cannot be followed; register the class "
                    "with torch.utils._pytree.register_pytree_node or make it a dataclass"
                )
        self.objects.append(value)
        return value


def plain_values(structure: Structure) -> Iterator[Any]:
    """Yield the numbers, strings and other plain values beside the tensors."""
    return _plain(structure.content)


def equal_plain(a: Any, b: Any) -> bool:
    """Whether two values are one object, or equal plain values of one type, or tuples of such."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(equal_plain, a, b)))
    return type(a) in _PLAIN and bool(a == b or (a != a and b != b))


def sharing_memory(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Indices of results that share memory with an argument or with one another."""
    places = [storage_of(t) for t in (*outputs, *inputs)]
    return [i for i, place in enumerate(places[: len(outputs)]) if place and places.count(place) > 1]


def _filled(content: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = type(content)
    if kind is _TensorPlace:
        return tensors[content.number]
    if kind is _Container or kind is _Fields or kind is _EmptyCache:
        return content.fill(tensors)
    return content


def _plain(content: Any) -> Iterator[Any]:
    if isinstance(content, _Container | _Fields):
        for part in content.parts if isinstance(content, _Container) else content.values.values():
            yield from _plain(part)
    elif type(content) in _PLAIN:
        yield content


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, _TensorPlace) and isinstance(b, _TensorPlace):
        return a.number == b.number
    if isinstance(a, _Container) and isinstance(b, _Container):
        is_alike = a.kind is b.kind and a.names == b.names and a.spec == b.spec and len(a.parts) == len(b.parts)
        return is_alike and all(map(_same, a.parts, b.parts))
    if isinstance(a, _Fields) and isinstance(b, _Fields):
        return a.values.keys() == b.values.keys() and all(_same(a.values[k], b.values[k]) for k in a.values)
    if isinstance(a, _EmptyCache):
        return b is None or isinstance(b, _EmptyCache)  # a run may fill it
    return equal_plain(a, b)


def _hidden(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield tensors inside an object that is not a registered container, down to a depth of ``depth``."""
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


def _is_filled(cache: Any) -> bool:
    """Whether a cache holds something."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # none of its layers has keys
        states = [getattr(layer, "has_previous_state", False) for layer in cache.layers]
        return any(any(s.values()) if isinstance(s, dict) else any(s) if isinstance(s, list) else s for s in states)


def in_training(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Arguments of a call in training, with an empty cache of its own in place of each cache. See [Note: caches].

    Raises:
        UnsupportedError: A cache holds something: recompute would change it a second time.
    """
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    if not caches:
        return args, kwargs
    filled = next(filter(_is_filled, caches), None)
    if filled is not None:
        raise UnsupportedError(
            f"{where}: expected no key-value cache in training, but a filled {type(filled).__name__} was passed, "
            "which recompute would change a second time; train with use_cache=False, or generate under no_grad()"
        )
    own = {name: own_cache(value) if is_cache(value) else value for name, value in kwargs.items()}
    return tuple(own_cache(value) if is_cache(value) else value for value in args), own
