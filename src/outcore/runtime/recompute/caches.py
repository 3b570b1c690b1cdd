"""Key-value caches of Transformers among a unit's arguments.

In training a cache is of no use, but models make one by default, and attention then computes with what it gives back:
the same keys and values, copied, whose products may round otherwise. So each run of a unit gets an empty cache of its
own. One for all would be filled a second time by recompute.
"""

from __future__ import annotations

from typing import Any

from outcore.core.errors import UnsupportedError
from outcore.planning.forward.alike import is_cache, own_cache

Arguments = tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]
"""Arguments by position, and names and values of the others: all in tuples, which nobody can change."""


def is_filled(cache: Any) -> bool:
    """Whether a cache holds something."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # none of its layers has keys
        states = [getattr(layer, "has_previous_state", False) for layer in cache.layers]
        return any(any(s.values()) if isinstance(s, dict) else any(s) if isinstance(s, list) else s for s in states)


def refuse_filled_caches(arguments: Arguments, where: str) -> None:
    """Raise if a cache holds something: it would be changed twice."""
    for value in (*arguments[0], *arguments[2]):
        if is_cache(value) and is_filled(value):
            raise UnsupportedError(
                f"{where}: expected no key-value cache in training, but a filled {type(value).__name__} was passed, "
                "which recompute would change a second time; train with use_cache=False, or generate under no_grad()"
            )


def in_training(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Arguments of a call in training, with caches of its own."""
    if not any(is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    refuse_filled_caches((args, tuple(kwargs), tuple(kwargs.values())), where)
    own = {name: own_cache(value) if is_cache(value) else value for name, value in kwargs.items()}
    return tuple(own_cache(value) if is_cache(value) else value for value in args), own
