"""Whether a plan can be obeyed, and what it leaves of the device.

[Note: plain plans] A plan is plain if all units rest on the device, the update takes gradients in the dtype in which
autograd makes them, and nothing is promised about the loop. Then nothing has to move or to change its form. Gradients
are autograd's own tensors, of as many bytes as the plan reserves for them, and the update takes them from ``p.grad``.
"""

from __future__ import annotations

import dataclasses

from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.planner.homes.pools import pools_for
from outcore.spec.budget import Limits, can_be_early, tier_bytes
from outcore.spec.layout import has_master
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.plan_table import infeasible_table


def check_plan(
    model: ModelSpec, plan: Plan, limits: Limits | None = None, *, activation_reserve_bytes: int = 0
) -> None:
    """Refuse a plan that cannot be obeyed.

    Args:
        model: The model to train.
        plan: A plan from a file or from a user.
        limits: If given, the plan must keep to them.
        activation_reserve_bytes: Device bytes to leave for activations and workspace.

    Raises:
        ConfigError: The plan was made for another model or precision, contradicts itself, or lacks a large enough pool.
        PlanInfeasibleError: The plan takes more than the limits.
    """
    if plan.precision != model.precision:
        raise ConfigError(
            f"plan: expected precision {model.precision}, but it was made for {plan.precision}; make it again, or pass "
            f"precision='{plan.precision}'"
        )
    _check_names(model, plan)
    _check_pieces(model, plan)
    _check_early(model, plan)
    _check_plain(model, plan)
    _check_partition(model, plan)
    _check_pools(model, plan)
    if limits is not None:
        _check_limits(model, plan, limits, activation_reserve_bytes)


def _check_names(model: ModelSpec, plan: Plan) -> None:
    expected, got = [u.name for u in model.units], [u.name for u in plan.units]
    if expected == got:
        return
    missing = next((n for n in expected if n not in set(got)), None)
    unknown = next((n for n in got if n not in set(expected)), None)
    if missing is None and unknown is None:
        what = "the same units in another order"
    else:
        named = {"missing": missing, "unknown": unknown}
        what = " and ".join(f"{how} unit '{name}'" for how, name in named.items() if name is not None)
    raise ConfigError(
        f"plan: expected the {len(expected)} units of this model in module order, but got {what}; make the plan again "
        "for this model with the same units="
    )


def _check_pieces(model: ModelSpec, plan: Plan) -> None:
    expected, got = model.micro_batches_in_unit, plan.micro_batches_in_unit
    if expected != got:
        raise ConfigError(
            f"plan: expected {expected} for micro_batches_in_unit, as was asked for, but it was made for {got}; pass "
            f"micro_batches_in_unit={got} (--unit-micro-batches {got} in the command), or make the plan again"
        )


def _check_early(model: ModelSpec, plan: Plan) -> None:
    for spec, unit in zip(model.units, plan.units, strict=True):
        if unit.early and plan.accumulation_steps is None:
            raise ConfigError(
                f"plan, unit '{unit.name}': early: expected accumulation_steps in the plan, since an early update "
                "must know which gradient is the last; set it, or set early to false"
            )
        if unit.early and not can_be_early(spec, unit):
            raise ConfigError(
                f"plan, unit '{unit.name}': early: expected one rank, and weights in host memory that are trained as a "
                "whole, since the old and the new ones change places, but there are more ranks, or some weights are "
                "frozen; set early to false"
            )


def _check_plain(model: ModelSpec, plan: Plan) -> None:
    if plan.plain and not (plan.accumulation_steps is None and can_be_plain(model, plan)):
        raise ConfigError(
            "plan: plain: expected all homes of all units on the device, gradients updated in the dtype of their "
            "weights, and no accumulation_steps, but that is not so; set plain to false"
        )


def _check_partition(model: ModelSpec, plan: Plan) -> None:
    for spec, unit in zip(model.units, plan.units, strict=True):
        if unit.partition == "node" and spec.num_ranks % spec.ranks_per_node:
            raise ConfigError(
                f"plan, unit '{unit.name}': partition 'node': expected as many ranks on each machine, but there are "
                f"{spec.num_ranks} with {spec.ranks_per_node} on each; set partition to 'world' or 'replicate'"
            )


def _check_pools(model: ModelSpec, plan: Plan) -> None:
    for need in () if plan.plain else pools_for(model, plan.units):
        sizes = [p.slot_bytes for p in plan.pools if (p.tier, p.kind) == (need.tier, need.kind)]
        if max(sizes, default=-1) < need.slot_bytes:
            found = f"the largest has {max(sizes)}" if sizes else "there is none"
            raise ConfigError(
                f"plan: expected a pool of '{need.kind}' slots on {need.tier} of at least {need.slot_bytes} bytes "
                f"({format_bytes(need.slot_bytes)}), but {found}; add one to the plan's pools"
            )


def _check_limits(model: ModelSpec, plan: Plan, limits: Limits, activation_reserve_bytes: int) -> None:
    need = tier_bytes(model, plan)
    need["device"] += activation_reserve_bytes
    if any(need[tier] > most for tier, most in limits.by_tier.items()):
        raise PlanInfeasibleError(infeasible_table(model, plan, limits, need, given=True), dict(need.items()))


def with_room(model: ModelSpec, plan: Plan, limits: Limits, *, clipping: bool) -> Plan:
    """Make a plan plain if it can be, and give what it leaves of the device to activations that are kept.

    Args:
        model: Units in the plan's order.
        plan: A plan that keeps to the limits.
        limits: The most that a plan may take on each tier.
        clipping: Whether the loop may ask for norms; False is a promise that it does not.
    """
    if clipping and plan.accumulation_steps is None and can_be_plain(model, plan):
        made = tuple(pool for pool in plan.pools if pool.kind == "temporary")
        plan = dataclasses.replace(plan, plain=True, pools=made)  # the others serve what moves or changes its form
    left = room_bytes(model, plan, limits) if any(unit.policy != "keep" for unit in plan.units) else 0
    return dataclasses.replace(plan, kept_bytes=left, tier_bytes=dict(tier_bytes(model, plan).items()))


def room_bytes(model: ModelSpec, plan: Plan, limits: Limits) -> int:
    """Return the device bytes that a plan does not take."""
    return max(0, limits.device_bytes - tier_bytes(model, plan)["device"])


def can_be_plain(model: ModelSpec, plan: Plan) -> bool:
    """Return whether a plan can be plain: see [Note: plain plans]."""
    is_one_sum = model.micro_batches_in_unit == 1  # per pass; autograd itself would sum pieces differently
    trained = [p for unit in model.units for p in unit.trainable]
    one_form = is_one_sum and all(p.dtype == p.update_dtype and not p.is_coded for p in trained)
    alone = all(unit.num_ranks == 1 for unit in model.units)
    return alone and plan.rests_on_device and one_form and not any(has_master(u, model.precision) for u in plan.units)
