"""Arithmetic of measurements: quartiles, a line through sizes, and what links that slow each other down share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SLOWED = 0.8
"""Below this part of its speed an operation counts as slowed down. Two that seem to share something by mistake would
slow down all steps in which a third one runs; on a busy machine timings of equal work differ by 10%."""
_SWEEPS = 300


class Line(NamedTuple):
    """Seconds as bytes over a rate, and what every operation takes besides."""

    per_s: float
    latency_s: float


def line(points: Mapping[int, float]) -> Line:
    """Fit work against time by the smallest and the largest size.

    Args:
        points: Amount of work -> seconds that it takes. Two sizes or more.
    """
    (least, least_s), *_, (most, most_s) = sorted(points.items())
    if most_s <= least_s:  # noise: the large one alone is believed
        return Line(most / most_s, 0.0)
    per_s = (most - least) / (most_s - least_s)
    latency_s = least_s - least / per_s
    return Line(per_s, latency_s) if latency_s > 0 else Line(most / most_s, 0.0)


def usual_s(seconds: Sequence[float]) -> float:
    """The lower quartile: other programs only make work slower, now and then, and a median would follow them."""
    return sorted(seconds)[len(seconds) // 4]


def parts(speeds: Mapping[tuple[str, str], tuple[float, ...]]) -> dict[str, float]:
    """How much each one takes of something that all share, such as host memory and the cores.

    Two that slow each other down use all of it: their parts times their speeds add up to 1. Those that do not slow each
    other down may take 1 together at most. These equations are solved as well as they can be, in least squares, by
    going round the unknowns. What nothing slows down and what slows nothing down takes no part.

    Args:
        speeds: Two names -> what is left of the speed of either while both run.
    """
    names = sorted({name for pair in speeds for name in pair})
    slowed = {name for pair, left in speeds.items() if min(left) < _SLOWED for name in pair}
    found = {name: 0.5 if name in slowed else 0.0 for name in names}
    for _ in range(_SWEEPS):
        for name in names:
            found[name] = _best(name, found, speeds)
    return found


def _best(name: str, found: Mapping[str, float], speeds: Mapping[tuple[str, str], tuple[float, ...]]) -> float:
    """The part of one, with all others as they are."""
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
