"""Every buffer that a plan takes, on every tier: the one list that the planner adds up and the engine allocates from.

Predicted bytes are exact because both sides read this list. Exceptions are workspace and the temporary tensors of
updates (``is_temporary``): they come from torch's allocators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from outcore.spec.cut import weights_home
from outcore.spec.layout import states_bytes
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, Tier, UnitPlan

ReservationKind = Literal[
    "weights", "gradients", "states", "next_weights", "next_states", "activations", "buffers", "slot", "workspace"
]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One buffer."""

    tier: Tier
    kind: ReservationKind
    owner: str
    """The unit's name; for a slot ``"<pool kind>/<pool index>/<slot index>"``."""
    nbytes: int
    num_sharers: int = 1
    """The number of ranks that share one buffer, which has as many times ``nbytes``."""


def is_temporary(reservation: Reservation) -> bool:
    """Return whether a reservation is for temporary tensors of updates."""
    return reservation.kind == "slot" and reservation.owner.startswith("temporary/")


def can_be_early(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Return whether the unit's update can run inside backward: states are off the device, host weights wholly trained.

    Several ranks cannot: timing decides which early updates are overtaken, so they would meet in different orders.
    """
    if not spec.trainable_bytes or unit.states == "device" or spec.num_ranks > 1:
        return False
    return unit.weights != "host" or spec.trainable_bytes == spec.weight_bytes


def reservations(model: ModelSpec, plan: Plan) -> Iterator[Reservation]:
    """Yield every buffer of a plan. Empty ones are left out.

    Args:
        model: Units in the plan's order.
        plan: A plan, whose pools are taken as they are; ``check_plan`` checks whether they suffice.
    """
    for spec, unit in zip(model.units, plan.units, strict=True):
        yield from (r for r in _unit(spec, unit, model) if r.nbytes)
    for i, pool in enumerate(plan.pools):
        for slot in range(pool.num_slots):
            yield Reservation(tier=pool.tier, kind="slot", owner=f"{pool.kind}/{i}/{slot}", nbytes=pool.slot_bytes)
    if plan.workspace_bytes:
        yield Reservation(tier="device", kind="workspace", owner="", nbytes=plan.workspace_bytes)


def _unit(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Iterator[Reservation]:
    def item(tier: Tier, kind: ReservationKind, nbytes: int) -> Reservation:
        return Reservation(tier=tier, kind=kind, owner=spec.name, nbytes=nbytes)

    weights = weights_home(spec, unit)
    sharers = weights.num_sharers if weights.is_one_copy else 1
    yield replace(item(unit.weights, "weights", weights.taken_bytes), num_sharers=sharers)
    yield item(unit.gradients, "gradients", spec.update_bytes)
    yield item(unit.states, "states", states_bytes(spec, unit, model))
    if unit.early:
        yield item("host", "next_weights", spec.trainable_bytes)
        yield item(unit.states, "next_states", states_bytes(spec, unit, model))
    yield item(unit.activations, "activations", model.micro_batches_in_unit * unit.saved_bytes)
    yield item("device", "buffers", spec.buffer_bytes)


def tier_bytes(model: ModelSpec, plan: Plan) -> dict[Tier, int]:
    """Return the bytes that the plan takes on each tier."""
    total: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
    for reservation in reservations(model, plan):
        total[reservation.tier] += reservation.nbytes
    return total
