"""Which units with states in host memory the device updates: a share of them, spread evenly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outcore.planner.timing.rates import Rates
from outcore.spec.plan import UnitPlan


def spread(indices: Sequence[int], fraction: float) -> set[int]:
    """Choose a fraction of some units, spread evenly; half a unit counts as one."""
    wanted = int(fraction * len(indices) + 0.5)
    return {indices[(2 * k + 1) * len(indices) // (2 * wanted)] for k in range(wanted)}


def balanced_share(rates: Rates, *, there: float, back: float) -> float:
    """Return the fraction at which the device and the CPU finish at the same time, if nothing else uses the link.

    With U_c parameters per second on the CPU and U_d through the device, f = U_d / (U_c + U_d), where 1 / U_d is the
    slowest of bringing states, updating and sending them home: max(there / B_h2d, back / B_d2h, 1 / U_g). The model is
    that of Deep Optimizer States (arXiv:2410.21316, section 4) for double-buffered transfers.

    Args:
        rates: Rates of the machine.
        there: Bytes per parameter that go to the device.
        back: Bytes per parameter that come home.
    """

    def seconds(number: float, speeds: str) -> float:
        return number / rates.bytes_per_s.get(speeds, math.inf)

    on_host_s = 1 / rates.parameters_per_s.get("update", math.inf)
    on_device_s = 1 / rates.parameters_per_s.get("device_update", math.inf)
    through_s = max(seconds(there, "h2d"), seconds(back, "d2h"), on_device_s)
    return on_host_s / (on_host_s + through_s) if on_host_s + through_s else 0.0


def can_be_staged(unit: UnitPlan) -> bool:
    """Return whether the device can update a unit."""
    return unit.states == "host" and "disk" not in (unit.weights, unit.gradients) and not unit.early
