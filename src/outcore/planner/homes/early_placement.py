"""Which units may be updated inside backward: as many as find second homes in the room that a placement left."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from outcore.spec.budget import Limits, can_be_early, tier_bytes
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Pool


def with_early_updates(model: ModelSpec, plan: Plan, limits: Limits) -> Plan:
    """Let units be updated early: all that can be if there is room, else as many as there is room for, spread evenly.

    The run finds out for how many of them backward has time (``order.attempts``). They are spread because forward waits
    for each of the other units: these should come one at a time.

    Args:
        model: Units in the plan's order.
        plan: A plan with promised ``accumulation_steps`` that keeps to the limits.
        limits: The most that the new plan may take on each tier.

    Returns:
        The plan with ``early`` set where host memory, and the disk for states there, have room for second homes.
    """
    able = [i for i, pair in enumerate(zip(model.units, plan.units, strict=True)) if can_be_early(*pair)]

    def spread(count: int) -> Plan:
        return _with_early(model, plan, (able[(2 * k + 1) * len(able) // (2 * count)] for k in range(count)))

    most = bisect.bisect_left(range(1, len(able) + 1), 1, key=lambda count: not _fits(spread(count), limits))
    early = spread(most)
    roomier = (_with_more_slots(model, early, more) for more in (2, 1))
    return next((plan for plan in roomier if _fits(plan, limits)), early)


def _with_early(model: ModelSpec, plan: Plan, indices: Iterable[int]) -> Plan:
    chosen = set(indices)
    units = tuple(dataclasses.replace(u, early=u.early or i in chosen) for i, u in enumerate(plan.units))
    new = dataclasses.replace(plan, units=units)
    return dataclasses.replace(new, tier_bytes=dict(tier_bytes(model, new).items()))


def _with_more_slots(model: ModelSpec, plan: Plan, more: int) -> Plan:
    """Add slots for states from disk: attempts that are skipped hold a slot too, and give it back out of order.

    In ``benchmarks/overlap.py`` a step bound by the disk came to 1.17 of its floor with three slots, 1.11 with four and
    1.09 with five.
    """
    num_units = sum(unit.early and unit.states == "disk" for unit in plan.units)
    pools = tuple(
        dataclasses.replace(pool, num_slots=min(pool.num_slots + more, num_units))
        if _is_short(pool, num_units)
        else pool
        for pool in plan.pools
    )
    new = dataclasses.replace(plan, pools=pools)
    return dataclasses.replace(new, tier_bytes=dict(tier_bytes(model, new).items()))


def _is_short(pool: Pool, num_units: int) -> bool:
    return (pool.tier, pool.kind) == ("host", "states") and 2 < pool.num_slots < num_units


def _fits(plan: Plan, limits: Limits) -> bool:
    host, disk = plan.tier_bytes["host"], plan.tier_bytes["disk"]
    return host <= limits.host_bytes and disk <= (limits.disk_bytes or 0)
