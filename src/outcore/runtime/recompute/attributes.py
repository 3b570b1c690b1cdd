"""Attributes of a unit's modules and what stands in them: counters, flags, tensors, containers, generators, buffers.

A block may change them in forward. Recompute must see them as they were, and they must end as forward left them.

[Note: looking at attributes] All that torch itself keeps in a module's ``__dict__`` is passed over. The rest is read
with one C call per module and compared by identity first, so a unit whose attributes stay as they are pays a few us
per call. What is mutable there (tensors, containers, generators) is found once and again whenever an attribute changes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from outcore.core.errors import UnsupportedError
from outcore.torch_private import NormWithStatistics

_TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
_MISSING = object()
_CONTAINERS = frozenset({list, dict, set, deque})
_DEPTH = 3  # of containers in containers
_CLOSED = (torch.Tensor, nn.Module, type, FunctionType, ModuleType)  # their attributes are not a block's state
_SMALL_BYTES = 2**16  # a copy of so much is kept until backward whatever happens


class SavedTensor:
    """What a buffer or an attribute held."""

    def __init__(self, name: str, tensor: torch.Tensor, *, may_change_silently: bool = False) -> None:
        """Args: may_change_silently: A kernel writes it without telling the version counter."""
        self._name, self._tensor, self._may_change = name, tensor, may_change_silently
        self._version = _version(tensor)
        self._value: torch.Tensor | None = tensor.detach().clone()

    def again(self) -> SavedTensor:
        """What the tensor holds now, to be put back whatever its version counter says."""
        return SavedTensor(self._name, self._tensor, may_change_silently=True)

    @property
    def is_dropped(self) -> bool:
        """Whether the copy is gone."""
        return self._value is None

    def drop_if_unchanged(self, *, by_value: bool) -> bool:
        """Let go of the copy if it is large and forward left the tensor alone.

        Returns:
            Whether the value changed behind the version counter's back. Only asked ``by_value``, which waits for it.
        """
        if self._may_change or self._value is None:
            return False
        is_silent = False
        if _version(self._tensor) == self._version:
            is_silent = by_value and not _equal(self._value, self._tensor)
            self._may_change = is_silent
            if not is_silent and self._value.nbytes > _SMALL_BYTES:
                self._value = None
        else:
            self._may_change = True
        return is_silent

    def put_back(self, where: str) -> None:
        """Give the tensor its value again.

        Raises:
            UnsupportedError: It is large, and somebody changed it after forward.
        """
        if not self._may_change and _version(self._tensor) == self._version:
            return
        if self._value is None:
            raise UnsupportedError(
                f"{where}: expected '{self._name}' (shape {tuple(self._tensor.shape)}) as its forward saw it, but it "
                "was changed before backward; change it after backward, or give the unit the policy keep"
            )
        # `.data`: the graph of a recompute may have saved the tensor, and needs no other value.
        self._tensor.data.copy_(self._value)


class _SavedContainer:
    def __init__(self, value: Any) -> None:
        self._value, self._content = value, value.copy()

    def put_back(self) -> None:
        if same(self._value, self._content):
            return
        self._value.clear()
        (self._value.extend if isinstance(self._value, list | deque) else self._value.update)(self._content)


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


Content = _SavedContainer | _SavedGenerator
"""Of a container, or of a generator."""


class Mutable(NamedTuple):
    """What can change without anybody setting it: containers, generators and tensors."""

    things: Sequence[tuple[str, Any]]
    """Under the names of attributes or classes in which they were found."""

    def contents(self) -> list[Content]:
        """What containers hold and how far generators are."""
        return [_saved(item) for _, item in self.things if not isinstance(item, torch.Tensor)]

    def tensors(self) -> list[SavedTensor]:
        """Copies."""
        return [SavedTensor(name, item) for name, item in self.things if isinstance(item, torch.Tensor)]


def mutable_in(objects: Sequence[Any]) -> Mutable:
    """What can change inside objects that are no containers."""
    return Mutable([item for value in objects for item in _mutable(value, type(value).__name__, is_open=True)])


class _Names(NamedTuple):
    """Which attributes each module has."""

    names: list[tuple[str, ...]]
    sizes: list[int]
    getters: list[itemgetter[Any]]


class Snapshot(NamedTuple):
    """Attributes of all modules of a unit at one time."""

    names: list[tuple[str, ...]]
    values: list[tuple[Any, ...]]
    mutable: Mutable


class Attributes:
    """Those of the modules of one unit. See [Note: looking at attributes]."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._dicts = [m.__dict__ for m in modules]
        self._names = self._read_names()
        self._values: list[tuple[Any, ...]] = []
        self._mutable = Mutable(())
        self._contents: list[tuple[Any, Any]] = []
        """Containers, and what they held when they were searched."""

    def take(self) -> Snapshot:
        """All attributes as they are now."""
        values = self._look()
        if not self._is_known(values):
            self._values = values
            named = zip(self._names.names, values, strict=True)
            pairs = (pair for names, part in named for pair in zip(names, part, strict=True))
            found = Mutable([item for name, value in pairs for item in _mutable(value, name)])
            self._mutable = found
            self._contents = [(item, item.copy()) for _, item in found.things if type(item) in _CONTAINERS]
        return Snapshot(self._names.names, values, self._mutable)

    def put_back(self, snapshot: Snapshot) -> None:
        """Make all attributes what they were."""
        if not same(self._look(), snapshot.values) or self._names.names is not snapshot.names:
            for owner, names, values in zip(self._dicts, snapshot.names, snapshot.values, strict=True):
                for name in [n for n in owner if n not in _TORCHS_OWN and n not in names]:
                    del owner[name]
                for name, value in zip(names, values, strict=True):
                    if owner.get(name, _MISSING) is not value:
                        owner[name] = value

    def _look(self) -> list[tuple[Any, ...]]:
        if list(map(len, self._dicts)) != self._names.sizes:
            self._names = self._read_names()
        try:
            return [get(owner) for get, owner in zip(self._names.getters, self._dicts, strict=True)]
        except KeyError:  # one came, another one went
            self._names = self._read_names()
            return [get(owner) for get, owner in zip(self._names.getters, self._dicts, strict=True)]

    def _read_names(self) -> _Names:
        # "training" twice: itemgetter returns a tuple only for two names and more.
        names = [("training", *(n for n in owner if n not in _TORCHS_OWN)) for owner in self._dicts]
        return _Names(names, list(map(len, self._dicts)), [itemgetter(*n) for n in names])

    def _is_known(self, values: list[tuple[Any, ...]]) -> bool:
        return same(values, self._values) and all([same(item, content) for item, content in self._contents])


def saved_buffers(modules: Sequence[nn.Module]) -> list[SavedTensor]:
    """Copies of all buffers."""
    # Batch norm kernels write running statistics without telling the version counter.
    return [
        SavedTensor(name, buffer, may_change_silently=isinstance(module, NormWithStatistics))
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two nests of plain values are equal; what cannot be compared counts as different."""
    try:
        return bool(a == b)
    except Exception:  # tensors, arrays, and whatever a user's class does
        return False


def _mutable(value: Any, name: str, depth: int = _DEPTH, *, is_open: bool = False) -> Iterator[tuple[str, Any]]:
    """Args: is_open: Look into instances of ordinary classes."""
    if is_open and hasattr(value, "__dict__") and not isinstance(value, _CLOSED):
        value = vars(value)
    kind = type(value)
    if kind in _CONTAINERS or kind is tuple:
        if kind is not tuple:
            yield name, value
        for part in (value.values() if kind is dict else value) if depth else ():
            yield from _mutable(part, name, depth - 1, is_open=is_open)
    elif isinstance(value, torch.Tensor):
        if not value.requires_grad and not isinstance(value, nn.Parameter):
            yield name, value
    elif isinstance(value, _GENERATORS):
        yield name, value


def _saved(item: Any) -> Content:
    return _SavedContainer(item) if type(item) in _CONTAINERS else _SavedGenerator(item)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
