"""Curves of step time over memory and batch: the same question asked of changed settings.

Changed settings are searched with a part of the simulations, and from the plan that was found as well, since what is
best for one is often nearly best for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.planner.search.evaluations import Simulated
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import Found, search

_EFFORT = 0.25
"""The part of the simulations of a search that a changed setting gets."""
_MEMORY = (0.5, 0.625, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_MOST_BATCHES = 8


class CurvePoint(NamedTuple):
    """A point of a curve: a setting and its estimated step time."""

    value: float
    step_s: float | None
    """Seconds of a step; None if nothing fits."""
    tokens: int
    """Tokens of a step."""
    is_today: bool


class Curves(NamedTuple):
    """Step times, each over one thing that may change."""

    device_memory: tuple[CurvePoint, ...]
    host_memory: tuple[CurvePoint, ...]
    batch: tuple[CurvePoint, ...]
    """Over sequences per micro-batch."""


def curves(setting: PlanQuestion, found: Found) -> Curves:
    """Return step times over memory and batches. Args: found: The plan that was found for the setting as it is."""
    return Curves(
        _over_memory("device_bytes", setting, found),
        _over_memory("host_bytes", setting, found),
        _over_batch(setting, found),
    )


def estimated(setting: PlanQuestion, known: Sequence[Candidate], simulated: Simulated | None = None) -> Found | None:
    """Search a changed setting, with a part of the simulations; None if nothing fits, or nothing is known of it.

    Args:
        setting: The setting.
        known: Candidates that are good for settings like it.
        simulated: See ``search``.
    """
    with suppress(ConfigError, PlanInfeasibleError):  # another batch may be one that cannot be followed
        return search(setting, simulated, known=known, effort=_EFFORT)
    return None


def _over_memory(field: str, setting: PlanQuestion, today: Found) -> tuple[CurvePoint, ...]:
    """Return step times for different budgets. Args: field: Of ``Limits``. today: What was found for the setting."""
    sizes = [int(factor * getattr(setting.limits, field)) for factor in _MEMORY]
    now = getattr(setting.limits, field)
    return _curve(setting, today, sizes, now, lambda n: setting.with_limits(**{field: n}), is_memory=True)


def _over_batch(setting: PlanQuestion, today: Found) -> tuple[CurvePoint, ...]:
    """Return step times for different sequences per micro-batch, up to the first size that does not fit.

    Args:
        setting: The setting as it is.
        today: What was found for it.
    """
    doubled = [2**i for i in range(_MOST_BATCHES)]
    sizes = sorted({*doubled, setting.batch_size, 2 * setting.batch_size, 4 * setting.batch_size})
    near = [size for size in sizes if setting.batch_size / 16 <= size <= 16 * setting.batch_size]
    points = _curve(setting, today, near, setting.batch_size, lambda n: replace(setting, batch_size=n), is_memory=False)
    fitting = [point for point in points if point.step_s is not None]
    return (*fitting, *[point for point in points if point.step_s is None][:1])


def _curve(
    setting: PlanQuestion,
    today: Found,
    values: Iterable[int],
    now: int,
    changed: Callable[[int], PlanQuestion],
    *,
    is_memory: bool,
) -> tuple[CurvePoint, ...]:
    """Evaluate points in increasing order: each search knows the plan that was best for less."""
    points: list[CurvePoint] = []
    known: Sequence[Candidate] = [today.candidate]
    simulated: Simulated | None = {} if is_memory else None
    for value in sorted(values):
        if value == now:
            points.append(CurvePoint(value, today.simulation.step_s, setting.tokens, is_today=True))
            continue
        other = changed(value)
        reached = estimated(other, known, simulated)
        if reached is not None:
            known = list(dict.fromkeys([today.candidate, reached.candidate]))
        points.append(
            CurvePoint(value, None if reached is None else reached.simulation.step_s, other.tokens, is_today=False)
        )
    return tuple(points)
