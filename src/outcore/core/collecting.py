"""Python's collector of objects that hold one another, which costs a planner a third of its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 4_000_000
"""New objects before it looks for circles; its own number is some hundred."""


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Let it look for circles less often."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(max(before[0], _YOUNG) if before[0] else 0, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
