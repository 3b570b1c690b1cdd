"""How fast operations run side by side: each gets a fair share of its link and of what links share.

Speeds are max-min fair. All speeds rise together, by equal bytes, until something is used up. The operations that use
it keep the speed they have, and the others go on rising (D. Bertsekas, R. Gallager, "Data Networks", 2nd edition,
6.5.2).

[Note: giving way] Reads of what updates need stand still while another lane reads from disk, and so do their writes. In
a run they start no piece while another transfer has pieces to start (``memory.piece_pool``). So transfers of a few
pieces still share the drive with them, which is not simulated.

[Note: cores] Where the host computes, compute shares its cores with lanes. It loses more than they take: all its
threads wait for the one that gives way. What both keep was measured for each link alone beside compute: ``c`` of the
speed of compute, and ``v`` of the link's. Beside several links, a second of compute takes ``1 / c - 1`` seconds more
for each of them, and each link keeps ``v`` of the speed that it has among the others. So two keep what was measured,
and three or four come near to it. The cores are no resource as above: then a link would lose what other links take
from compute, but the system's scheduler gives each thread its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outcore.planner.timing.rates import LINK_OF, LINKS, Rates
from outcore.spec.lane_names import GIVING_WAY
from outcore.spec.timeline import LANES

_BEHIND = tuple(sorted(lane.value for lane in GIVING_WAY))
_NONE, _MOST = len(LINKS) + len(_BEHIND), len(LANES) + 1
_COMPUTE = LINKS.index("compute")
_LEAST_KEPT = 0.05
"""Part of its speed that compute, or a link beside it, keeps, whatever noise made of a measurement."""
_NUMBERS = {lane: LINKS.index(link) for lane, link in LINK_OF.items()}
_AHEAD = {len(LINKS) + i: _NUMBERS[lane] for i, lane in enumerate(_BEHIND)}
"""Number of a lane that gives way -> number of its link."""
_NUMBERS |= {lane: len(LINKS) + i for i, lane in enumerate(_BEHIND)}
ONE = (*(_MOST**i for i in range(_NONE)), 0)
"""Number -> one operation with this number, as a number whose digits count operations; 0 without a link."""


def link_number(lane: str) -> int:
    """Return the number of a lane: the index of its link in ``LINKS``, or a number of its own if it gives way.

    A lane without a link has the number behind the last.
    """
    return _NUMBERS.get(lane, _NONE)


class _SharedResource(NamedTuple):
    """A resource: it is used up when the parts that links take of it add up to 1."""

    parts: tuple[float, ...]
    """Part that an operation at full speed takes, by link number."""

    def among(self, counts: Sequence[int]) -> _SharedResource:
        """Return the resource as links use it now: a link that is alone takes no more than all of it."""
        taking = sum(bool(count and part) for count, part in zip(counts, self.parts, strict=True))
        return self if taking > 1 else _SharedResource(tuple(min(part, 1.0) for part in self.parts))


class Fair(dict[int, Sequence[float]]):
    """Speeds by number; 1 is the speed of an operation alone. Keys are sums of ``ONE``, and values are cached.

    A speed is 0 if the operation gives way: see [Note: giving way].
    """

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        numbers = range(len(LINKS))
        self._rooms = [_SharedResource(tuple(float(i == j) for j in numbers)) for i in numbers]
        self._rooms += [
            _SharedResource(tuple(shared.parts.get(link, 0.0) for link in LINKS)) for shared in rates.shared
        ]
        firsts = [next((s.parts[link] for s in rates.shared if s.parts.get(link)), 1.0) for link in LINKS]
        self._steps = [1.0 / first for first in firsts]  # so all take equal amounts of the first thing they share
        self._kept = {
            LINKS.index(link): tuple(max(part, _LEAST_KEPT) for part in kept)
            for link, kept in rates.beside_compute.items()
        }

    def __missing__(self, sum_of_ones: int) -> Sequence[float]:
        counts = tuple(sum_of_ones // one % _MOST for one in ONE[:_NONE])
        going = {i for i, link in _AHEAD.items() if not counts[link]}
        of_links = [counts[i] + sum(counts[j] for j in going if _AHEAD[j] == i) for i in range(len(LINKS))]
        speeds = self._fill(of_links)
        speeds = self._beside_compute(of_links, speeds) if counts[_COMPUTE] else speeds
        self[sum_of_ones] = (*speeds, *(speeds[link] if i in going else 0.0 for i, link in _AHEAD.items()), 1.0)
        return self[sum_of_ones]

    def _beside_compute(self, counts: Sequence[int], speeds: Sequence[float]) -> Sequence[float]:
        """Return what is left of speeds while the host computes. See [Note: cores]."""
        kept = {i: parts for i, parts in self._kept.items() if counts[i]}
        lost = sum(1 / compute - 1 for compute, _ in kept.values())
        left = {_COMPUTE: 1 / (1 + lost), **{i: own for i, (_, own) in kept.items()}}
        return [speed * left.get(i, 1.0) for i, speed in enumerate(speeds)]

    def _fill(self, counts: Sequence[int]) -> Sequence[float]:
        speeds = [0.0] * len(counts)
        rising = {i for i, count in enumerate(counts) if count}
        rooms = [room.among(counts) for room in self._rooms]
        while rising:
            left = [_left(room, counts, speeds, {i: self._steps[i] for i in rising}) for room in rooms]
            full = min(range(len(rooms)), key=left.__getitem__)
            for i in rising:
                speeds[i] += left[full] * self._steps[i]
            rising -= {i for i in rising if rooms[full].parts[i]}
        return [min(speed, 1.0) if count else 1.0 for speed, count in zip(speeds, counts, strict=True)]


def _left(room: _SharedResource, counts: Sequence[int], speeds: Sequence[float], steps: Mapping[int, float]) -> float:
    """Return how far speeds can rise until ``room`` is used up. Args: steps: Link number -> its rise, if it rises."""
    used = sum(count * part * speed for count, part, speed in zip(counts, room.parts, speeds, strict=True))
    taken = sum(counts[i] * room.parts[i] * step for i, step in steps.items())
    return max(1.0 - used, 0.0) / taken if taken else float("inf")
