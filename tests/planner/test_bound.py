"""The bound: computed by hand for simple cases, and not beaten by any order of a step's operations."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from planning.bound.bound import StepBound, _Graph, bound_of
from planning.bound.jobs import Sweep
from planning.bound.step_work import totals_of, work_of
from planning.random_steps import random_step, steps_s

from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import Rates, Shared
from outcore.planner.timing.simulate import simulate
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.schedule import usual_visits

from .models import layered, unit

MIB = 2**20
NUM_LAYERS = 8
NUM_STEPS = 30


def plan_of(
    model: ModelSpec, *, depth: int = 1, buckets: int = 2, steps: int = 1, slots: int = 2, **changes: Any
) -> Plan:
    """Layers on the host, except for ``changes``; the root on the device. Args: slots: Of each pool on the host."""
    root = UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")
    homes = {"weights": "host", "gradients": "host", "states": "host", **changes}
    units = [root, *(UnitPlan(name=u.name, **homes) for u in model.units[1:])]
    return with_units(model, units, depth=depth, buckets=buckets, steps=steps, slots=slots)


def with_units(
    model: ModelSpec, units: list[UnitPlan], *, depth: int = 1, buckets: int = 2, steps: int = 1, slots: int = 2
) -> Plan:
    comfort = Comfort(prefetch_depth=depth, num_buckets=buckets, max_slots_host=slots)
    pools = pools_for(model, units, comfort)
    return Plan(
        precision=model.precision, units=tuple(units), pools=pools, prefetch_depth=depth, accumulation_steps=steps
    )


def rates_of(model: ModelSpec, *, forward_s: float = 1.0, backward_s: float = 2.0, **seconds: float) -> Rates:
    """Rates at which a layer of 1 Mi fp32 parameters takes the given seconds of each resource."""
    names = [u.name for u in model.units[1:]]
    nbytes = {"h2d": 4 * MIB, "d2h": 4 * MIB, "disk_read": 12 * MIB, "disk_write": 12 * MIB}
    updates = ("update", "device_update", "compute")
    return Rates(
        forward_s=dict.fromkeys(names, forward_s),
        backward_s=dict.fromkeys(names, backward_s),
        bytes_per_s={link: nbytes[link] / s for link, s in seconds.items() if link in nbytes},
        parameters_per_s={link: MIB / s for link, s in seconds.items() if link in updates},
    )


@pytest.fixture
def model() -> ModelSpec:
    return layered(NUM_LAYERS, root=0, layer=MIB, precision="fp32")


def bound(model: ModelSpec, plan: Plan, *, micro_batches: int = 1, **seconds: float) -> StepBound:
    return bound_of(model, plan, rates_of(model, **seconds), usual_visits(model, micro_batches))


# 8 layers, forward 1 s, recompute 1 s, backward 2 s; 2 slots for weights, 2 buckets.


def test_alone_compute_binds(model):
    found = bound(model, plan_of(model))
    assert (found.seconds, found.binding) == (8 + 24, "compute")
    assert found.parts == {"compute": pytest.approx(32)}
    assert bound(model, plan_of(model, policy="keep")).seconds == 8 + 16


def test_updates_lie_behind_forward_and_never_behind_backward(model):
    # The last unit's forward comes after its update, wherever the update is in the order.
    assert bound(model, plan_of(model), update=0.9).seconds == pytest.approx(24 + 0.9 + 8)
    found = bound(model, plan_of(model), update=3.0)
    assert found.seconds == pytest.approx(24 + 8 * 3 + 1)
    assert found.binding == "update"
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_early_updates_lie_behind_all(model):
    plan = plan_of(model, early=True)
    assert bound(model, plan, update=3.0).seconds == 8 + 24 + 3  # nothing hides the first unit's update
    found = bound(model, plan, update=5.0)
    assert (found.seconds, found.binding) == (pytest.approx(8 * 5 + 3 + 1), "update")


def test_without_clipping_updates_wait_for_their_own_gradients_alone(model):
    rates, visits = rates_of(model, update=3.0), usual_visits(model)
    free = Circumstances(clips=False)
    assert bound_of(model, plan_of(model), rates, visits, free).seconds == pytest.approx(8 + 24 + 3)
    blocked = dataclasses.replace(rates, host_runs_ahead=False)  # step() is reached only when backward is over
    assert bound_of(model, plan_of(model), blocked, visits, free).seconds == pytest.approx(24 + 8 * 3 + 1)


def test_every_forward_fetches_all_that_changed_and_every_backward_what_no_slot_holds(model):
    found = bound(model, plan_of(model), h2d=5.0)
    assert found.binding == "h2d"
    assert found.total_s["h2d"] == (8 + 6) * 5
    assert found.seconds >= 70
    assert bound(model, plan_of(model, early=True), h2d=5.0).seconds >= 70, "early or not, all weights change"


def test_with_one_slot_fetches_and_compute_take_turns(model):
    plan = plan_of(model, depth=0)
    expected = (8 + 7) * 1.0 + 8 + 24  # one slot for weights: it keeps the last unit of forward
    assert bound(model, plan, h2d=1.0).seconds == pytest.approx(expected)
    assert simulate(model, plan, rates_of(model, h2d=1.0), usual_visits(model)).step_s == pytest.approx(expected)


def test_frozen_weights_in_slots_are_not_fetched_again():
    frozen = ModelSpec(
        units=(unit("", 5, precision="fp32"), *(unit(f"l.{i}", 0, MIB, precision="fp32") for i in range(8))),
        state_names=("exp_avg", "exp_avg_sq"),
        precision="fp32",
    )
    assert bound(frozen, plan_of(frozen), h2d=5.0).total_s["h2d"] == 2 * 6 * 5


def test_gradients_leave_before_their_updates(model):
    found = bound(model, plan_of(model), d2h=5.0, update=0.5)
    assert found.binding == f"d2h with 2 buckets of {4 * MIB} bytes"
    assert found.seconds == pytest.approx(3 + 8 * 5 + 0.5 + 1)  # the first gradient is made, the last one used


def test_states_on_disk_are_read_and_written_once(model):
    found = bound(model, plan_of(model, states="disk"), disk_read=5.0)  # master, exp_avg, exp_avg_sq
    assert found.total_s["disk_read"] == (8 - 2) * 5, "two slots keep theirs"
    assert found.seconds >= 24 + 6 * 5
    found = bound(model, plan_of(model, states="disk"), disk_write=5.0)
    assert found.total_s["disk_write"] == 40


def test_too_few_slots_for_states_bind(model):
    plan = plan_of(model, states="disk")
    found = bound(model, plan, disk_read=3.0, disk_write=3.0, update=3.0)
    assert found.binding == f"2 slots for states of {12 * MIB} bytes"
    assert found.seconds >= 24 + (8 * 9 - 2 * 6) / 2


def test_the_last_states_come_when_all_but_those_in_slots_have_been_written(model):
    found = bound(model, plan_of(model, states="disk"), disk_read=0.5, disk_write=3.0, update=1.0)
    assert found.binding == "disk_write"
    assert found.seconds == pytest.approx(24 + 1 + 6 * 3 + 0.5 + 1 + 1)  # the first update, 6 writes, the last unit


def test_gradients_land_when_others_have_been_written(model):
    plan = plan_of(model, gradients="disk", buckets=1, slots=1)
    found = bound(model, plan, disk_write=15.0)  # 5 s for a gradient
    assert found.total_s["disk_write"] == 8 * 5
    # Forward; the first gradient; six more are written before the last one finds a bucket.
    assert found.seconds == pytest.approx(8 + 3 + 6 * 5)
    assert simulate(model, plan, rates_of(model, disk_write=15.0), usual_visits(model)).step_s >= found.seconds


def test_gradients_that_no_slot_keeps_are_read_for_the_updates(model):
    found = bound(model, plan_of(model, gradients="disk", slots=1), disk_read=15.0)
    assert found.total_s["disk_read"] == (8 - 2) * 5, "a landing slot and one for gradients"
    sums = plan_of(model, gradients="disk", slots=1, steps=2)
    found = bound(model, sums, disk_read=15.0, disk_write=15.0, micro_batches=2)
    assert (found.total_s["disk_read"], found.total_s["disk_write"]) == ((8 + 6) * 5, 16 * 5)


def test_what_step_asks_for_comes_behind_backward_where_the_host_waits_for_that(model):
    plan, rates, visits = plan_of(model, update="device"), rates_of(model, h2d=1.5), usual_visits(model)
    ahead = bound_of(model, plan, rates, visits)
    blocked = dataclasses.replace(rates, host_runs_ahead=False)
    found = bound_of(model, plan, blocked, visits)
    # Gradients and states of a unit take four times as long as its weights; backward itself fetches six units' weights.
    assert ahead.seconds < 24 + 8 * 6 + 8 * 1.5 <= found.seconds
    assert found.seconds <= simulate(model, plan, blocked, visits).step_s


def test_updates_on_the_device_that_wait_for_their_own_gradient_alone(model):
    plan, rates, visits = (
        plan_of(model, update="device", weights="device"),
        rates_of(model, h2d=4.0),
        usual_visits(model),
    )
    found = bound_of(model, plan, rates, visits, Circumstances(clips=False))
    assert 8 * 16 <= found.seconds <= simulate(model, plan, rates, visits, Circumstances(clips=False)).step_s


def test_what_an_overtaken_update_was_given_was_moved_for_nothing(model):
    plan, visits = plan_of(model, weights="device", gradients="device", early=True), usual_visits(model)
    names = frozenset(unit.name for unit in model.units)
    found = [
        bound_of(model, plan, rates_of(model, d2h=1.0), visits, Circumstances(overtaken=overtaken)).total_s["d2h"]
        for overtaken in (frozenset(), names)
    ]
    assert found == [8, 16]


def test_slots_hold_the_weights_of_a_visit_and_the_largest_others():
    held_s = Sweep("h2d", [1.0, 3.0, 1.0, 2.0], [None] * 4, 2).held_s([1.0, 3.0, 1.0, 2.0], 0, 4)
    assert [held_s[0, 4], held_s[1, 4], held_s[2, 4], held_s[3, 4]] == [1 + 3, 3 + 2, 1 + 2, 2]
    assert held_s[0, 1] == 1


@pytest.mark.parametrize("pieces", [1, 3])
def test_activations_of_pieces_leave_one_by_one(model, pieces):
    cut = dataclasses.replace(model, micro_batches_in_unit=pieces)
    saved = {"policy": "keep", "activations": "host", "saved_bytes": 4 * MIB}
    plan = dataclasses.replace(plan_of(cut, **saved), micro_batches_in_unit=pieces)
    found = bound(cut, plan, d2h=1.0)
    assert found.total_s["d2h"] == 8 + 8 * pieces - 1, "gradients, and what all calls but the last save"
    assert found.total_s["compute"] == pytest.approx(8 + 16)
    step_s = simulate(cut, plan, rates_of(cut, d2h=1.0), usual_visits(cut)).step_s
    assert step_s == pytest.approx(found.seconds)


def test_updates_on_the_device_use_the_link_both_ways(model):
    found = bound(model, plan_of(model, update="device"), h2d=0.5, d2h=0.5, device_update=6.0)
    assert found.seconds >= 24 + 8 * 6 + 1
    assert found.total_s["h2d"] == 0.5 * (8 + 6 + 8 * 4), "fetches; moments, gradients and weights"
    assert found.total_s["d2h"] == 8 * 0.5 * (1 + 3), "gradients; moments and weights"


def test_states_on_the_device_are_updated_there(model):
    plan = plan_of(model, weights="device", gradients="device", states="device")
    assert bound(model, plan, compute=0.5).seconds == 24 + 8 + 4


def test_each_micro_batch_sweeps_twice(model):
    three = bound(model, plan_of(model, steps=3), micro_batches=3, h2d=5.0)
    assert three.total_s["compute"] == 3 * 32
    assert three.total_s["h2d"] == (8 + 5 * 6) * 5


def test_what_links_share_binds(model):
    bus = Shared(name="bus", parts={"h2d": 1.0, "d2h": 1.0})
    rates = dataclasses.replace(rates_of(model, h2d=4.0, d2h=4.0), shared=(bus,))
    found = bound_of(model, plan_of(model), rates, usual_visits(model))
    assert (found.binding, found.total_s["bus"]) == ("bus", 4 * (14 + 8))
    assert found.seconds >= 4 * (14 + 8)


@pytest.mark.parametrize("has_ranks", [False, True])
@pytest.mark.parametrize("seed", [*range(NUM_STEPS), 4928, 8313, 8846])
def test_no_order_beats_it(seed: int, has_ranks: bool):
    chance = random.Random(seed)
    step = random_step(chance, has_ranks=has_ranks, kept_first=seed % 4 != 3)
    given = (step.model, step.plan, step.rates, step.visits, step.circumstances)
    found = bound_of(*given)
    assert totals_of(*given) == pytest.approx(work_of(*given).total_s)
    for seconds in steps_s(step, chance, num_orders=3, steps=8):
        assert seconds >= found.seconds * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(0, NUM_STEPS, 3))
def test_no_order_beats_it_where_links_are_slower_together(seed: int):
    step = random_step(chance := random.Random(seed))
    pairs = {"ways": ("h2d", "d2h"), "drive": ("disk_read", "disk_write")}
    slower = tuple(Shared(name=n, parts=dict.fromkeys(pair, chance.uniform(1.1, 2.0))) for n, pair in pairs.items())
    step = dataclasses.replace(step, rates=dataclasses.replace(step.rates, shared=(*step.rates.shared, *slower)))
    found = bound_of(step.model, step.plan, step.rates, step.visits, step.circumstances)
    for seconds in steps_s(step, chance, num_orders=3, steps=8):
        assert seconds >= found.seconds * (1 - 1e-9)


def test_random_steps_find_a_bound_that_is_too_high(monkeypatch):
    monkeypatch.setattr(_Graph, "_held_sums", lambda self, places, slack_s: self._sums_of(places))  # no slots held
    ratios = []
    for seed in range(NUM_STEPS):
        step = random_step(chance := random.Random(seed))
        found = bound_of(step.model, step.plan, step.rates, step.visits, step.circumstances)
        ratios.append(next(steps_s(step, chance, num_orders=0)) / found.seconds)
    assert min(ratios) < 0.99


@pytest.mark.parametrize("seed", range(0, NUM_STEPS, 5))
def test_a_faster_machine_or_fewer_nodes_never_raise_it(seed: int):
    chance = random.Random(seed)
    step = random_step(chance)
    rest = (step.visits, step.circumstances)
    found = bound_of(step.model, step.plan, step.rates, *rest)
    assert bound_of(step.model, step.plan, step.rates, *rest, max_nodes=4).seconds <= found.seconds * (1 + 1e-9)
    link = chance.choice(sorted(step.rates.bytes_per_s))
    faster = {**step.rates.bytes_per_s, link: 2 * step.rates.bytes_per_s[link]}
    rates = dataclasses.replace(step.rates, bytes_per_s=faster)
    assert bound_of(step.model, step.plan, rates, *rest).seconds <= found.seconds * (1 + 1e-9)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_what_goes_between_ranks_binds():
    """8 layers of 4 MiB, a quarter of which belongs to the rank: 3 s of exchange and 1.5 s of gathering for each."""
    model = layered(NUM_LAYERS, root=0, layer=MIB, precision="fp32").among(4, 0)
    rates = rates_of(model)
    slow = dataclasses.replace(rates, bytes_per_s={"reduce": MIB, "host gather": 2 * MIB})
    found = bound_of(model, plan_of(model), slow, usual_visits(model))
    assert found.total_s["reduce"] == pytest.approx(8 * 3)
    assert found.total_s["gather"] == pytest.approx(8 * 1.5)
    # Backward ends after 24 s. Then updates begin, and each unit is gathered before its next visit, the last one, too.
    assert found.seconds == pytest.approx(24 + 8 * 1.5 + 1)
    assert found.seconds <= simulate(model, plan_of(model), slow, usual_visits(model)).step_s
