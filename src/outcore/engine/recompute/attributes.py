"""Attributes of a unit's modules and their values: counters, flags, tensors, containers, generators, buffers.

A block may change them in forward. Recompute must see them as they were, and they must end as forward left them.

[Note: looking at attributes] All that torch itself keeps in a module's ``__dict__`` is passed over. The rest is read
with one C call per module and compared by identity first. So a unit whose attributes do not change pays a few us per
call. Mutable values (tensors, arrays, containers, generators) are searched for once, and again whenever an attribute
changes, also to an equal tensor: the new one must be saved.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, starmap
from operator import is_, itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from outcore.core.errors import UnsupportedError
from outcore.engine.recompute.structure import equal_plain
from outcore.model.wrapped import bytes_of
from outcore.torch_private import NormWithStatistics, parts_of_coo

_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
_MISSING = object()
_CONTAINERS: frozenset[type] = frozenset({list, dict, set, deque, Counter, defaultdict, OrderedDict})
_DEPTH = 3  # of containers in containers
_CLOSED = (torch.Tensor, nn.Module, type, FunctionType, ModuleType)  # their attributes are not a block's state
_ROWS = torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values
_COLUMNS = torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values
_COMPRESSED = dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS)
_COMPRESSED |= dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS)
"""What gives the parts of sparse tensors, by layout."""
_SMALL_BYTES = 2**16  # copies up to this size are kept until backward in any case


class SavedTensor:
    """A tensor in a buffer or attribute, and a copy of the value that it had."""

    def __init__(self, name: str, tensor: torch.Tensor, *, may_change_silently: bool = False) -> None:
        """Copy it. Args: may_change_silently: Whether a kernel may write it without telling the version counter."""
        self._name, self._tensor, self._may_change = name, tensor, may_change_silently
        self._version = _version(tensor)
        self._value: torch.Tensor | None = _once(tensor.detach()).clone()

    def again(self) -> SavedTensor:
        """Save the tensor's present value, to be put back whatever its version counter says."""
        return SavedTensor(self._name, self._tensor, may_change_silently=True)

    @property
    def is_dropped(self) -> bool:
        """Whether the copy is gone."""
        return self._value is None

    def drop_if_unchanged(self, *, by_value: bool) -> bool:
        """Drop the copy if it is large and forward left the tensor alone.

        Returns:
            Whether the value changed without telling the version counter. Only checked with ``by_value``, which waits
            for the tensor.
        """
        if self._may_change or self._value is None:
            return False
        is_silent = False
        if _version(self._tensor) == self._version:
            is_silent = by_value and not _equal(self._value, self._tensor)
            self._may_change = is_silent
            if not is_silent and bytes_of(self._value) > _SMALL_BYTES:
                self._value = None
        else:
            self._may_change = True
        return is_silent

    def put_back(self, where: str) -> None:
        """Give the tensor its value again.

        Raises:
            UnsupportedError: The tensor was changed after forward, and the copy was dropped because it is large.
        """
        if not self._may_change and _version(self._tensor) == self._version:
            return
        if self._value is None:
            raise UnsupportedError(
                f"{where}: expected '{self._name}' (shape {tuple(self._tensor.shape)}) as its forward saw it, but it "
                "was changed before backward; change it after backward, or give the unit the policy keep"
            )
        # `.data`: the graph of a recompute may have saved the tensor, and needs no other value.
        parts, values = _parts(self._tensor.data), _parts(self._value)
        if self._tensor.is_sparse and parts[0].shape != values[0].shape:  # its own memory has other elements now
            self._tensor.data = self._value.clone()
            return
        for part, value in zip(parts, values, strict=True):
            part.data.copy_(value)


class _SavedContainer:
    def __init__(self, value: Any) -> None:
        self._value, self._content = value, value.copy()

    def put_back(self) -> None:
        if _holds_same(self._value, self._content):
            return
        self._value.clear()
        (self._value.extend if isinstance(self._value, list | deque) else self._value.update)(self._content)


class _SavedArray:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._value = array, array.copy()

    def put_back(self) -> None:
        self._array[...] = self._value


class _SavedGenerator:
    def __init__(self, generator: Any) -> None:
        self._generator, self._state = generator, _state_of(generator)

    def put_back(self) -> None:
        generator, state = self._generator, self._state
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.get_state()


Content = _SavedContainer | _SavedArray | _SavedGenerator
"""What a container or a numpy array held, or the state of a generator."""


class Mutable(NamedTuple):
    """Values that can change without an attribute being set: containers, arrays, generators and tensors."""

    things: Sequence[tuple[str, Any]]
    """The values, each with the name of the attribute or class in which it was found."""

    def contents(self) -> list[Content]:
        """Save what containers and arrays hold, and the states of generators."""
        return [_saved(item) for _, item in self.things if not isinstance(item, torch.Tensor)]

    def tensors(self) -> list[SavedTensor]:
        """Save copies of tensors."""
        return [SavedTensor(name, item) for name, item in self.things if isinstance(item, torch.Tensor)]


def mutable_in(objects: Sequence[Any]) -> Mutable:
    """Find what can change inside objects that are not containers."""
    return Mutable([item for value in objects for item in _mutable(value, type(value).__name__, is_open=True)])


class _Names(NamedTuple):
    """The names of each module's attributes, and what reads their values."""

    names: list[tuple[str, ...]]
    sizes: list[int]
    getters: list[itemgetter[Any]]


class Snapshot(NamedTuple):
    """Attributes of all modules of a unit at one time."""

    names: list[tuple[str, ...]]
    values: list[tuple[Any, ...]]
    mutable: Mutable
    retained: dict[int, torch.Tensor]
    """Tensors whose gradients are retained, by id."""


class Attributes:
    """Attributes of the modules of one unit. See [Note: looking at attributes]."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._dicts = [m.__dict__ for m in modules]
        self._names = self._read_names()
        self._values: list[tuple[Any, ...]] = []
        self._mutable, self._retained = Mutable(()), dict[int, torch.Tensor]()
        self._contents: list[tuple[Any, Any]] = []
        """Containers, and what they held when they were searched."""

    def take(self) -> Snapshot:
        """Take a snapshot of all attributes as they are now."""
        values = self._look()
        if not self._is_known(values):
            self._values = values
            named = zip(self._names.names, values, strict=True)
            pairs = (pair for names, part in named for pair in zip(names, part, strict=True))
            found = Mutable([item for name, value in pairs for item in _mutable(value, name)])
            self._mutable, self._retained = found, _retained(values)
            self._contents = [(item, item.copy()) for _, item in found.things if type(item) in _CONTAINERS]
        return Snapshot(self._names.names, values, self._mutable, self._retained)

    def put_back(self, snapshot: Snapshot) -> None:
        """Set all attributes back to a snapshot."""
        if not _are_one(self._look(), snapshot.values) or self._names.names is not snapshot.names:
            for owner, names, values in zip(self._dicts, snapshot.names, snapshot.values, strict=True):
                for name in [n for n in owner if n not in _TORCHS_OWN and n not in names]:
                    del owner[name]
                for name, value in zip(names, values, strict=True):
                    if owner.get(name, _MISSING) is not value:
                        owner[name] = value

    def retained(self, before: Snapshot) -> list[torch.Tensor]:
        """Return tensors that have come into attributes since, and whose gradients are retained."""
        values = self._look()
        if _are_one(values, before.values) and all(starmap(_holds_same, self._contents)):
            return []
        return [tensor for place, tensor in _retained(values).items() if place not in before.retained]

    def _look(self) -> list[tuple[Any, ...]]:
        if list(map(len, self._dicts)) != self._names.sizes:
            self._names = self._read_names()
        try:
            return [get(owner) for get, owner in zip(self._names.getters, self._dicts, strict=True)]
        except KeyError:  # one came and another one went, so their number is the same
            self._names = self._read_names()
            return [get(owner) for get, owner in zip(self._names.getters, self._dicts, strict=True)]

    def _read_names(self) -> _Names:
        # "training" twice: itemgetter returns a tuple only for two names and more.
        names = [("training", *(n for n in owner if n not in _TORCHS_OWN)) for owner in self._dicts]
        return _Names(names, list(map(len, self._dicts)), [itemgetter(*n) for n in names])

    def _is_known(self, values: list[tuple[Any, ...]]) -> bool:
        if not _are_one(values, self._values) and not equal_plain(tuple(values), tuple(self._values)):
            return False
        return all(starmap(_holds_same, self._contents))


def saved_buffers(modules: Sequence[nn.Module]) -> list[SavedTensor]:
    """Copies of all buffers."""
    # Batch norm kernels write running statistics without telling the version counter.
    return [
        SavedTensor(name, buffer, may_change_silently=isinstance(module, NormWithStatistics))
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _are_one(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> bool:
    """Whether two lists of tuples hold the same objects."""
    flat = chain.from_iterable
    return list(map(len, a)) == list(map(len, b)) and all(map(is_, flat(a), flat(b)))


def _holds_same(now: Any, before: Any) -> bool:
    """Whether a container holds what it held, in this order: the same objects, or equal plain values."""
    if isinstance(now, dict):
        return equal_plain((*now, *now.values()), (*before, *before.values()))
    if not isinstance(now, set):
        return equal_plain(tuple(now), tuple(before))
    try:
        return bool(now == before)
    except Exception:  # whatever a user's class does
        return False


def _mutable(value: Any, name: str, depth: int = _DEPTH, *, is_open: bool = False) -> Iterator[tuple[str, Any]]:
    """Find what can change in a value. Args: is_open: Also look into instances of ordinary classes."""
    kind = type(value)
    if is_open and kind not in _CONTAINERS and hasattr(value, "__dict__") and not isinstance(value, _CLOSED):
        value = vars(value)
        kind = dict
    if kind in _CONTAINERS or kind is tuple:
        if kind is not tuple:
            yield name, value
        for part in (value.values() if isinstance(value, dict) else value) if depth else ():
            yield from _mutable(part, name, depth - 1, is_open=is_open)
    elif isinstance(value, torch.Tensor):
        if not value.requires_grad and not isinstance(value, nn.Parameter):
            yield name, value
    elif kind is np.ndarray:
        if value.nbytes <= _SMALL_BYTES and value.flags.writeable:
            yield name, value
    elif isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):  # which has no state
        yield name, value


def _retained(values: Iterable[Any], depth: int = _DEPTH + 1) -> dict[int, torch.Tensor]:
    """Return tensors whose gradients are retained, also those in containers, by id."""
    found: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.retains_grad:
                found[id(value)] = value
        elif depth and (type(value) in _CONTAINERS or type(value) is tuple):
            found |= _retained(value.values() if isinstance(value, dict) else value, depth - 1)
    return found


def _saved(item: Any) -> Content:
    if type(item) in _CONTAINERS:
        return _SavedContainer(item)
    return _SavedArray(item) if isinstance(item, np.ndarray) else _SavedGenerator(item)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor with each of its elements once; other tensors as they are."""
    if tensor.layout is not torch.strided or tensor.is_nested or 0 not in (strides := tensor.stride()):
        return tensor
    return tensor[tuple([slice(1) if stride == 0 else slice(None) for stride in strides])]


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors that hold a tensor's values: torch neither compares nor overwrites sparse and nested ones.

    None for layouts that do not show them. Such a tensor is taken for one that stays as it is.
    """
    if tensor.is_nested:
        return (tensor.values(),)
    if tensor.layout is torch.strided:
        return (_once(tensor),)
    return parts_of_coo(tensor) if tensor.is_sparse else [part(tensor) for part in _COMPRESSED.get(tensor.layout, ())]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all([x.shape == y.shape and torch.equal(x, y) for x, y in zip(_parts(a), _parts(b), strict=True)])
