"""How much of its scratch a worker's blocks fill: measured in the first updates, since it depends on the machine.

[Note: block sizes] Small blocks stay in nearer caches. With large ones a worker comes to Python's lock less often: one
that finds it taken sleeps, and waking it takes longer than a short call of torch, so workers end up taking turns. What
weighs more depends on caches, on the number of workers and on how many calls a block takes. No size changes a bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

from outcore.optim.blocks import Piece
from outcore.optim.rules import RuleHyper

USUAL_BYTES = 2 * 2**20
"""512 Ki fp32 elements: a block stays in a core's share of the last-level cache."""
LEAST_BYTES, MOST_BYTES = USUAL_BYTES // 4, 4 * USUAL_BYTES
ALL_BYTES = 128 * 2**20
"""Of all workers, if more than ``USUAL_BYTES`` for each."""
TRIALS = 4
GAIN = 0.9
"""What another size must take of the time, since no two measurements are alike."""
TOLD_NUMEL = 2**21
"""Elements for each worker that an update must have to tell anything."""


@final
class BlockSizes:
    """Looks for the fastest size, kind of update by kind, from the usual one on to its halves and doubles."""

    def __init__(self, num_workers: int) -> None:
        """Args: num_workers: That work side by side."""
        self._num_workers = num_workers
        self._most = min(MOST_BYTES, max(USUAL_BYTES, ALL_BYTES // num_workers))
        self._seen: dict[Hashable, dict[int, list[float]]] = {}

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """Of updates that were large enough."""
        return tuple(self._seen)

    def take(self, kind: Hashable) -> int:
        """The size to take now, in bytes: one that is to be tried, else what was found."""
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
    """What decides how many calls a block takes: rules, and formats of states."""
    return frozenset(
        (
            piece.hyper.rule if isinstance(piece.hyper, RuleHyper) else type(piece.hyper),
            None if piece.codes is None else tuple(piece.codes.formats.values()),
        )
        for piece in pieces
    )
