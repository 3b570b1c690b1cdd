"""What is in use when: slots from the first byte written to the last one read, activations between their visits."""

from __future__ import annotations

import dataclasses

import pytest

from outcore.planner.homes.occupancy import TierLoad, occupancy, peak_of
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.timing.simulate import simulate
from outcore.spec.plan import TIERS, Plan, Pool, UnitPlan
from outcore.spec.schedule import usual_visits

from .models import layered
from .test_search import MIB, rates_of

MODEL = layered(4, root=0, layer=MIB)
NAMES = [unit.name for unit in MODEL.units[1:]]
ALIVE = {(name, False): 10 * i + 100 for i, name in enumerate(NAMES)}
ALIVE |= {(name, True): 10 * i + 110 for i, name in enumerate(NAMES)}


def plan_of(policy: str = "recompute", states: str = "host", slots: int = 2) -> Plan:
    units = tuple(
        UnitPlan(name=u.name, weights="host" if u.name else "device", gradients="host", states=states, policy=policy)
        for u in MODEL.units
    )
    pools = pools_for(MODEL, units, Comfort(prefetch_depth=slots - 1, num_buckets=1, max_slots_host=slots))
    return Plan(precision="bf16", units=units, pools=pools, prefetch_depth=slots - 1)


def loads_of(plan: Plan) -> dict[tuple[str, str], TierLoad]:
    found = occupancy(MODEL, plan, rates_of(MODEL), usual_visits(MODEL), alive=ALIVE)
    return {(load.tier, load.label): load for load in found}


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("slots", [1, 3])
def test_never_more_is_in_use_than_is_reserved(states: str, slots: int):
    plan = plan_of(states=states, slots=slots)
    loads = loads_of(plan)
    for (_, label), load in loads.items():
        assert label == "activations" or load.peak_bytes <= load.reserved_bytes
        assert [t for t, _ in load.moments] == sorted({t for t, _ in load.moments})
        assert all(nbytes >= 0 for _, nbytes in load.moments)
    slot = loads["device", "slots for weights"]
    assert slot.peak_bytes == slots * (slot.reserved_bytes // slots)  # all slots are in use at some time
    assert 0 in {nbytes for _, nbytes in loads["device", "slots for bucket"].moments}  # none in forward
    if states == "disk":
        assert loads["host", "slots for states"].peak_bytes > 0
        assert loads["disk", "homes"].peak_bytes == sum(18 / 18 * u.update_bytes * 3 for u in MODEL.units)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_what_updates_make_is_in_use_while_they_run(tier: str):
    pool = Pool(tier=tier, kind="temporary", slot_bytes=4096, num_slots=1)
    plan = plan_of()
    load = loads_of(dataclasses.replace(plan, pools=(*plan.pools, pool)))[tier, "slots for temporary"]
    assert load.reserved_bytes == 4096
    assert {nbytes for _, nbytes in load.moments} == ({0, 4096} if tier == "host" else {0}), "all updates run there"


def test_activations_are_those_of_each_visit_until_the_next():
    load = loads_of(plan_of())["device", "activations"]
    assert load.peak_bytes == 10 * 3 + 110
    assert [nbytes for _, nbytes in load.moments][-1] == 110
    assert {nbytes for _, nbytes in load.moments} == {10 * i + 100 for i in range(5)}


def test_workspace_is_no_home_beside_what_is_in_use_of_it():
    plan = dataclasses.replace(plan_of(), workspace_bytes=1000)
    loads, without = loads_of(plan), loads_of(plan_of())
    assert loads["device", "activations"].reserved_bytes == 1000
    assert loads.keys() == without.keys()  # the workspace adds no homes on the device


def test_the_window_is_that_of_the_timeline():
    plan = plan_of()
    timeline = simulate(MODEL, plan, rates_of(MODEL), usual_visits(MODEL)).timeline
    last_s = max(t for load in loads_of(plan).values() for t, _ in load.moments)
    assert 0 < last_s < timeline.wall_s * (1 + 1e-9)


def test_peaks_of_several_are_those_of_one_moment():
    one = TierLoad("device", "a", 3, ((0.0, 3), (1.0, 0)))
    other = TierLoad("device", "b", 2, ((0.0, 0), (1.0, 2)))
    assert peak_of([one, other]) == 3
    assert peak_of([one, dataclasses.replace(other, moments=((0.5, 2),))]) == 5
    assert peak_of([]) == 0
    assert {load.tier for load in (one, other)} <= set(TIERS)
