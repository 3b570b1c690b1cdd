"""The floor: worked out by hand for plain cases, and what must hold for every plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.planning.floor import RESOURCES, Floor, Rates, floor_of
from outcore.planning.pools import Comfort, pools_for
from outcore.planning.reservations import can_be_early
from outcore.spec.model import ModelSpec
from outcore.spec.plan import TIERS, Plan, UnitPlan

from .models import layered, model_specs, unit

MIB = 2**20
NUM_LAYERS = 8


def plan_of(model: ModelSpec, *, depth: int = 1, buckets: int = 2, steps: int = 1, **changes: Any) -> Plan:
    """Layers on the host, but for what ``changes`` say; the root on the device."""
    root = UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")
    homes = {"weights": "host", "gradients": "host", "states": "host", **changes}
    units = [root, *(UnitPlan(name=u.name, **homes) for u in model.units[1:])]
    return with_units(model, units, depth=depth, buckets=buckets, steps=steps)


def with_units(model: ModelSpec, units: list[UnitPlan], *, depth: int = 1, buckets: int = 2, steps: int = 1) -> Plan:
    comfort = Comfort(prefetch_depth=depth, num_buckets=buckets, max_slots_host=2)
    pools = pools_for(model, units, comfort)
    return Plan(
        precision=model.precision, units=tuple(units), pools=pools, prefetch_depth=depth, accumulation_steps=steps
    )


def rates_of(model: ModelSpec, *, forward_s: float = 1.0, backward_s: float = 2.0, **seconds: float) -> Rates:
    """Rates at which each layer takes the given seconds of a resource: fp32, 1 Mi parameters."""
    names = [u.name for u in model.units[1:]]
    nbytes = {"h2d": 4 * MIB, "d2h": 4 * MIB, "disk_read": 12 * MIB, "disk_write": 12 * MIB}
    return Rates(
        forward_s=dict.fromkeys(names, forward_s),
        backward_s=dict.fromkeys(names, backward_s),
        bytes_per_s={link: nbytes[link] / s for link, s in seconds.items() if link in nbytes},
        parameters_per_s={"update": MIB / seconds["update"]} if "update" in seconds else {},
    )


@pytest.fixture
def model() -> ModelSpec:
    return layered(NUM_LAYERS, root=0, layer=MIB, precision="fp32")


def floor(model: ModelSpec, plan: Plan, **seconds: float) -> Floor:
    return floor_of(model, plan, rates_of(model, **seconds))


# 8 layers, forward 1 s, recompute 1 s, backward 2 s; 2 slots for weights, 2 buckets.


def test_alone_compute_binds(model):
    found = floor(model, plan_of(model))
    assert (found.seconds, found.binding) == (8 + 24, "compute")
    assert floor(model, plan_of(model, policy="keep")).seconds == 8 + 16


def test_updates_lie_behind_forward_and_never_behind_backward(model):
    assert floor(model, plan_of(model), update=0.9).seconds == 24 + 8
    found = floor(model, plan_of(model), update=3.0)
    assert (found.seconds, found.binding) == (24 + 24, "compute + update")


def test_early_updates_lie_behind_all(model):
    plan = plan_of(model, early=True)
    assert floor(model, plan, update=3.0).seconds == 8 + 24
    found = floor(model, plan, update=5.0)
    assert (found.seconds, found.binding) == (40, "update")


def test_of_some_early_updates_the_others_lie_behind_forward(model):
    plan = plan_of(model)
    units = [dataclasses.replace(u, early=i > 4) for i, u in enumerate(plan.units)]
    assert floor(model, dataclasses.replace(plan, units=tuple(units)), update=3.0).seconds == 24 + 4 * 3


def test_every_forward_fetches_all_that_changed_and_every_backward_what_no_slot_holds(model):
    found = floor(model, plan_of(model), h2d=5.0)
    assert (found.rest_s["h2d"], found.window_s["h2d"], found.binding) == (6 * 5, 8 * 5, "h2d")
    assert found.seconds == 70
    assert floor(model, plan_of(model, depth=3), h2d=5.0).seconds == 4 * 5 + 8 * 5 + 4  # backward itself takes 24
    assert floor(model, plan_of(model, early=True), h2d=5.0).seconds == 70, "early or not, all weights change"


def test_frozen_weights_in_slots_are_not_fetched_again():
    frozen = ModelSpec(
        units=(unit("", 5, precision="fp32"), *(unit(f"l.{i}", 0, MIB, precision="fp32") for i in range(8))),
        state_names=("exp_avg", "exp_avg_sq"),
        precision="fp32",
    )
    found = floor(frozen, plan_of(frozen), h2d=5.0)
    assert found.window_s["h2d"] == found.rest_s["h2d"] == 6 * 5


def test_gradients_leave_before_forward_begins_unless_those_of_the_first_units_stay(model):
    found = floor(model, plan_of(model), d2h=5.0)
    assert (found.seconds, found.binding) == (40 + 8, "d2h + compute")
    plan = plan_of(model)
    at_home = dataclasses.replace(plan.units[1], weights="device", gradients="device", states="device")
    found = floor(model, dataclasses.replace(plan, units=(plan.units[0], at_home, *plan.units[2:])), d2h=5.0)
    assert found.rest_s["d2h"] == (7 - 2) * 5, "two buckets may leave behind forward"
    assert (found.seconds, found.binding) == (35, "d2h")


def test_states_on_disk_are_read_and_written_once(model):
    plan = plan_of(model, states="disk")
    found = floor(model, plan, disk_read=5.0)  # master, exp_avg, exp_avg_sq
    assert (found.seconds, found.binding) == (24 + 7 * 5, "compute + disk_read"), "one of two slots keeps its states"
    found = floor(model, plan, disk_write=5.0)
    assert found.seconds == 24 + (8 - 2) * 5, "two slots are written behind backward"
    assert found.total_s["disk_write"] == 40
    early = floor(model, plan_of(model, states="disk", early=True), disk_read=5.0, disk_write=6.0)
    assert (early.seconds, early.binding) == (48, "disk_write")


def test_weights_on_disk_are_read_as_often_as_they_are_fetched(model):
    found = floor(model, plan_of(model, weights="disk"), disk_read=15.0)  # 4 of the 12 bytes: 5 s
    assert found.window_s["disk_read"] == pytest.approx(8 * 5)
    assert found.rest_s["disk_read"] == pytest.approx((8 - 2 - 2) * 5)
    assert found.total_s["disk_write"] == 0.0


def test_a_gradient_on_disk_is_written_and_read_back(model):
    found = floor(model, plan_of(model, gradients="disk"), disk_read=15.0, disk_write=15.0)
    assert found.total_s["disk_write"] == pytest.approx(8 * 5)
    assert found.window_s["disk_read"] == pytest.approx(6 * 5), "the last two are in landing slots still"


def test_states_on_the_device_are_updated_there(model):
    plan = plan_of(model, weights="device", gradients="device", states="device")
    rates = dataclasses.replace(rates_of(model), parameters_per_s={"compute": MIB / 0.5})
    assert floor_of(model, plan, rates).seconds == 24 + 8 + 4
    away = plan_of(model, weights="device", gradients="device")
    found = floor_of(model, away, rates_of(model, d2h=5.0, h2d=4.0))
    assert (found.window_s["d2h"], found.window_s["h2d"]) == (40, 32)


def test_an_update_on_the_device_uses_the_link_both_ways(model):
    plan = plan_of(model, update="device")
    rates = dataclasses.replace(rates_of(model, h2d=0.5, d2h=0.5), parameters_per_s={"device_update": MIB / 6})
    found = floor_of(model, plan, rates)
    assert (found.seconds, found.binding) == (24 + 48, "compute + device_update")
    assert found.window_s["h2d"] == 8 * 0.5 * (1 + 4), "a fetch; moments, gradients and weights"
    assert found.total_s["d2h"] == 8 * 0.5 * (1 + 3), "gradients; moments and weights"


def test_each_micro_batch_sweeps_twice(model):
    one, three = (floor_of(model, plan_of(model), rates_of(model, h2d=5.0), accumulation_steps=n) for n in (1, 3))
    assert three.rest_s["compute"] == 3 * 24 + 2 * 8
    assert three.window_s == one.window_s
    assert three.rest_s["h2d"] == 5 * 6 * 5


plans = st.builds(
    dict,
    weights=st.sampled_from(TIERS),
    gradients=st.sampled_from(TIERS),
    states=st.sampled_from(TIERS[1:]),
    policy=st.sampled_from(["keep", "recompute"]),
)
speeds = st.sampled_from([0.5, 3.0, 1e3, 1e6])


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, Plan, Rates, int]:
    model = draw(model_specs())
    units = [UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")]
    for spec in model.units[1:]:
        homes = UnitPlan(name=spec.name, **draw(plans))
        early = can_be_early(spec, homes) and draw(st.booleans())
        units.append(dataclasses.replace(homes, early=early))
    steps = draw(st.integers(1, 3))
    plan = with_units(model, units, depth=draw(st.integers(0, 2)), steps=steps)
    rates = Rates(
        forward_s={u.name: draw(speeds) for u in model.units},
        backward_s={u.name: draw(speeds) for u in model.units},
        bytes_per_s={link: draw(speeds) for link in RESOURCES[1:5]},
        parameters_per_s={"update": draw(speeds), "compute": draw(speeds)},
    )
    return model, plan, rates, steps


@given(cases(), st.integers(0, 5), st.sampled_from([1, 64, 5000]))
def test_a_larger_unit_never_lowers_the_floor(case, index, more):
    model, plan, rates, steps = case
    units = list(model.units)
    chosen = units[index % len(units)]
    first = chosen.params[:1]
    if not first:
        return
    larger = dataclasses.replace(first[0], shape=(first[0].numel + more,))
    units[index % len(units)] = dataclasses.replace(chosen, params=(larger, *chosen.params[1:]))
    grown = dataclasses.replace(model, units=tuple(units))
    before, after = (floor_of(m, plan, rates, accumulation_steps=steps).seconds for m in (model, grown))
    assert after >= before * (1 - 1e-9)


@given(cases(), st.sampled_from(RESOURCES), st.integers(0, 5))
def test_a_faster_machine_more_slots_or_an_early_update_never_raise_it(case, resource, index):
    model, plan, rates, steps = case
    before = floor_of(model, plan, rates, accumulation_steps=steps)
    faster = dataclasses.replace(
        rates,
        bytes_per_s={k: v * 2 if k == resource else v for k, v in rates.bytes_per_s.items()},
        parameters_per_s={k: v * 2 if k == resource else v for k, v in rates.parameters_per_s.items()},
    )
    slots = [dataclasses.replace(pool, num_slots=pool.num_slots + 1) for pool in plan.pools]
    units = list(plan.units)
    i = index % len(units)
    if can_be_early(model.units[i], units[i]) and plan.units[i].name:
        units[i] = dataclasses.replace(units[i], early=True)
    for better, speed in (
        (plan, faster),
        (dataclasses.replace(plan, pools=tuple(slots)), rates),
        (dataclasses.replace(plan, units=tuple(units)), rates),
    ):
        assert floor_of(model, better, speed, accumulation_steps=steps).seconds <= before.seconds * (1 + 1e-9)


@given(cases())
def test_the_whole_holds_its_parts_and_more_batches_take_longer(case):
    model, plan, rates, steps = case
    found = floor_of(model, plan, rates, accumulation_steps=steps)
    for resource in RESOURCES:
        parts = found.rest_s[resource] + found.window_s[resource]
        assert -1e-9 <= parts <= found.total_s[resource] * (1 + 1e-9) + 1e-9
    assert found.seconds >= max(found.total_s.values())
    assert set(found.binding.split(" + ")) <= set(RESOURCES)
    assert floor_of(model, plan, rates, accumulation_steps=steps + 1).seconds >= found.seconds
