"""What would help, and how step time depends on memory and batch: the same question asked of changed settings.

Changed settings are estimated from the plan that was found, since what is best for one is often nearly best for the
next, and from fillings where that plan does not fit or leaves much room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from outcore.core.quantities import format_bytes
from outcore.planner.search.evaluations import Simulated
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import Estimate, Found, estimate, improve
from outcore.planner.search.setting import Setting

_LEAST_GAIN = 1.01
_MEMORY = (0.5, 0.625, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
_MOST_BATCHES = 8


@dataclass(frozen=True)
class SettingChange:
    """A change of the setting, and what it gains."""

    name: str
    effort: float
    """1: an option of the run; 2: a part that is added; 3: one that is replaced; 4: another device."""
    step_s: float
    gain: float
    """Tokens per second, divided by those of the setting as it is."""

    @property
    def worth(self) -> float:
        """Key by which changes are ordered, largest first."""
        return math.log(self.gain) / self.effort


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


class _TriedChange(NamedTuple):
    """A change whose gain is not known yet."""

    name: str
    effort: float
    setting: Setting
    """The changed setting."""
    known: Candidate
    """A candidate that is good for the setting as it is."""
    same_s: float
    """Seconds of a step with the change at which tokens per second are the same as without it."""

    def change(self, reached: Estimate) -> SettingChange:
        """Return the change with its gain."""
        return SettingChange(self.name, self.effort, reached.step_s, self.same_s / reached.step_s)


def best_changes(
    setting: Setting, found: Found, *, most: int = 3, over: Callable[..., Iterable[Any]] = map
) -> tuple[SettingChange, ...]:
    """Return the changes with the largest gain for their effort.

    Args:
        setting: The setting as it is.
        found: The plan that was found for it.
        most: The most changes to return.
        over: Works like ``map``, and may use another process. All items but the first can be pickled. The first has
            another batch size, whose profile is not known yet.
    """
    step_s, known = found.simulation.step_s, found.candidate
    tried = [_TriedChange(*each, known, step_s * each[-1].tokens / setting.tokens) for each in _changed(setting)]
    reached = list(over(_reached, tried))
    changes = {i: tried[i].change(estimated) for i, estimated in enumerate(reached) if estimated is not None}
    best = sorted(sorted(changes, key=lambda i: -changes[i].worth)[:most])  # what cannot be pickled stays first
    improved = over(_improved, [(tried[i], reached[i]) for i in best])
    chosen = [tried[i].change(estimated) for i, estimated in zip(best, improved, strict=True)]
    return tuple(sorted(chosen, key=lambda change: -change.worth))


def _reached(tried: _TriedChange) -> Estimate | None:
    """Return the estimated step with the change, or None if it gains next to nothing."""
    reached = estimate(tried.setting.job(), [tried.known], enough_s=tried.same_s / _LEAST_GAIN)
    if reached is None or not reached.step_s or tried.same_s / reached.step_s < _LEAST_GAIN:
        return None
    return reached


def _improved(pair: tuple[_TriedChange, Estimate]) -> Estimate:
    tried, reached = pair
    return improve(tried.setting.job(), reached)


def _changed(setting: Setting) -> Iterator[tuple[str, float, Setting]]:
    """Yield of every change its name, its effort, and the changed setting."""
    batch = 2 * setting.batch_size
    yield f"batches of {batch} sequences", 1, replace(setting, batch_size=batch)
    setting = _with_profile(setting)
    hardware, limits = setting.hardware, setting.limits
    disk, bus, host, device = hardware.disk, hardware.bus, hardware.host, hardware.device
    steps = 2 * setting.micro_batches
    yield f"{steps} micro-batches per step", 1, replace(setting, micro_batches=steps)
    if setting.clipping:
        yield "no clipping, so that updates run inside backward", 1, replace(setting, clipping=False)
    if disk is not None:
        faster = _times(disk, 2, "read_bytes_per_s", "write_bytes_per_s", "size_bytes")
        more = {} if limits.disk_bytes is None else {"disk_bytes": 2 * limits.disk_bytes}
        with_drive = replace(setting.with_limits(**more), hardware=replace(hardware, disk=faster))
        yield "twice as many drives", 2, with_drive
    host_bytes, device_bytes = 2 * limits.host_bytes, 2 * limits.device_bytes
    on_node = " of every node" if setting.ranks.nodes > 1 else ""
    host_text = f"{format_bytes(setting.ranks.per_node * host_bytes)} of host memory{on_node}"
    yield host_text, 2, setting.with_limits(host_bytes=host_bytes)
    faster_bus = _times(bus, 2, "h2d_bytes_per_s", "d2h_bytes_per_s")
    yield "a bus that is twice as fast", 3, replace(setting, hardware=replace(hardware, bus=faster_bus))
    faster_host = _times(host, 2, "bytes_per_s", "update_parameters_per_s")
    faster_host = replace(faster_host, visit_s=host.visit_s / 2, resting_visit_s=host.resting_visit_s / 2)
    launching = replace(device, kernel_s=device.kernel_s / 2) if device.runs_ahead else device
    faster_host_alone = replace(hardware, host=faster_host, device=launching)
    yield "a host that is twice as fast", 3, replace(setting, hardware=faster_host_alone)
    yield f"{format_bytes(device_bytes)} of device memory", 4, setting.with_limits(device_bytes=device_bytes)
    updates = ("update_parameters_per_s", "plain_update_parameters_per_s")
    rates = ("bf16_flops", "fp32_flops", "attention_flops", "bytes_per_s", *updates)
    faster_device = _times(device, 2, *rates)
    yield "a device that computes twice as fast", 4, replace(setting, hardware=replace(hardware, device=faster_device))


def _with_profile(setting: Setting) -> Setting:
    """Return the setting with the profile of its own batches alone, so that it can be pickled."""
    return replace(setting, profile_of={setting.batch_size: setting.profile}.__getitem__)


def _times(part: Any, factor: float, *fields: str) -> Any:
    return replace(part, **{field: factor * getattr(part, field) for field in fields})


def curves(setting: Setting, found: Found, *, over: Callable[..., Iterable[Any]] = map) -> Curves:
    """Return step times over memory and batches. Args: as for ``best_changes``."""
    today, same_batch = Estimate(found.simulation.step_s, found.candidate), _with_profile(setting)
    over_memory = ((partial(_over_memory, field), same_batch) for field in ("device_bytes", "host_bytes"))
    batch, device, host = over(_points, [(_over_batch, setting, today), *((*each, today) for each in over_memory)])
    return Curves(device, host, batch)


def _points(
    asked: tuple[Callable[[Setting, Estimate], tuple[CurvePoint, ...]], Setting, Estimate],
) -> tuple[CurvePoint, ...]:
    curve, setting, today = asked
    return curve(setting, today)


def _over_memory(field: str, setting: Setting, today: Estimate) -> tuple[CurvePoint, ...]:
    """Return step times for different budgets. Args: field: Of ``Limits``. today: What was found for the setting."""
    sizes = [int(factor * getattr(setting.limits, field)) for factor in _MEMORY]
    now = getattr(setting.limits, field)
    return _curve(setting, today, sizes, now, lambda n: setting.with_limits(**{field: n}), is_memory=True)


def _over_batch(setting: Setting, today: Estimate) -> tuple[CurvePoint, ...]:
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
    setting: Setting,
    today: Estimate,
    values: Iterable[int],
    now: int,
    changed: Callable[[int], Setting],
    *,
    is_memory: bool,
) -> tuple[CurvePoint, ...]:
    """Return points from the smallest value up, so that a candidate that fits in less is known where there is more."""
    points: list[CurvePoint] = []
    known: Sequence[Candidate] = [today.candidate]
    simulated = Simulated() if is_memory else None
    for value in sorted(values):
        if value == now:
            points.append(CurvePoint(value, today.step_s, setting.tokens, is_today=True))
            continue
        other = changed(value)
        reached = estimate(other.job(), known, simulated)
        if reached is not None:
            known = list(dict.fromkeys([today.candidate, reached.candidate]))
        points.append(CurvePoint(value, None if reached is None else reached.step_s, other.tokens, is_today=False))
    return tuple(points)
