"""Results that one forward saves for its recompute, and how they are handed out there. See [Note: select]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.engine.activations.saved import storage_of
from outcore.model.expensive_operations import is_dear, may_be_dear
from outcore.torch_private import TorchDispatchMode, pytree


class Selection:
    """Results of one forward's operations that may be expensive, in their order."""

    def __init__(self, where: str) -> None:
        """Args: where: For errors."""
        self._where = where
        self.calls: list[tuple[Any, Any]] = []
        """Each operation and its result; None: it is run again. Tensors of results are packed when forward is over."""
        self._changed: set[int] = set()
        """Addresses of memory that the block has written in place. Versions do not tell all: ``data`` has its own."""

    def forward(self) -> TorchDispatchMode:
        """Return the mode to run the block under."""
        return _SelectionMode(self.calls, self._changed)

    def end(self, made: Sequence[torch.Tensor], pack: Callable[[torch.Tensor], Any]) -> bool:
        """End forward. What shares memory with the block's results is left out: these may be changed outside.

        Args:
            made: Results of the block.
            pack: Stores a tensor.

        Returns:
            False if the block has changed in place what was to be saved; then nothing is saved.
        """
        outside = {storage_of(t) for t in made}
        packed: list[tuple[Any, Any]] = []
        for func, result in self.calls:
            held = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, _ResultTensor)]
            if any(storage_of(leaf.content) in self._changed for leaf in held):
                self.calls.clear()
                return False
            is_out = any(storage_of(leaf.content) in outside for leaf in held)
            kept = (
                None
                if is_out
                else pytree.tree_map_only(_ResultTensor, lambda leaf: _ResultTensor(pack(leaf.content)), result)
            )
            packed.append((func, kept))
        self.calls = packed
        return True

    def recompute(self, unpack: Callable[[Any], torch.Tensor]) -> TorchDispatchMode:
        """Return the mode to run the block again under. Args: unpack: Gives back what ``pack`` stored."""
        return _ReplayMode(self.calls, unpack, self._where)


class _ResultTensor:
    """A tensor of a result, packed once forward is over."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class _SelectionMode(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any]], changed: set[int]) -> None:
        super().__init__()
        self._calls, self._changed = calls, changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._changed.update(map(storage_of, _written(func, args, kwargs)))
        if may_be_dear(func):
            kept = (
                pytree.tree_map_only(torch.Tensor, _ResultTensor, result)
                if is_dear(func, args, kwargs, result)
                else None
            )
            self._calls.append((func, kept))
            # A result is new memory: what was written at its address before is gone.
            self._changed.difference_update(storage_of(t) for t in _tensors(result))
        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operation changes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        if argument.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _ReplayMode(TorchDispatchMode):
    def __init__(self, calls: Sequence[tuple[Any, Any]], unpack: Callable[[Any], torch.Tensor], where: str) -> None:
        super().__init__()
        self._left, self._unpack, self._where = iter(calls), unpack, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not may_be_dear(func):
            return func(*args, **(kwargs or {}))
        nothing: tuple[Any, Any] = (None, None)
        before, result = next(self._left, nothing)
        if before is not func:
            raise UnsupportedError(
                f"{self._where}: recompute does {func} where forward did {before}; the block depends on something "
                "besides its arguments, random numbers and buffers: move that into a buffer, or give this unit the "
                "policy keep in the plan"
            )
        if result is None:
            return func(*args, **(kwargs or {}))
        # A tensor of its own each time: it becomes part of a graph.
        return pytree.tree_map_only(_ResultTensor, lambda packed: self._unpack(packed.content).detach(), result)
