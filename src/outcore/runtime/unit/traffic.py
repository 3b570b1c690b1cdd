"""Bytes given to each lane since the run began."""

from __future__ import annotations

from collections.abc import Mapping

from outcore.spec.lanes import Lane


class Traffic:
    """Counters, counted when an operation is submitted."""

    def __init__(self) -> None:
        """Start at zero."""
        self._bytes = dict.fromkeys(Lane, 0)

    def add(self, lane: Lane, nbytes: int) -> None:
        """Count bytes."""
        self._bytes[lane] += nbytes

    def since(self, totals: Mapping[str, int]) -> dict[str, int]:
        """Lane name -> bytes that were counted after these ``totals``."""
        return {lane: nbytes - totals[lane] for lane, nbytes in self.totals().items()}

    def take_back(self, nbytes: Mapping[str, int]) -> None:
        """Bytes that were counted did not move after all."""
        for lane, moved in nbytes.items():
            self._bytes[Lane(lane)] -= moved

    def totals(self) -> dict[str, int]:
        """Lane name -> bytes."""
        return {lane.value: nbytes for lane, nbytes in self._bytes.items()}
