from __future__ import annotations

import dataclasses

import pytest

from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.planner.homes.check import check_plan
from outcore.planner.homes.placement import place
from outcore.planner.homes.pools import pools_for
from outcore.spec.budget import Limits

from .models import layered

MIB = 2**20
MODEL = layered(5)
LIMITS = Limits(device_bytes=5 * MIB, host_bytes=20 * MIB, disk_bytes=10**12)
PLAN = place(MODEL, LIMITS)


def without(*names):
    return dataclasses.replace(PLAN, units=tuple(u for u in PLAN.units if u.name not in names))


def test_a_plan_of_our_own_is_obeyed():
    check_plan(MODEL, PLAN)
    check_plan(MODEL, PLAN, LIMITS)


@pytest.mark.parametrize(("model", "plan"), [(1, 4), (4, 1)])
def test_other_pieces_than_it_was_made_for(model, plan):
    cut = dataclasses.replace(MODEL, micro_batches_in_unit=model)
    with pytest.raises(ConfigError, match=f"expected {model} for micro_batches_in_unit.*it was made for {plan}; pass"):
        check_plan(cut, dataclasses.replace(PLAN, micro_batches_in_unit=plan))


def test_one_slot_of_each_kind_suffices():
    assert {p.kind for p in PLAN.pools} >= {"weights", "bucket", "states", "landing"}
    least = dataclasses.replace(PLAN, pools=pools_for(MODEL, PLAN.units))
    check_plan(MODEL, least)
    assert {p.num_slots for p in least.pools} == {1}


@pytest.mark.parametrize(("tier", "kind"), sorted({(p.tier, p.kind) for p in PLAN.pools}))
def test_every_kind_of_pool_is_missed(tier, kind):
    others = tuple(p for p in PLAN.pools if (p.tier, p.kind) != (tier, kind))
    pool = max((p for p in PLAN.pools if p not in others), key=lambda p: p.slot_bytes)
    with pytest.raises(ConfigError, match=f"a pool of '{kind}' slots on {tier} .*, but there is none"):
        check_plan(MODEL, dataclasses.replace(PLAN, pools=others))
    small = dataclasses.replace(pool, slot_bytes=pool.slot_bytes - 4096)
    with pytest.raises(
        ConfigError, match=f"at least {pool.slot_bytes} bytes .*, but the largest has {small.slot_bytes}"
    ):
        check_plan(MODEL, dataclasses.replace(PLAN, pools=(*others, small)))


def test_pools_that_are_not_needed_are_allowed():
    more = dataclasses.replace(PLAN.pools[0], slot_bytes=4096)
    check_plan(MODEL, dataclasses.replace(PLAN, pools=(*PLAN.pools, more)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (without("model.layers.3"), "expected the 6 units of this model .* but got missing unit 'model.layers.3'"),
        (without(""), "missing unit ''"),
        (place(layered(6), LIMITS), "but got unknown unit 'model.layers.5'"),
        (dataclasses.replace(PLAN, units=PLAN.units[::-1]), "the same units in another order"),
        (dataclasses.replace(PLAN, units=()), "missing unit ''"),
        (place(layered(5, precision="fp32"), LIMITS), "expected precision bf16, but it was made for fp32"),
    ],
)
def test_a_plan_for_another_model(plan, message):
    with pytest.raises(ConfigError, match=message):
        check_plan(MODEL, plan)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_limits_hold_for_given_plans_too(tier):
    taken = PLAN.tier_bytes
    assert all(taken.values())
    exact = Limits(device_bytes=taken["device"] + 7, host_bytes=taken["host"], disk_bytes=taken["disk"])
    check_plan(MODEL, PLAN, exact, activation_reserve_bytes=7)
    less = dataclasses.replace(exact, **{f"{tier}_bytes": getattr(exact, f"{tier}_bytes") - 1})
    with pytest.raises(PlanInfeasibleError, match="the plan that was given takes more") as caught:
        check_plan(MODEL, PLAN, less, activation_reserve_bytes=7)
    assert caught.value.required_bytes == {**taken, "device": taken["device"] + 7}


def test_tier_bytes_of_a_given_plan_are_not_believed():
    lie = dataclasses.replace(PLAN, tier_bytes={"device": 0, "host": 0, "disk": 0})
    with pytest.raises(PlanInfeasibleError):
        check_plan(MODEL, lie, Limits(device_bytes=MIB, host_bytes=MIB, disk_bytes=None))
