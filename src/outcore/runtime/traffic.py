"""Bytes given to each lane since the run began."""

from __future__ import annotations

from outcore.runtime.lanes import Lane


class Traffic:
    """Counters, counted when an operation is submitted."""

    def __init__(self) -> None:
        """Start at zero."""
        self._bytes = dict.fromkeys(Lane, 0)

    def add(self, lane: Lane, nbytes: int) -> None:
        """Count bytes."""
        self._bytes[lane] += nbytes

    def totals(self) -> dict[str, int]:
        """Lane name -> bytes."""
        return {lane.value: nbytes for lane, nbytes in self._bytes.items()}
