"""Which units are updated inside backward: as many as the room that a placement left has second homes for."""

from __future__ import annotations

import dataclasses

from outcore.planning.reservations import can_be_early, tier_bytes
from outcore.spec.budget import Limits
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


def with_early_updates(model: ModelSpec, plan: Plan, limits: Limits) -> Plan:
    """Update units early, the last ones first: their gradients come first, so that most of backward is left to hide in.

    Args:
        model: Units in the plan's order.
        plan: With promised ``accumulation_steps``; keeps to the limits.
        limits: The most that the new plan may take on each tier.

    Returns:
        The same homes, with ``early`` set where host memory, and the disk of states there, have room for second ones.
    """
    taken = tier_bytes(model, plan)
    room = {"host": limits.host_bytes - taken["host"], "disk": (limits.disk_bytes or 0) - taken["disk"]}
    units = list(plan.units)
    for i in reversed(range(len(units))):
        if not can_be_early(model.units[i], units[i]):
            continue
        early = dataclasses.replace(units[i], early=True)
        alone = dataclasses.replace(model, units=(model.units[i],))
        with_it, without = (
            tier_bytes(alone, dataclasses.replace(plan, units=(unit,), pools=())) for unit in (early, units[i])
        )
        more = {"host": with_it["host"] - without["host"], "disk": with_it["disk"] - without["disk"]}
        if more["host"] <= room["host"] and more["disk"] <= room["disk"]:
            units[i] = early
            room = {tier: room[tier] - more[tier] for tier in room}
    new = dataclasses.replace(plan, units=tuple(units))
    return dataclasses.replace(new, tier_bytes=dict(tier_bytes(model, new).items()))
