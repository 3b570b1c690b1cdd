"""What would help, and how step time depends on memory and batch: the same question asked of changed settings.

Changed settings are searched with a part of the simulations, and from the plan that was found as well, since what is
best for one is often nearly best for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.planner.search.evaluations import Simulated
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import Found, search
from outcore.planner.search.setting import Setting

_LEAST_GAIN = 1.01
_EFFORT = 0.25
"""The part of the simulations of a search that a changed setting gets."""
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


def best_changes(setting: Setting, found: Found, *, most: int = 3) -> tuple[SettingChange, ...]:
    """Return the changes with the largest gain for their effort.

    Args:
        setting: The setting as it is.
        found: The plan that was found for it.
        most: The most changes to return.
    """
    changes = list[SettingChange]()
    for name, effort, changed in _changed(setting):
        reached = _searched(changed, [found.candidate])
        if reached is not None and reached.simulation.step_s:
            same_s = found.simulation.step_s * changed.tokens / setting.tokens  # as many tokens per second as before
            gain = same_s / reached.simulation.step_s
            changes += [SettingChange(name, effort, reached.simulation.step_s, gain)] if gain >= _LEAST_GAIN else []
    return tuple(sorted(changes, key=lambda change: -change.worth)[:most])


def _searched(setting: Setting, known: Sequence[Candidate], simulated: Simulated | None = None) -> Found | None:
    """Search a changed setting, with a part of the simulations; None if nothing fits.

    Args:
        setting: The setting.
        known: Candidates that are good for settings like it.
        simulated: See ``search``.
    """
    with suppress(PlanInfeasibleError):
        return search(setting.job(), simulated, known=known, effort=_EFFORT)
    return None


def _changed(setting: Setting) -> Iterator[tuple[str, float, Setting]]:
    """Yield of every change its name, its effort, and the changed setting."""
    batch = 2 * setting.batch_size
    yield f"batches of {batch} sequences", 1, replace(setting, batch_size=batch)
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


def _times(part: Any, factor: float, *fields: str) -> Any:
    return replace(part, **{field: factor * getattr(part, field) for field in fields})


def curves(setting: Setting, found: Found) -> Curves:
    """Return step times over memory and batches. Args: found: The plan that was found for the setting as it is."""
    return Curves(
        _over_memory("device_bytes", setting, found),
        _over_memory("host_bytes", setting, found),
        _over_batch(setting, found),
    )


def _over_memory(field: str, setting: Setting, today: Found) -> tuple[CurvePoint, ...]:
    """Return step times for different budgets. Args: field: Of ``Limits``. today: What was found for the setting."""
    sizes = [int(factor * getattr(setting.limits, field)) for factor in _MEMORY]
    now = getattr(setting.limits, field)
    return _curve(setting, today, sizes, now, lambda n: setting.with_limits(**{field: n}), is_memory=True)


def _over_batch(setting: Setting, today: Found) -> tuple[CurvePoint, ...]:
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
    today: Found,
    values: Iterable[int],
    now: int,
    changed: Callable[[int], Setting],
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
        reached = _searched(other, known, simulated)
        if reached is not None:
            known = list(dict.fromkeys([today.candidate, reached.candidate]))
        points.append(
            CurvePoint(value, None if reached is None else reached.simulation.step_s, other.tokens, is_today=False)
        )
    return tuple(points)
