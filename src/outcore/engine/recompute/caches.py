"""Key-value caches of Transformers among a unit's arguments.

In training a cache is of no use, but models create one by default. Attention then computes with the keys and values
that the cache returns. They are copies, whose products may round differently. So each run of a unit gets an empty cache
of its own: recompute would fill a shared one a second time.
"""

from __future__ import annotations

from typing import Any

from outcore.core.errors import UnsupportedError
from outcore.model.equal_calls import is_cache, own_cache

Arguments = tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]
"""Arguments by position, and names and values of keyword arguments: all in tuples, which cannot change."""


def is_filled(cache: Any) -> bool:
    """Whether a cache holds something."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # none of its layers has keys
        states = [getattr(layer, "has_previous_state", False) for layer in cache.layers]
        return any(any(s.values()) if isinstance(s, dict) else any(s) if isinstance(s, list) else s for s in states)


def refuse_filled_caches(arguments: Arguments, where: str) -> None:
    """Raise if a cache holds something: recompute would change it a second time."""
    for value in (*arguments[0], *arguments[2]):
        if is_cache(value) and is_filled(value):
            raise UnsupportedError(
                f"{where}: expected no key-value cache in training, but a filled {type(value).__name__} was passed, "
                "which recompute would change a second time; train with use_cache=False, or generate under no_grad()"
            )


def in_training(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Arguments of a call in training, with an empty cache of its own in place of each cache."""
    if not any(is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    refuse_filled_caches((args, tuple(kwargs), tuple(kwargs.values())), where)
    own = {name: own_cache(value) if is_cache(value) else value for name, value in kwargs.items()}
    return tuple(own_cache(value) if is_cache(value) else value for value in args), own
