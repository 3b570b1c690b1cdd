"""How the bytes of a unit lie: its states behind one another, and what a staging slot takes."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.spec.model import ModelSpec, Precision, UnitSpec
from outcore.spec.plan import UnitPlan

SCRATCH_BYTES = 16 * 2**20
"""Device memory in which an update there holds blocks of gradients, upcast and scaled."""


def has_master(unit: UnitPlan, precision: Precision) -> bool:
    """Whether the unit keeps master weights among its states.

    It needs none where the update can work on the weights themselves: same dtype, and both on the device or both on
    the host.
    """
    return precision == "bf16" or unit.states != unit.weights or unit.states == "disk"


def states_of(unit: UnitPlan, model: ModelSpec) -> tuple[str, ...]:
    """Names of the unit's states in the order in which they lie behind one another, ``update_bytes`` each."""
    return (("master",) if has_master(unit, model.precision) else ()) + model.state_names


class Staging(NamedTuple):
    """Byte ranges of a staging slot: what an update on the device of states from host memory takes along."""

    states: tuple[int, int]
    gradients: tuple[int, int]
    """Empty where gradients live on the device."""
    weights: tuple[int, int]
    scratch: tuple[int, int]


def staging(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Staging:
    """Lay out a staging slot for a unit."""
    sizes = (
        spec.update_bytes * len(states_of(unit, model)),
        spec.update_bytes if unit.gradients == "host" else 0,
        spec.trainable_bytes,
        min(SCRATCH_BYTES, spec.update_bytes),
    )
    starts = accumulate((align_up(size, PAGE_BYTES) for size in sizes), initial=0)
    return Staging(*((start, start + size) for start, size in zip(starts, sizes, strict=False)))
