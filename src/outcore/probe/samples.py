"""Pure arithmetic of measurements: a line through sizes, and how much links take of what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_SLOWED = 0.8
"""Below this part of its speed an operation counts as slowed down.

If two operations were wrongly taken to share something, every step that runs a third one too would be predicted too
slow. On a busy machine, timings of equal work differ by 10%.
"""
_SWEEPS = 300


class FittedLine(NamedTuple):
    """A straight line: an operation takes its bytes over a rate, plus a latency."""

    per_s: float
    latency_s: float


def line(points: Mapping[int, float]) -> FittedLine:
    """Fit work against time by the smallest and the largest size.

    Args:
        points: Amount of work -> its seconds, for two amounts or more.
    """
    (least, least_s), *_, (most, most_s) = sorted(points.items())
    if most_s <= least_s:  # noise: use the large one alone
        return FittedLine(most / most_s, 0.0)
    per_s = (most - least) / (most_s - least_s)
    latency_s = least_s - least / per_s
    return FittedLine(per_s, latency_s) if latency_s > 0 else FittedLine(most / most_s, 0.0)


def parts(speeds: Mapping[tuple[str, str], tuple[float, ...]]) -> dict[str, float]:
    """Return how much each operation takes of something that all share, such as host memory and the cores.

    Two operations that slow each other down use all of it: their parts, each times its remaining speed, add up to 1.
    Two that do not slow each other down take at most 1 together. These conditions are met as well as possible in the
    sense of least squares, by solving for one unknown after another, round and round. An operation that is in no pair
    with a slowdown takes no part.

    Args:
        speeds: Two names -> the part of its speed that remains to either while both run.
    """
    names = sorted({name for pair in speeds for name in pair})
    slowed = {name for pair, left in speeds.items() if min(left) < _SLOWED for name in pair}
    found = {name: 0.5 if name in slowed else 0.0 for name in names}
    for _ in range(_SWEEPS):
        for name in names:
            found[name] = _best(name, found, speeds)
    return found


def _best(name: str, found: Mapping[str, float], speeds: Mapping[tuple[str, str], tuple[float, ...]]) -> float:
    """Return the best part of one operation, given those of all others."""
    above, below = 0.0, 0.0
    for (one, other), (one_speed, other_speed) in speeds.items():
        if name not in (one, other):
            continue
        own, speed, rest = (
            (one_speed, other_speed, found[other]) if name == one else (other_speed, one_speed, found[one])
        )
        own, speed = min(own, 1.0), min(speed, 1.0)
        is_slowed = min(own, speed) < _SLOWED
        if is_slowed or found[name] * own + rest * speed > 1:
            above += own * (1 - rest * speed)
            below += own * own
    return min(max(above / below, 0.0), 1.0) if below else min(found[name], 1.0)
