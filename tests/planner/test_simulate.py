"""Steps played in time: compared with hand-made cases, and with a clock that knows no sharing."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any
from unittest import mock

import pytest
from planning.bound.bound import bound_of
from planning.random_steps import random_step

from outcore.planner.homes.placement import place
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.timing import simulate as simulation
from outcore.planner.timing.player import Task, play
from outcore.planner.timing.rates import LINK_OF, LINKS, Rates, Shared
from outcore.planner.timing.simulate import play_steps, simulate, steps_until_settled
from outcore.spec.budget import Limits
from outcore.spec.layout import COMPACT_COST
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.schedule import usual_visits
from outcore.spec.timeline import LANES

from .models import layered

MIB = 2**20
FREE = Rates(forward_s={}, backward_s={})


def plan_of(model: ModelSpec, *, depth: int = 2, **changes: Any) -> Plan:
    """Layers on the host, except for ``changes``; the root on the device."""
    root = UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")
    homes = {"weights": "host", "gradients": "host", "states": "host", **changes}
    units = [root, *(UnitPlan(name=u.name, **homes) for u in model.units[1:])]
    comfort = Comfort(prefetch_depth=depth, num_buckets=2, max_slots_host=3)
    return Plan(
        precision=model.precision,
        units=tuple(units),
        pools=pools_for(model, units, comfort),
        prefetch_depth=depth,
        accumulation_steps=1,
    )


def rates_of(model: ModelSpec, **seconds: float) -> Rates:
    """Forward of a layer takes 1 s, backward 2; each resource takes the given seconds for 1 Mi fp32 parameters."""
    names = [u.name for u in model.units[1:]]
    nbytes = {"h2d": 4 * MIB, "d2h": 4 * MIB, "disk_read": 12 * MIB, "disk_write": 12 * MIB}
    return Rates(
        forward_s=dict.fromkeys(names, 1.0),
        backward_s=dict.fromkeys(names, 2.0),
        bytes_per_s={link: nbytes[link] / s for link, s in seconds.items() if link in nbytes},
        parameters_per_s={"update": MIB / seconds["update"]} if "update" in seconds else {},
    )


@pytest.fixture
def model() -> ModelSpec:
    return layered(8, root=0, layer=MIB, precision="fp32")


@pytest.mark.parametrize("homes", [{"states": "disk"}, {"activations": "disk", "saved_bytes": 4096}])
def test_writes_to_disk_may_lag_behind_for_more_steps(model, homes):
    assert steps_until_settled(plan_of(model)) == 1
    assert steps_until_settled(plan_of(model, **homes)) == 4


@pytest.mark.parametrize(("h2d", "d2h"), [(0.1, 2.0), (1.0, 2.0), (1.0, 6.0), (3.0, 0.5)])
@pytest.mark.parametrize("host_runs_ahead", [True, False])
def test_states_that_the_device_updated_may_lag_behind(h2d: float, d2h: float, host_runs_ahead: bool):
    """On a bus that both ways share they go home during the next steps."""
    model = layered(2, root=0, layer=MIB, precision="fp32")
    plan = plan_of(model, weights="device", gradients="device", update="device")
    bus = Shared(name="bus", parts={"h2d": 1.0, "d2h": 1.0})
    rates = dataclasses.replace(rates_of(model, h2d=h2d, d2h=d2h), shared=(bus,), host_runs_ahead=host_runs_ahead)
    given = model, plan, rates, usual_visits(model)
    settled, found = (simulate(*given, warm_up=n).step_s for n in (16, steps_until_settled(plan)))
    assert found == pytest.approx(settled, rel=1e-9)


def step_s(model: ModelSpec, plan: Plan, rates: Rates) -> float:
    return simulate(model, plan, rates, usual_visits(model)).step_s


def test_alone_compute_binds(model):
    found = simulate(model, plan_of(model), rates_of(model), usual_visits(model))
    assert found.step_s == pytest.approx(8 + 24)
    assert found.binding == {"compute": pytest.approx(1.0)}
    assert step_s(model, plan_of(model, policy="keep"), rates_of(model)) == pytest.approx(8 + 16)


def test_updates_lie_behind_forward(model):
    found = simulate(model, plan_of(model), rates_of(model, update=3.0), usual_visits(model))
    assert found.step_s == pytest.approx(24 + 8 * 3 + 1)  # the last unit's forward comes after its update
    assert found.binding["update"] == pytest.approx(24 / 49)
    timeline = found.timeline
    assert timeline.exposed_s()["h2d"] == 2 * (3 + 7 * 2)  # only the fetches after an update are waited for
    assert timeline.busy_s()["update"] == pytest.approx(2 * 24)
    assert timeline.wall_s == pytest.approx(2 * found.step_s)


def test_only_compact_masters_are_decoded(model):
    """Masters of weights that live on the device are whole."""
    spec = dataclasses.replace(model.units[1].params[0], master_format="compact")
    unit, numel = dataclasses.replace(model.units[1], params=(spec,)), model.units[1].trainable_numel
    rates = dataclasses.replace(rates_of(model), parameters_per_s={"update": numel, "device_update": numel})
    on_host, on_device = (
        UnitPlan(name=unit.name, weights=tier, gradients="host", states="host") for tier in ("host", "device")
    )
    assert rates.update_s("update", model.units[1], on_host) == 1.0
    assert rates.update_s("update", unit, on_device) == 1.0
    assert rates.update_s("update", unit, on_host) == 1.0 + COMPACT_COST
    assert rates.update_s("device_update", unit, on_host) == 1.0


def test_slow_fetches_bind(model):
    found = simulate(model, plan_of(model), rates_of(model, h2d=5.0), usual_visits(model))
    assert max(found.binding, key=found.binding.__getitem__) == "h2d"
    assert found.step_s >= (8 + 5) * 5  # three slots keep the last three layers of forward


def test_backward_goes_on_when_its_activations_are_there(model):
    """Weights are used first, then activations: the wait for activations is not part of backward."""
    plan = plan_of(model, weights="device", policy="keep")
    units = [dataclasses.replace(u, activations="host", saved_bytes=4 * MIB) if u.name else u for u in plan.units]
    comfort = Comfort(prefetch_depth=0, num_buckets=1, max_slots_host=3)
    plan = dataclasses.replace(plan, units=tuple(units), pools=pools_for(model, units, comfort))
    rates = rates_of(model, h2d=0.5, d2h=0.1)
    found = simulate(model, plan, rates, usual_visits(model))
    spans = [span for span in found.timeline.spans if span.name == "backward model.layers.3"]
    assert [round(span.duration_s, 9) for span in spans] == [2.0, 2.0]
    # One slot: the sixth layer's activations come after the last two layers' backward, others when the slot is free.
    # Besides them, nothing hides the last gradient and its weights.
    assert found.step_s == pytest.approx(8 + 16 + 5 * 0.5 + 0.1 + 0.5)
    assert found.timeline.exposed_s()["h2d"] > 0


def tasks(*rows: tuple[str, float, tuple[int, ...]]) -> list[Task]:
    return [Task(lane, f"{i}", seconds, 0, after) for i, (lane, seconds, after) in enumerate(rows)]


def ends(rates: Rates, *rows: tuple[str, float, tuple[int, ...]]) -> list[float]:
    return list(play(tasks(*rows), rates).end)


@pytest.mark.parametrize(("behind", "ahead"), [("states_read", "weights_read"), ("states_write", "disk_write")])
def test_what_updates_need_gives_way_to_other_transfers_of_its_direction(behind: str, ahead: str):
    assert ends(FREE, (behind, 1.0, ()), (ahead, 0.5, ())) == [1.5, 0.5]
    found = ends(FREE, ("compute", 0.25, ()), (behind, 1.0, ()), (ahead, 0.5, (0,)), ("compute", 0.5, (0,)))
    assert found == [0.25, 1.5, 0.75, 0.75]  # a quarter is moved before, the rest behind
    found = ends(FREE, (behind, 1.0, ()), (ahead, 0.5, ()), ("compute", 0.75, ()), (ahead, 0.5, (2,)))
    assert found == [2.0, 0.5, 0.75, 1.25]
    other = {"states_read": "disk_write", "states_write": "weights_read"}[behind]
    assert ends(FREE, (behind, 1.0, ()), (other, 1.0, ())) == [1.0, 1.0]
    drive = dataclasses.replace(FREE, shared=(Shared(name="disk", parts={"disk_read": 1.0, "disk_write": 1.0}),))
    assert ends(drive, (behind, 1.0, ()), (ahead, 1.0, ()), (other, 1.0, ())) == [3.0, 2.0, 2.0]


def test_lanes_of_one_link_share_it():
    found = ends(FREE, ("h2d", 1.0, ()), ("write_back", 1.0, ()), ("d2h", 1.0, ()))
    assert found == [pytest.approx(2.0), pytest.approx(2.0), 1.0]
    assert ends(FREE, ("h2d", 3.0, ()), ("write_back", 1.0, ())) == [pytest.approx(4.0), pytest.approx(2.0)]


def test_host_memory_is_shared_by_equal_bytes():
    memory = Shared(name="host memory", parts={"h2d": 0.25, "update": 1.0})
    rates = dataclasses.replace(FREE, shared=(memory,))
    # The link needs a quarter, which is less than half: it runs at full speed, the update gets three quarters.
    assert ends(rates, ("h2d", 1.0, ()), ("update", 3.0, ())) == [pytest.approx(1.0), pytest.approx(3.25)]
    large = Shared(name="host memory", parts={"h2d": 0.75, "update": 1.0})  # both get a half
    found = ends(dataclasses.replace(FREE, shared=(large,)), ("h2d", 1.0, ()), ("update", 1.0, ()))
    assert found == [pytest.approx(1.5), pytest.approx(1.75)]


def test_the_cores_are_shared_as_measured():
    """Two that run beside each other keep what the probe has measured, although that adds up to less than 1."""
    rates = dataclasses.replace(FREE, beside_compute={"update": (0.25, 0.5), "h2d": (0.8, 0.5), "d2h": (1.0, 1.0)})
    found = ends(rates, ("compute", 1.0, ()), ("update", 1.0, ()))
    assert found == pytest.approx([2 + 0.5, 2.0], rel=1e-5)
    assert ends(rates, ("compute", 1.0, ()), ("d2h", 2.0, ())) == pytest.approx([1.0, 2.0], rel=1e-5)
    assert ends(rates, ("update", 1.0, ()), ("h2d", 2.0, ())) == [1.0, 2.0], "nothing computes"
    # Of three, each link costs compute what it costs it alone: 1 / 0.25 - 1 and 1 / 0.8 - 1 seconds per second.
    found = ends(rates, ("compute", 1.0, ()), ("update", 1.0, ()), ("h2d", 1.0, ()))
    assert found == pytest.approx([2 + (1 - 2 / (1 + 3 + 0.25)), 2.0, 2.0])


def test_beside_compute_links_slow_each_other_down_as_ever():
    memory = Shared(name="host memory", parts={"update": 1.0, "h2d": 1.0})
    rates = dataclasses.replace(FREE, shared=(memory,), beside_compute={"update": (0.5, 0.5), "h2d": (0.5, 0.8)})
    compute, update, h2d = ends(rates, ("compute", 9.0, ()), ("update", 1.0, ()), ("h2d", 1.0, ()))
    assert h2d == pytest.approx(1 / (0.5 * 0.8))
    assert update == pytest.approx(h2d + (1 - 0.25 * h2d) / 0.5), "alone beside compute from then on"
    assert compute == pytest.approx(update + 9 - h2d / 3 - (update - h2d) / 2)


def test_a_link_that_costs_compute_nothing_still_loses_its_own_part():
    rates = dataclasses.replace(FREE, beside_compute={"h2d": (1.0, 0.5)})
    assert ends(rates, ("compute", 4.0, ()), ("h2d", 1.0, ()))[1] == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("kept", [(0.0, 0.0), (1e-9, 1.0), (1.0, 1e-9)])
def test_noise_stops_no_link(kept):
    rates = dataclasses.replace(FREE, beside_compute={"update": kept})
    assert max(ends(rates, ("compute", 1.0, ()), ("update", 1.0, ()))) <= 40


def test_a_bus_that_is_not_full_duplex():
    rates = dataclasses.replace(FREE, shared=(Shared(name="bus", parts={"h2d": 1.0, "d2h": 1.0}),))
    assert ends(rates, ("h2d", 1.0, ()), ("d2h", 1.0, ())) == [pytest.approx(2.0), pytest.approx(2.0)]


def test_a_drive_that_does_less_in_all_when_it_reads_and_writes_at_once():
    rates = dataclasses.replace(FREE, shared=(Shared(name="disk", parts={"disk_read": 1.25, "disk_write": 1.25}),))
    assert ends(rates, ("weights_read", 1.0, ())) == [1.0], "alone it has its full speed"
    assert ends(rates, ("weights_read", 1.0, ()), ("disk_write", 1.4, ())) == pytest.approx([2.5, 2.9])
    assert ends(rates, ("weights_read", 1.0, ()), ("h2d", 1.0, ())) == [1.0, 1.0]


def test_without_an_accelerator_nothing_is_submitted_while_compute_works(model):
    rates = dataclasses.replace(rates_of(model, d2h=1.0), host_runs_ahead=False)
    ahead, behind = (step_s(model, plan_of(model), r) for r in (rates_of(model, d2h=1.0), rates))
    assert behind >= ahead
    slow = dataclasses.replace(rates, visit_s=0.5)
    assert step_s(model, plan_of(model), slow) == pytest.approx(behind + 16 * 0.5 + 2 * 0.5)  # and the root's visits


def test_an_engine_that_is_slower_than_the_accelerator_binds(model):
    rates = dataclasses.replace(rates_of(model), visit_s=10.0)
    found = simulate(model, plan_of(model), rates, usual_visits(model))
    assert found.step_s == pytest.approx(18 * 10 + 3)  # and it waits for the last backward, since its update does
    assert found.binding["host"] > 0.98


def test_nothing_is_launched_while_the_host_waits_for_its_own_work(model):
    """Forwards are launched after the updates of their units; copies of the device alone delay no launch."""
    names = [unit.name for unit in model.units[1:]]
    launching = {"visit_s": 0.0, "launch_s": dict.fromkeys(names, 2.0)}
    on_host = dataclasses.replace(rates_of(model, update=4.0), **launching)
    forward, backward = 8 * 4 + 2, 8 * (2 + 2)  # the last forward is launched after the last update
    assert step_s(model, plan_of(model), on_host) == pytest.approx(forward + backward)
    copied = dataclasses.replace(rates_of(model, h2d=0.25), **launching)
    resting = {"weights": "host", "gradients": "device", "states": "host", "update": "device"}
    assert step_s(model, plan_of(model, **resting), copied) == pytest.approx(8 * 2 + backward)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_visits_of_units_whose_data_rests_on_the_device_take_other_times(model, runs_ahead):
    resting = {"weights": "device", "gradients": "device", "states": "device"}
    rates = dataclasses.replace(rates_of(model), visit_s=10.0, resting_visit_s=4.0, host_runs_ahead=runs_ahead)
    at_home, away = plan_of(model, **resting), plan_of(model, **resting | {"states": "host"})
    seconds = [simulate(model, plan, rates, usual_visits(model)).step_s for plan in (at_home, away)]
    bounds = [bound_of(model, plan, rates, usual_visits(model)).seconds for plan in (at_home, away)]
    free = 0.0 if runs_ahead else step_s(model, at_home, dataclasses.replace(rates, visit_s=0.0, resting_visit_s=0.0))
    assert seconds[0] == pytest.approx(18 * 4 + free)
    free += 3.0 * runs_ahead  # the launch of forward waits for updates, and these for the last backward
    assert seconds[1] == pytest.approx(16 * 10 + 2 * 4 + free)  # the root's rests there
    assert all(bound <= found for bound, found in zip(bounds, seconds, strict=True))


def test_backward_is_launched_once_its_activations_are_there(model):
    names = [unit.name for unit in model.units[1:]]
    rates = dataclasses.replace(
        rates_of(model), visit_s=0.0, launch_s=dict.fromkeys(names, 2.0), bytes_per_s={"disk_read": MIB / 5}
    )
    resting = {"weights": "device", "gradients": "device", "states": "device"}
    plan = plan_of(model, **resting, activations="disk", saved_bytes=MIB)
    steps = play_steps(model, plan, rates, usual_visits(model))
    played, read_s, launches = steps.played, dict[str, float](), 0
    for i, task in enumerate(played.tasks):
        kind, _, unit = task.name.rpartition(" ")
        if kind == "read activations of":
            read_s[unit] = played.end[i]
        if kind == "launch backward" and task.seconds and unit in read_s:
            assert played.start[i] >= read_s.pop(unit)
            assert played.start[i - 1] == played.start[i]  # its first kernels run while others are launched
            launches += 1
    assert launches > len(names)


def test_states_are_given_to_the_copy_engine_one_by_one(model):
    """The host waits until the copy of states before the one that it needs has ended."""
    homes = {"weights": "device", "gradients": "device", "states": "host", "update": "device"}
    rates = dataclasses.replace(rates_of(model, h2d=4.0), launch_s={model.units[0].name: 1.0})
    steps = play_steps(model, plan_of(model, **homes), rates, usual_visits(model))
    ends = [steps.played.end[i] for i, task in enumerate(steps.played.tasks) if task.lane == "states_h2d"]
    begun = [steps.played.start[i] for i, task in enumerate(steps.played.tasks) if task.name == "launch forward root"]
    assert ends[8 + 6] <= begun[2] < ends[8 + 7]


def test_kernels_that_come_one_by_one_bind(model):
    names, plan = [unit.name for unit in model.units], plan_of(model)
    rates = dataclasses.replace(rates_of(model), visit_s=1.0, launch_s=dict.fromkeys(names, 10.0))
    found = simulate(model, plan, rates, usual_visits(model))
    assert found.step_s == pytest.approx(18 * 1.0 + 3 * 9 * 10.0)
    assert found.binding["host"] > 0.99


def test_a_plain_loop_launches_kernels_and_nothing_else(model):
    names = [unit.name for unit in model.units]
    homes = {"weights": "device", "gradients": "device", "states": "device", "policy": "keep"}
    plan = dataclasses.replace(plan_of(model, **homes), plain=True)
    rates = dataclasses.replace(rates_of(model), visit_s=1.0, launch_s=dict.fromkeys(names, 10.0))
    assert simulate(model, plan, rates, usual_visits(model)).step_s == pytest.approx(2 * 9 * 10.0)
    again = dataclasses.replace(plan_of(model, **homes | {"policy": "recompute"}), plain=True)
    assert simulate(model, again, rates, usual_visits(model)).step_s == pytest.approx((2 * 9 + 8) * 10.0)


@pytest.mark.parametrize(("micro_batches", "plain_adds"), [(1, 0), (3, 2)])
def test_a_plain_loop_adds_to_the_first_gradients(model, micro_batches: int, plain_adds: int):
    homes = {"weights": "device", "gradients": "device", "states": "device", "policy": "keep"}
    visits = usual_visits(model, micro_batches)
    ours, plain = plan_of(model, **homes), dataclasses.replace(plan_of(model, **homes), plain=True)
    ours, plain = (dataclasses.replace(plan, accumulation_steps=None) for plan in (ours, plain))
    rates = dataclasses.replace(rates_of(model), bytes_per_s={"compute": 4 * MIB})
    for plan, adds in ((ours, micro_batches), (plain, plain_adds)):
        found = simulate(model, plan, rates, visits)
        assert found.step_s == pytest.approx(8 * (3 * micro_batches + adds))
        assert bound_of(model, plan, rates, visits).seconds <= found.step_s * (1 + 1e-9)


def test_a_plain_loop_steps_with_the_optimizer_that_it_has(model):
    homes = {"weights": "device", "gradients": "device", "states": "device", "policy": "keep"}
    rates = dataclasses.replace(rates_of(model), parameters_per_s={"compute": MIB, "plain": MIB / 3})
    ours, plain = plan_of(model, **homes), dataclasses.replace(plan_of(model, **homes), plain=True)
    assert step_s(model, ours, rates) == pytest.approx(8 * (1 + 2 + 1))
    assert step_s(model, plain, rates) == pytest.approx(8 * (1 + 2 + 3))


@pytest.mark.parametrize("seed", range(20))
def test_where_nothing_is_shared_a_plain_clock_says_the_same(seed: int):
    chance = random.Random(seed)
    lanes = ["compute", "h2d", "d2h", "weights_read", "disk_write", "update", "device_update"]  # one lane of each link
    row = [
        Task(chance.choice(lanes), "x", chance.choice([0.0, 1.0, chance.random()]), 0, _some(chance, i))
        for i in range(60)
    ]
    end: list[float] = []
    free = dict.fromkeys(lanes, 0.0)
    for task in row:
        free[task.lane] = max([free[task.lane], *(end[i] for i in task.after)]) + task.seconds
        end.append(free[task.lane])
    assert play(row, FREE).end == pytest.approx(end)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_faster_than_alone_or_than_what_is_shared(seed: int):
    chance = random.Random(seed)
    parts = {link: chance.uniform(0.2, 1.0) for link in LINKS[1:6]}
    rates = dataclasses.replace(FREE, shared=(Shared(name="memory", parts=parts),))
    row = [Task(chance.choice(LANES), "x", chance.random(), 0, _some(chance, i)) for i in range(60)]
    played = play(row, rates)
    end = max(played.end)
    assert all(e - s >= t.seconds * (1 - 1e-9) for t, s, e in zip(row, played.start, played.end, strict=True))
    assert all(played.start[i] >= played.end[j] * (1 - 1e-12) for i, task in enumerate(row) for j in task.after)
    work = {link: sum(t.seconds for t in row if LINK_OF[t.lane] == link) for link in LINKS}
    assert end >= max(work.values()) * (1 - 1e-9)
    assert end >= sum(parts.get(link, 0.0) * s for link, s in work.items()) * (1 - 1e-9)
    assert sum(played.binding(played.end.index(end), 0.0).values()) == pytest.approx(1.0)


def _some(chance: random.Random, i: int) -> tuple[int, ...]:
    return tuple({chance.randrange(i) for _ in range(chance.choice([0, 1, 2]))}) if i else ()


def test_a_hundred_units_take_a_fraction_of_a_second():
    large = layered(100, root=0, layer=MIB)
    plan = place(large, Limits(device_bytes=40 * MIB, host_bytes=2**40, disk_bytes=2**40))
    start_s = time.process_time()
    simulate(large, plan, rates_of(large, h2d=1.0, update=1.0), usual_visits(large))
    assert time.process_time() - start_s < 2.0  # some 0.15 s on an idle core


@pytest.mark.parametrize("seed", range(12))
def test_steps_that_repeat_are_laid_out_once(seed: int):
    step = random_step(random.Random(seed), kept_first=seed % 4 != 3)
    given = (step.model, step.plan, step.rates, step.visits, step.circumstances)
    with mock.patch.object(simulation, "_repeated", lambda rows: rows):
        all_laid_out = simulate(*given, warm_up=8)
    assert simulate(*given, warm_up=8) == all_laid_out
