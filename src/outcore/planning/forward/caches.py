"""Which arguments of a unit are key-value caches. Units get none in training."""

from __future__ import annotations

import functools
from typing import Any


def is_cache(value: Any) -> bool:
    """Whether it is a key-value cache of Transformers."""
    return _is_cache_class(type(value))  # type: ignore[arg-type]  # classes can be hashed


@functools.lru_cache(maxsize=256)
def _is_cache_class(kind: type) -> bool:
    return any(c.__name__ == "Cache" and c.__module__.startswith("transformers") for c in kind.__mro__)
