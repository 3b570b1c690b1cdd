"""Autocast's cache of casts. One cache serves all units, and its keys are parameters, whose bytes change under it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Parameter


class AutocastCacheOff:
    """Keeps autocast from caching casts of weights: its keys are parameters, whose bytes change under it."""

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._was)


class OwnAutocastCache:
    """A cache of casts for one run of a unit. A weight that the unit uses twice is cast once, as in a plain loop.

    So the gradients of both uses are added in the lower precision, before they are cast back. Autocast has one cache
    for all units. It is emptied before and after the run, so cached casts of other weights are made again.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(self._is_on)
        torch.clear_autocast_cache()

    def __exit__(self, *_: object) -> None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._was)


class CastsOfUnit:
    """Chooses the cache for the runs of a unit. The first run under autocast tells whether a cache is of use."""

    def __init__(self, params: Sequence[Parameter], device: torch.device) -> None:
        self._params, self._device_type = params, device.type
        self._is_shared: bool | None = None

    def cache(self, *, is_kept: bool) -> AbstractContextManager[None]:
        """The cache for a forward. Args: is_kept: Whether backward walks its graph."""
        is_on = is_kept and torch.is_autocast_cache_enabled() and self._is_shared is not False
        return OwnAutocastCache(is_on=True) if is_on else AutocastCacheOff()

    def cache_again(self, *, was_on: bool) -> AbstractContextManager[None]:
        """The cache for a recompute. Args: was_on: Whether autocast cached casts for the caller of forward."""
        return OwnAutocastCache(is_on=was_on)

    def learn(self, made: Sequence[torch.Tensor]) -> None:
        """Look at the graph that a forward has made, to learn whether a cache is of use."""
        if self._is_shared is None and torch.is_autocast_enabled(self._device_type):
            self._is_shared = uses_cast_twice(made, self._params)


class CastsOfCompiled(CastsOfUnit):
    """No cache for a compiled unit, whose code casts by itself. Without autocast, nothing is switched."""

    def cache(self, *, is_kept: bool) -> AbstractContextManager[None]:
        """The same for all runs: in another mode torch would compile the code again."""
        return AutocastCacheOff() if torch.is_autocast_enabled(self._device_type) else nullcontext()

    def cache_again(self, *, was_on: bool) -> AbstractContextManager[None]:
        """The same as in forward."""
        return self.cache(is_kept=False)

    def learn(self, made: Sequence[torch.Tensor]) -> None:
        """Do nothing: there is nothing to learn."""


def uses_cast_twice(outputs: Sequence[torch.Tensor], params: Sequence[Parameter]) -> bool:
    """Whether one cast of a parameter, made and cached by autocast, goes into more than one operation."""
    own = {id(p) for p in params}
    seen: set[Any] = {None}
    stack: list[Any] = [t.grad_fn for t in outputs]
    casts: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge, _ in node.next_functions:
            if edge is not None and edge.name() == "ToCopyBackward0" and _leaf_of(edge) in own:
                if edge in casts:
                    return True
                casts.add(edge)
            stack.append(edge)
    return False


def _leaf_of(cast: Any) -> int:
    return id(getattr(cast.next_functions[0][0], "variable", None))
