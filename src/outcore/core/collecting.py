"""Python's collector of reference cycles, which would cost the planner a third of its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 4_000_000
"""New objects before the collector looks for cycles. Python's own threshold is several hundred."""


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Let the garbage collector look for cycles less often inside the block."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(max(before[0], _YOUNG) if before[0] else 0, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
