"""Which units in host memory the device updates: a share of them, spread evenly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outcore.core.errors import ConfigError
from outcore.spec.plan import UnitPlan


def share_updates(units: Sequence[UnitPlan], fraction: float) -> list[UnitPlan]:
    """Let the device update a fraction of the units whose states live in host memory.

    Every n-th one, so that CPU and device work side by side all the time (Deep Optimizer States, arXiv:2410.21316,
    section 4.2, where the fraction is at most one half).

    Args:
        units: Of a plan, in module order. Those that are updated early, and those with weights or gradients on disk,
            stay with the CPU and are not counted.
        fraction: 0..1; rounded to whole units, half a unit to the device.

    Raises:
        ConfigError: Not a fraction.
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(f"share of updates: expected a fraction from 0 to 1, but got {fraction!r}")
    able = [i for i, u in enumerate(units) if _can_be_staged(u)]
    wanted = int(fraction * len(able) + 0.5)
    chosen = {able[(2 * k + 1) * len(able) // (2 * wanted)] for k in range(wanted)}
    return [dataclasses.replace(u, update="device" if i in chosen else "host") for i, u in enumerate(units)]


def _can_be_staged(unit: UnitPlan) -> bool:
    return unit.states == "host" and "disk" not in (unit.weights, unit.gradients) and not unit.early
