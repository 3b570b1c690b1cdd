"""Block sizes of update workers: measured in the first updates, since the best size depends on the machine.

[Note: block sizes] Small blocks stay in nearer caches. With large blocks a worker needs Python's lock less often. A
worker that finds the lock taken sleeps, and waking it takes longer than a short call of torch, so that workers end up
taking turns. Which effect is stronger depends on caches, on the number of workers and on how many calls a block takes.
The size never changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

from outcore.optim.piece import Piece
from outcore.optim.rules import RuleHyper

USUAL_BYTES = 2 * 2**20
"""Usual size, 512 Ki fp32 elements: a block stays in a core's share of the last-level cache."""
LEAST_BYTES, MOST_BYTES = USUAL_BYTES // 4, 4 * USUAL_BYTES
ALL_BYTES = 128 * 2**20
"""Most bytes of all workers together, if that is more than ``USUAL_BYTES`` for each."""
TRIALS = 4
GAIN = 0.9
"""Largest part of the time that another size may take to be chosen; below 1 because measurements vary."""
TOLD_NUMEL = 2**21
"""Least number of elements per worker of an update whose time is taken into account."""


@final
class BlockSizes:
    """Finds the fastest size for each kind of update, from the usual size by halving and doubling."""

    def __init__(self, num_workers: int) -> None:
        """Args: num_workers: Number of workers that work side by side."""
        self._num_workers = num_workers
        self._most = min(MOST_BYTES, max(USUAL_BYTES, ALL_BYTES // num_workers))
        self._seen: dict[Hashable, dict[int, list[float]]] = {}

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """Kinds of updates that were large enough to be measured."""
        return tuple(self._seen)

    def take(self, kind: Hashable) -> int:
        """Return the size to take now, in bytes: one that is still to be tried, else the fastest."""
        seen, size = self._seen.get(kind, {}), USUAL_BYTES
        while True:
            near = [other for other in (size // 2, size * 2) if LEAST_BYTES <= other <= self._most]
            for each in (size, *near):
                if len(seen.get(each, ())) < TRIALS:
                    return each
            fastest = min(near, key=lambda other: min(seen[other]))
            if min(seen[fastest]) > GAIN * min(seen[size]):
                return size
            size = fastest

    def took(self, kind: Hashable, size: int, numel: int, seconds: float) -> None:
        """Learn how long an update of so many elements took."""
        if numel >= self._num_workers * TOLD_NUMEL:
            self._seen.setdefault(kind, {}).setdefault(size, []).append(seconds / numel)


def kind_of(pieces: Sequence[Piece]) -> Hashable:
    """Return what decides how many calls a block takes: rules, and formats of states."""
    return frozenset(
        (
            piece.hyper.rule if isinstance(piece.hyper, RuleHyper) else type(piece.hyper),
            None if piece.codes is None else tuple(piece.codes.formats.values()),
        )
        for piece in pieces
    )
