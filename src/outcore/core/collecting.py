"""Work that makes many small objects, and few that refer to one another in circles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 200_000
"""New objects before Python looks for circles; its own number is some hundred."""


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Let Python look for circles of objects less often; a third of a search goes into that otherwise."""
    before = gc.get_threshold()
    try:
        gc.set_threshold(max(before[0], _YOUNG) if before[0] else 0, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
