"""Autocast's cache of casts: one for all, and keyed by parameters, whose bytes change under it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Parameter


class AutocastCacheOff:
    """Keep autocast from caching casts of weights: its cache is keyed by the parameter, whose bytes change under it."""

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._was)


class OwnAutocastCache:
    """A cache of casts for one run of a unit, so that a weight which it uses twice is cast once, as in a plain loop.

    Then both gradients are added before they are cast back, in the lower precision. The cache is empty before and
    afterwards, since there is one for all: what was cached of other weights is cast again.
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
    """Which cache the runs of a unit have. Its first one under autocast tells whether a cache is of use."""

    def __init__(self, params: Sequence[Parameter], device: torch.device) -> None:
        self._params, self._device_type = params, device.type
        self._is_shared: bool | None = None

    def cache(self, *, is_kept: bool) -> AbstractContextManager[None]:
        """For a forward. Args: is_kept: Backward walks its graph."""
        is_on = is_kept and torch.is_autocast_cache_enabled() and self._is_shared is not False
        return OwnAutocastCache(is_on=True) if is_on else AutocastCacheOff()

    def cache_again(self, *, was_on: bool) -> AbstractContextManager[None]:
        """For a recompute. Args: was_on: Forward's caller had autocast cache its casts."""
        return OwnAutocastCache(is_on=was_on)

    def learn(self, made: Sequence[torch.Tensor]) -> None:
        """Look at the graph that a forward has made."""
        if self._is_shared is None and torch.is_autocast_enabled(self._device_type):
            self._is_shared = uses_cast_twice(made, self._params)


class CastsOfCompiled(CastsOfUnit):
    """Of a compiled unit, whose code casts by itself: no cache, and nothing is switched if nothing could be in one."""

    def cache(self, *, is_kept: bool) -> AbstractContextManager[None]:
        """The same for all runs: for another mode torch would compile another code."""
        return AutocastCacheOff() if torch.is_autocast_enabled(self._device_type) else nullcontext()

    def cache_again(self, *, was_on: bool) -> AbstractContextManager[None]:
        """As in forward."""
        return self.cache(is_kept=False)

    def learn(self, made: Sequence[torch.Tensor]) -> None:
        """There is nothing to learn."""


def uses_cast_twice(outputs: Sequence[torch.Tensor], params: Sequence[Parameter]) -> bool:
    """Whether one cast of a parameter, as autocast makes and caches it, goes into more than one operation."""
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
