"""How the bytes of a unit lie: its states behind one another, and what a staging slot takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.spec.model import ModelSpec, Part, Precision, UnitSpec
from outcore.spec.plan import UnitPlan

SCRATCH_BYTES = 16 * 2**20
"""Device memory in which an update there holds blocks of gradients, upcast and scaled."""


def has_master(unit: UnitPlan, precision: Precision) -> bool:
    """Whether the unit keeps master weights among its states.

    It needs none where the update can work on the weights themselves: same dtype, and both on the device or both on
    the host.
    """
    return precision == "bf16" or unit.states != unit.weights or unit.states == "disk"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of all trainable parameters of a unit. Whoever reads, writes or counts states asks it."""

    name: str
    """Torch's, or ``master``."""
    start: int
    """Of its first byte in the states home."""
    nbytes: int
    """With padding, as all that may rest on disk."""
    parts: tuple[Part, ...]
    """By trainable parameter, counted from ``start``."""

    @property
    def stop(self) -> int:
        """End of its bytes in the states home."""
        return self.start + self.nbytes


def lay_out_states(spec: UnitSpec, names: Iterable[str]) -> dict[str, StateSpec]:
    """The states of a unit, by name, in the order in which they lie behind one another."""
    states, start = dict[str, StateSpec](), 0
    for name in names:
        states[name] = StateSpec(name, start, spec.update_bytes, spec.update_parts)
        start = states[name].stop
    return states


def states_of(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> dict[str, StateSpec]:
    """The states that a unit has under a plan."""
    return lay_out_states(spec, (("master",) if has_master(unit, model.precision) else ()) + model.state_names)


def states_bytes(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> int:
    """Size of the unit's states home."""
    return sum(state.nbytes for state in states_of(spec, unit, model).values())


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
        states_bytes(spec, unit, model),
        spec.update_bytes if unit.gradients == "host" else 0,
        spec.trainable_bytes,
        min(SCRATCH_BYTES, spec.update_bytes),
    )
    starts = accumulate((align_up(size, PAGE_BYTES) for size in sizes), initial=0)
    return Staging(*((start, start + size) for start, size in zip(starts, sizes, strict=False)))
