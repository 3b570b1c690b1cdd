"""Every buffer that a plan takes, on every tier: the one list that the planner adds up and the runtime allocates from.

Predicted bytes are exact because both sides read this list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.spec.model import ModelSpec, Precision, UnitSpec
from outcore.spec.plan import Plan, Tier, UnitPlan

SCRATCH_BYTES = 16 * 2**20
"""Device memory in which an update there holds blocks of gradients, upcast and scaled."""

ReservationKind = Literal["weights", "gradients", "states", "next_weights", "next_states", "buffers", "slot"]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One buffer."""

    tier: Tier
    kind: ReservationKind
    owner: str
    """Unit name; for a slot ``"<pool kind>/<pool index>/<slot index>"``."""
    nbytes: int


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


def can_be_early(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Whether the unit's update can run inside backward: states off the device, and what changes places is whole."""
    if not spec.trainable_bytes or unit.states == "device":
        return False
    return unit.weights != "host" or spec.trainable_bytes == spec.weight_bytes


def reservations(model: ModelSpec, plan: Plan) -> Iterator[Reservation]:
    """List every buffer of a plan. Empty ones are left out.

    Args:
        model: Units in the plan's order.
        plan: Pools are taken as they stand; whether they suffice is ``check_plan``'s question.
    """
    for spec, unit in zip(model.units, plan.units, strict=True):
        yield from (r for r in _unit(spec, unit, model) if r.nbytes)
    for i, pool in enumerate(plan.pools):
        for slot in range(pool.num_slots):
            yield Reservation(tier=pool.tier, kind="slot", owner=f"{pool.kind}/{i}/{slot}", nbytes=pool.slot_bytes)


def _unit(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Iterator[Reservation]:
    def item(tier: Tier, kind: ReservationKind, nbytes: int) -> Reservation:
        return Reservation(tier=tier, kind=kind, owner=spec.name, nbytes=nbytes)

    yield item(unit.weights, "weights", spec.weight_bytes)
    yield item(unit.gradients, "gradients", spec.update_bytes)
    yield item(unit.states, "states", spec.update_bytes * len(states_of(unit, model)))
    if unit.early:
        yield item("host", "next_weights", spec.trainable_bytes)
        yield item(unit.states, "next_states", spec.update_bytes * len(states_of(unit, model)))
    yield item("device", "buffers", spec.buffer_bytes)


def tier_bytes(model: ModelSpec, plan: Plan) -> dict[Tier, int]:
    """Bytes that the plan takes on each tier."""
    total: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
    for reservation in reservations(model, plan):
        total[reservation.tier] += reservation.nbytes
    return total
