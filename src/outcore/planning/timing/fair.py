"""How fast operations run side by side: each gets a fair share of its link and of what links share.

Speeds are max-min fair. All speeds rise together, by equal bytes, until something is used up. The operations that use
it keep the speed they have, and the others go on rising (D. Bertsekas, R. Gallager, "Data Networks", 2nd edition,
6.5.2).

[Note: cores] Where the host computes, compute shares its cores with lanes. It loses more than they take: all its
threads wait for the one that gives way. So the cores are a resource of their own. Compute alone uses them up, and a
second of work on a link takes ``(1 - c) / v`` of them, where ``c`` and ``v`` are the parts of their speeds that
compute and the link kept when both ran. Speeds rise in the proportion of ``c`` and ``v``, so two that run beside each
other keep what was measured. Where nothing computes, links are as fast as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outcore.planning.timing.rates import LINK_OF, LINKS, Rates
from outcore.spec.timeline import LANES

_NONE, _MOST = len(LINKS), len(LANES) + 1
_COMPUTE = LINKS.index("compute")
_LEAST_KEPT, _MOST_KEPT = 0.05, 1 - 1e-6
"""Parts of its speed that compute, or a link beside it, keeps, whatever noise made of a measurement: with 1 for compute
a link would take nothing of the cores, and its own loss would not count."""
_NUMBERS = {lane: LINKS.index(link) for lane, link in LINK_OF.items()}
ONE = (*(_MOST**i for i in range(_NONE)), 0)
"""Link number -> one operation on that link, as a number whose digits count operations by link; 0 without a link."""


def link_number(lane: str) -> int:
    """Return the index of a lane's link in ``LINKS``; for a lane without a link, the number behind the last."""
    return _NUMBERS.get(lane, _NONE)


class _Room(NamedTuple):
    """A resource: it is used up when the parts that links take of it add up to 1."""

    parts: tuple[float, ...]
    """Part that an operation at full speed takes, by link number."""


class Fair(dict[int, Sequence[float]]):
    """Speeds by link number; 1 is the speed of an operation alone. Keys are sums of ``ONE``, and values are cached."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        numbers = range(len(LINKS))
        self._rooms = [_Room(tuple(float(i == j) for j in numbers)) for i in numbers]
        self._rooms += [_Room(tuple(shared.parts.get(link, 0.0) for link in LINKS)) for shared in rates.shared]
        firsts = [next((s.parts[link] for s in rates.shared if s.parts.get(link)), 1.0) for link in LINKS]
        self._steps = [1.0 / first for first in firsts]  # so all take equal amounts of the first thing they share
        cores, self._steps_beside = [1.0, *[0.0] * (len(LINKS) - 1)], [1.0, *self._steps[1:]]
        for link, kept in rates.beside_compute.items():
            i, (compute, own) = LINKS.index(link), (min(max(part, _LEAST_KEPT), _MOST_KEPT) for part in kept)
            cores[i], self._steps_beside[i] = (1 - compute) / own, own / compute
        self._rooms_beside = [*self._rooms, _Room(tuple(cores))] if rates.beside_compute else []

    def __missing__(self, counts: int) -> Sequence[float]:
        self[counts] = (*self._fill(tuple(counts // one % _MOST for one in ONE[:_NONE])), 1.0)
        return self[counts]

    def _fill(self, counts: tuple[int, ...]) -> Sequence[float]:
        speeds = [0.0] * len(counts)
        rising = {i for i, count in enumerate(counts) if count}
        is_beside = bool(self._rooms_beside) and counts[_COMPUTE] > 0
        rooms, steps = (self._rooms_beside, self._steps_beside) if is_beside else (self._rooms, self._steps)
        while rising:
            left = [_left(room, counts, speeds, {i: steps[i] for i in rising}) for room in rooms]
            full = min(range(len(rooms)), key=left.__getitem__)
            for i in rising:
                speeds[i] += left[full] * steps[i]
            rising -= {i for i in rising if rooms[full].parts[i]}
        return [min(speed, 1.0) if count else 1.0 for speed, count in zip(speeds, counts, strict=True)]


def _left(room: _Room, counts: tuple[int, ...], speeds: Sequence[float], steps: Mapping[int, float]) -> float:
    """Return how far speeds can rise until ``room`` is used up. Args: steps: Link number -> its rise, if it rises."""
    used = sum(count * part * speed for count, part, speed in zip(counts, room.parts, speeds, strict=True))
    taken = sum(counts[i] * room.parts[i] * step for i, step in steps.items())
    return max(1.0 - used, 0.0) / taken if taken else float("inf")
