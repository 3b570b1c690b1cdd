"""Second homes use what a placement left, and are spread evenly."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.core.errors import ConfigError
from outcore.planner.homes.check import check_plan
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.homes.placement import place
from outcore.spec.budget import Limits, can_be_early, tier_bytes
from outcore.spec.plan import Plan
from outcore.spec.plan_table import plan_table

from .models import layered

MODEL = layered(6)
EVERYTHING = place(MODEL, Limits(device_bytes=10**12, host_bytes=0, disk_bytes=None))
AMPLE = Limits(device_bytes=tier_bytes(MODEL, EVERYTHING)["device"] // 4, host_bytes=10**12, disk_bytes=10**12)
PLAN = place(MODEL, AMPLE, accumulation_steps=2)


def test_with_room_every_unit_off_the_device_is_early():
    plan = with_early_updates(MODEL, PLAN, AMPLE)
    assert [u.early for u in plan.units] == [u.states != "device" for u in plan.units]
    assert any(u.early for u in plan.units)
    assert [dataclasses.replace(u, early=False) for u in plan.units] == list(PLAN.units)
    check_plan(MODEL, plan, AMPLE)
    assert "units updated inside backward" in plan_table(MODEL, plan)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_keeps_to_the_limits_and_spreads_the_units(host: int, disk: int):
    base = tier_bytes(MODEL, PLAN)
    limits = Limits(device_bytes=base["device"], host_bytes=base["host"] + host, disk_bytes=base["disk"] + disk)
    plan = with_early_updates(MODEL, PLAN, limits)
    check_plan(MODEL, plan, limits)
    assert dict(plan.tier_bytes) == tier_bytes(MODEL, plan)
    early = [u.early for u, spec in zip(plan.units, MODEL.units, strict=True) if can_be_early(spec, u) and u.name]
    gaps = "".join("x" if e else "." for e in early).strip(".").split("x")[1:-1]
    assert not gaps or max(map(len, gaps)) - min(map(len, gaps)) <= 1  # layers are equal


def test_without_room_nothing_changes():
    limits = Limits(**{f"{tier}_bytes": nbytes for tier, nbytes in tier_bytes(MODEL, PLAN).items()})
    assert with_early_updates(MODEL, PLAN, limits) == PLAN


def early(plan: Plan, index: int, **changes: object) -> Plan:
    units = list(plan.units)
    units[index] = dataclasses.replace(units[index], early=True, **changes)
    return dataclasses.replace(plan, units=tuple(units))


class TestRefusals:
    def test_no_promise(self):
        with pytest.raises(ConfigError, match="expected accumulation_steps in the plan"):
            check_plan(MODEL, early(place(MODEL, AMPLE), -1))

    def test_states_on_the_device(self):
        with pytest.raises(ConfigError, match="early: expected states on host or disk"):
            early(PLAN, -1, weights="device", gradients="device", states="device")

    def test_frozen_weights_in_host_memory(self):
        spec = MODEL.units[-1]
        frozen = dataclasses.replace(spec.params[0], requires_grad=False)
        model = dataclasses.replace(
            MODEL, units=(*MODEL.units[:-1], dataclasses.replace(spec, params=(*spec.params[1:], frozen)))
        )
        plan = place(model, AMPLE, accumulation_steps=1)
        with pytest.raises(ConfigError, match="weights in host memory that are trained as a whole"):
            check_plan(model, early(plan, -1, weights="host", gradients="host", states="host"))

    def test_no_bool(self):
        with pytest.raises(ConfigError, match="early: expected true or false, but got 1"):
            dataclasses.replace(PLAN.units[-1], early=1)


def test_states_from_disk_get_two_more_slots_where_there_is_room():
    tight = Limits(device_bytes=AMPLE.device_bytes, host_bytes=40 * 2**20, disk_bytes=10**12)
    model = layered(12)
    plan = place(model, tight, accumulation_steps=1)
    (before,) = [pool.num_slots for pool in plan.pools if pool.kind == "states"]
    roomy = dataclasses.replace(tight, host_bytes=10**12)
    (after,) = [pool.num_slots for pool in with_early_updates(model, plan, roomy).pools if pool.kind == "states"]
    assert (before, after) == (3, 5)
    check_plan(model, with_early_updates(model, plan, roomy), roomy)
