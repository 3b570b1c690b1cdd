"""Key-value caches among a unit's arguments: withheld in training, since recompute would append to them twice."""

from __future__ import annotations

from typing import Any

from outcore.core.errors import UnsupportedError
from outcore.planning.forward.alike import is_cache

Arguments = tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]
"""Arguments by position, and names and values of the others: all in tuples, which nobody can change."""


def without_caches(arguments: Arguments) -> Arguments:
    """Take key-value caches away: while gradients are computed, recompute would append to them a second time."""
    args, names, values = arguments
    return _without(args), names, _without(values)


def _without(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if is_cache(value) else value for value in values)


def refuse_filled_caches(arguments: Arguments, where: str) -> None:
    """Raise if a cache holds something: it would be changed twice."""
    for value in (*arguments[0], *arguments[2]):
        if is_cache(value) and value.get_seq_length():
            raise UnsupportedError(
                f"{where}: expected no key-value cache in training, but a filled {type(value).__name__} was passed, "
                "which recompute would change a second time; train with use_cache=False, or generate under no_grad()"
            )


def in_training(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Arguments of a call in training: no call fills a cache, whether it is recomputed or not."""
    if not any(is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    arguments = args, tuple(kwargs), tuple(kwargs.values())
    refuse_filled_caches(arguments, where)
    args, names, values = without_caches(arguments)
    return args, dict(zip(names, values, strict=True))
