"""Tensors whose bytes are elsewhere: reading one fetches its value, changing one in place writes it back.

[Note: on demand] Such a tensor stands where a plain loop has an ordinary one: a gradient on ``p.grad``, a state in
``optimizer.state``. An operation runs on a copy of the value, so its result is the plain one. A view is followed back
to what it is a view of, so ``t[0] = 0`` and ``t.view(-1).mul_(2)`` change what is stored. This is slow, since every
operation fetches and writes anew. What loops do all the time is served without it (``gradients.handle``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch

from outcore.torch_private import pytree, without_memory


class DistantTensor(torch.Tensor):
    """Shape, strides, dtype and device of a value that is elsewhere; no storage."""

    @staticmethod
    def __new__(cls: type[Self], like: torch.Tensor, device: torch.device, *_: object) -> Self:
        """Make a wrapper. Args: like: Has its shape, strides and dtype; may be on the meta device."""
        layout = {"strides": like.stride(), "storage_offset": like.storage_offset()}
        made: Self = without_memory(cls, like.shape, dtype=like.dtype, device=device, **layout)
        return made

    @abc.abstractmethod
    def fetch(self) -> torch.Tensor:
        """Return a copy of the value, on ``device``."""

    @abc.abstractmethod
    def store(self, value: torch.Tensor) -> None:
        """Replace the value."""

    @property
    def data(self) -> torch.Tensor:
        """The tensor itself: it has no history."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy that cannot be written to: what is stored would not follow."""
        array = self.fetch().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the value as a list."""
        return self.fetch().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor."""
        memo[id(self)] = copied = self.fetch()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the value as an ordinary tensor."""
        return self.fetch().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation on values."""
        return on_values(func, args, kwargs or {})


class _DistantView(DistantTensor):
    """A part of a distant tensor, or another look at it."""

    def __init__(
        self, like: torch.Tensor, device: torch.device, base: DistantTensor, take: Callable[[torch.Tensor], Any]
    ) -> None:
        """Args: take: Makes the view, given a value of ``base``."""
        self._of, self._take = base, take

    def fetch(self) -> torch.Tensor:
        """Return the same part of a copy."""
        return cast("torch.Tensor", self._take(self._of.fetch()))

    def store(self, value: torch.Tensor) -> None:
        """Change the part."""
        whole = self._of.fetch()
        self._take(whole).copy_(value)
        self._of.store(whole)


@torch.no_grad()
def on_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has distant tensors among its arguments. See [Note: on demand]."""
    if args and isinstance(args[0], DistantTensor) and any(_is_alias(r) for r in func._schema.returns):
        return _views(func, args[0], args[1:], kwargs)
    fetched: dict[int, torch.Tensor] = {}

    def fetch(value: Any) -> Any:
        if not isinstance(value, DistantTensor):
            return value
        if id(value) not in fetched:
            fetched[id(value)] = value.fetch()
        return fetched[id(value)]

    near_args, near_kwargs = pytree.tree_map(fetch, (tuple(args), kwargs))
    result = func(*near_args, **near_kwargs)
    changed = {id(fetched[id(t)]): t for t in _written(func, args, kwargs) if isinstance(t, DistantTensor)}
    for tensor in changed.values():
        tensor.store(fetched[id(tensor)])
    return pytree.tree_map(lambda made: changed.get(id(made), made), result)


def _is_alias(value: Any) -> bool:
    return value.alias_info is not None and not value.alias_info.is_write


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation changes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _views(func: Any, base: DistantTensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def take(value: torch.Tensor) -> Any:
        return func(value, *rest, **kwargs)

    stand_in = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    made = take(stand_in)
    if isinstance(made, torch.Tensor):
        return _DistantView(made, base.device, base, take)
    return [_DistantView(part, base.device, base, _DistantPart(take, number)) for number, part in enumerate(made)]


class _DistantPart:
    """One of several views that an operation makes."""

    def __init__(self, take: Callable[[torch.Tensor], Any], number: int) -> None:
        """Args: take: Makes them all."""
        self._take_all, self._number = take, number

    def __call__(self, value: torch.Tensor) -> Any:
        """Make this view."""
        return self._take_all(value)[self._number]
