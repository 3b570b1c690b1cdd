"""Plans by search: close to the best of all, never slower than simple rules, within limits, always the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import time
from typing import Any

import pytest
from planning import more_memory
from planning.bound.bound import bound_of
from planning.fixed_policies import SERVER, SMALL, Asked
from planning.more_memory import worst
from planning.near_best import compare, random_job

from outcore.command.plan.answer import answer
from outcore.core.errors import PlanInfeasibleError
from outcore.planner.forward.footprint import Footprint
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.check import check_plan
from outcore.planner.homes.placement import place
from outcore.planner.homes.pools import UnitHomes
from outcore.planner.homes.share import balanced_share
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import ALL_DEVICE, ALL_DISK, ALL_HOST, KINDS, TIGHT, Candidate
from outcore.planner.search.search import Found, _PlanSearch, search
from outcore.planner.search.wear import least_worn
from outcore.planner.timing.profile import Profile
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import Simulation, simulate
from outcore.spec.budget import Limits, tier_bytes
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import usual_visits

from .models import even_footprint, layered

MIB = 2**20
STATE = 18 * MIB  # bytes of a layer: bf16 weight, fp32 gradient, master, two moments


def rates_of(model: ModelSpec, **changes: Any) -> Rates:
    """A layer computes for 3 ms, and its states are updated in 2 ms."""
    names = [unit.name for unit in model.units]
    bytes_per_s = {"h2d": 4e9, "d2h": 4e9, "disk_read": 2e9, "disk_write": 1.5e9}
    return Rates(
        forward_s=dict.fromkeys(names, 1e-3),
        backward_s=dict.fromkeys(names, 2e-3),
        bytes_per_s={**bytes_per_s, **changes},
        parameters_per_s={"update": MIB / 2e-3, "device_update": 30e9, "compute": 30e9},
    )


def job_of(
    num_layers: int, device: float, host: float, disk: float = 0, footprint: Footprint | None = None, **options: Any
) -> PlanQuestion:
    """Args: device, host, disk: Room of each tier, in states of a layer."""
    model = layered(num_layers, root=0, layer=MIB)
    limits = Limits(
        device_bytes=int(device * STATE),
        host_bytes=int(host * STATE),
        disk_bytes=int(disk * STATE) if disk else None,
    )
    options = {**options, "profile_of": lambda _: Profile({}, footprint)}
    return PlanQuestion(model=model, limits=limits, machine=rates_of(model), **options)


def step_s(job: PlanQuestion, plan: Plan) -> float:
    visits = usual_visits(job.model, job.micro_batches)
    return simulate(job.model, plan, job.rates, visits, Circumstances(clips=job.clipping), warm_up=3).step_s


FOOTPRINT = even_footprint(["model.layers.0", "model.layers.1"], given=4096, selected=MIB, kept=8 * MIB)
WAYS = (None, ActivationPolicy("device", "select"), ActivationPolicy("host", "keep"))
JOBS = {
    "some on the device": lambda: job_of(3, 2, 9),
    "little host": lambda: job_of(3, 1.5, 2.2, 9),
    "neither host nor disk alone": lambda: job_of(4, 1, 2.5, 2),
    "two micro-batches": lambda: job_of(2, 1, 9, micro_batches=2),
    "updates inside backward": lambda: job_of(3, 1, 12, clipping=False),
    "activations": lambda: job_of(2, 2, 9, activation_share=0.3, footprint=FOOTPRINT, ways=WAYS),
    "no host for activations": lambda: job_of(
        2, 3.0, 0.02, activation_share=0.3, footprint=FOOTPRINT, ways=(None, ActivationPolicy("host", "select"))
    ),
}


@pytest.fixture(scope="module", params=JOBS)
def case(request: pytest.FixtureRequest) -> tuple[PlanQuestion, Found]:
    return searched(request.param)


@functools.cache  # in whichever order tests run
def searched(name: str) -> tuple[PlanQuestion, Found]:
    job = JOBS[name]()
    return job, search(job)


def test_keeps_to_the_limits(case):
    job, found = case
    taken, limits = tier_bytes(job.model, found.plan), job.limits
    assert taken == found.plan.tier_bytes
    room = job.room(found.candidate.saves)
    assert taken["device"] <= room["device"] <= limits.device_bytes
    assert taken["host"] <= room["host"] <= limits.host_bytes
    assert taken["disk"] <= room["disk"]
    with_activations = tier_bytes(job.model, job.as_run(found.plan, found.candidate.saves))
    assert all(with_activations[tier] <= most for tier, most in limits.by_tier.items())
    check_plan(job.model, found.plan, limits)
    assert not any(unit.early for unit in found.plan.units) or not job.clipping


def test_is_never_slower_than_todays_rule_and_says_why_others_lost(case):
    job, found = case
    today = place(
        job.model,
        job.limits,
        accumulation_steps=job.promised_steps,
        activations=job.activations(None),
    )
    assert found.simulation.step_s <= step_s(job, today) * (1 + 1e-9)
    run = job.as_run(found.plan, found.candidate.saves)
    visits, circumstances = usual_visits(job.model, job.micro_batches), Circumstances(clips=job.clipping)
    bound_s = bound_of(job.model, run, job.rates, visits, circumstances).seconds
    assert found.simulation.step_s >= bound_s * (1 - 1e-9)
    assert found.simulation.step_s == pytest.approx(step_s(job, run), rel=0.02)
    assert found.runners_up
    for other in found.runners_up:
        assert "limited by" in other.reason or "lacks" in other.reason or other.reason == "equally fast"
        assert (other.step_s is None) == ("lacks" in other.reason)


def test_is_always_the_same():
    job, found = searched("some on the device")
    assert search(job) == found


def test_updates_begin_where_gradients_come_first():
    """Gradients come home slowly, and those of the first units come last."""
    job = job_of(12, 0.5, 20)
    job = dataclasses.replace(job, machine=rates_of(job.model, d2h=2 * MIB / 4e-3))
    found = search(job)
    usual = dataclasses.replace(found.plan, updated_first=())
    assert found.simulation.step_s < 0.99 * step_s(job, usual)


def test_states_on_disk_are_spread_among_the_others():
    """The drive and the host then work all the time, and the plan names no more units than it must."""
    choice = _PlanSearch(job_of(10, 1, 8, 30))._choice
    here, away = UnitHomes("device", "host", "host"), UnitHomes("device", "host", "disk")
    woven = Candidate((here,) * 7 + (away,) * 4, woven=True)
    assert choice.plan(woven).updated_first == tuple(f"model.layers.{i}" for i in (0, 6, 1, 7, 2, 3, 8, 4, 9))
    plain = dataclasses.replace(woven, woven=False)
    assert plain in choice.turned(woven)
    assert woven in choice.turned(plain)
    assert choice.plan(dataclasses.replace(woven, kinds=(away,) * 11)).updated_first == ()
    late = dataclasses.replace(woven, first=(4, 3))
    assert choice.plan(late).updated_first[:4] == tuple(f"model.layers.{i}" for i in (3, 2, 0, 6))


def test_a_known_model_with_more_host_memory_is_not_slower():
    """Changes of the first start as it is end at the bound of a slow plan; brought in order first, they do not."""
    job = more_memory.job_of(Asked(SMALL, "rtx-4090" + SERVER, "8GiB", "16GiB", 1, clipping=False))
    more = (dataclasses.replace(job.limits, host_bytes=int(by * job.limits.host_bytes)) for by in (1.0, 1.03))
    assert worst([search(dataclasses.replace(job, limits=limits)).simulation.step_s for limits in more]) <= 1.01


def test_more_plans_are_compared_where_few_of_many_micro_batches_are_played(monkeypatch: pytest.MonkeyPatch):
    """What is done last of all, for plans that write less, may find the same."""
    monkeypatch.setattr("outcore.planner.search.search.sparing", lambda *_: [])
    job = job_of(9, 4, 6, 60, micro_batches=8)
    found = search(job)
    monkeypatch.setattr("outcore.planner.search.search._WITH_VISITS", 12)
    monkeypatch.setattr("outcore.planner.search.evaluations._PLAYED", 8)
    assert found.simulation.step_s < 0.99 * search(job).simulation.step_s


def test_with_several_micro_batches_little_memory_goes_to_a_slot_to_fetch_ahead(monkeypatch: pytest.MonkeyPatch):
    footprint = even_footprint([f"model.layers.{i}" for i in range(9)], given=MIB // 8, selected=MIB // 2, kept=2 * MIB)
    ways = (None, ActivationPolicy("device", "select"), ActivationPolicy("host", "recompute"))
    job = job_of(9, 2, 20, micro_batches=4, activation_share=0.3, footprint=footprint, ways=ways)
    found = search(job)
    monkeypatch.setattr("outcore.planner.search.start_plans.LEAN", TIGHT)
    assert found.simulation.step_s < 0.985 * search(job).simulation.step_s


@pytest.mark.parametrize("clipping", [True, False])
def test_long_steps_are_compared_by_a_few_of_their_micro_batches(clipping: bool):
    job = job_of(9, 4, 20, 60, micro_batches=11, clipping=clipping)
    looks = Evaluations(job)
    assert looks.num_played == 4
    for kind in (ALL_HOST, UnitHomes("device", "host", "host"), UnitHomes("host", "host", "disk"), ALL_DISK):
        candidate = dataclasses.replace(looks.choice.uniform(kind), early=0.0 if clipping else 1.0)
        plan = looks.plan(candidate)
        assert any(unit.early for unit in plan.units) != clipping
        short, whole = (looks.simulation(plan, None, in_full=in_full) for in_full in (False, True))
        assert short is not whole
        assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
        assert short.written_s == pytest.approx(whole.written_s, rel=1e-9)
        assert short.binding == pytest.approx(whole.binding, abs=1e-9)
        assert looks.seconds(candidate) == looks.cost_s(plan, None, in_full=False)
    found = search(job)
    assert found.simulation.step_s == pytest.approx(step_s(job, found.plan), rel=1e-9)  # of all micro-batches


def test_however_wrong_extended_steps_are_no_simple_plan_is_faster(monkeypatch: pytest.MonkeyPatch):
    cost_s = Evaluations.cost_s
    asked = set[bool]()

    def wrong(self: Evaluations, plan: Plan, away: ActivationPolicy | None, *, in_full: bool = True) -> float:
        asked.add(in_full)
        found_s = cost_s(self, plan, away, in_full=in_full)
        return found_s if in_full else 1 / found_s

    monkeypatch.setattr(Evaluations, "cost_s", wrong)
    on_disk = property(lambda self: self.plan(self.choice.uniform(ALL_DISK)))  # so that only poor plans are left
    monkeypatch.setattr(Evaluations, "today", on_disk)
    monkeypatch.setattr(_PlanSearch, "_starts", lambda *_: [])
    monkeypatch.setattr(_PlanSearch, "_firsts", lambda self: [self._choice.uniform(ALL_DISK)])
    job = job_of(9, 4, 20, 60, micro_batches=11)
    found = search(job)
    assert asked == {True, False}
    simple = [step_s(job, found.looks.today)]
    simple += [each.step_s for each in found.runners_up if each.step_s is not None]
    assert len(simple) > 3
    assert found.simulation.step_s <= min(simple) * (1 + 1e-9)


def test_short_steps_are_compared_in_full():
    looks = Evaluations(job_of(9, 4, 20, 60, micro_batches=4))
    plan = looks.plan(looks.choice.uniform(ALL_HOST))
    assert looks.simulation(plan, None, in_full=False) is looks.simulation(plan, None)


def test_room_that_a_change_left_goes_to_nearer_kinds_of_the_plan():
    search = _PlanSearch(job_of(10, 1, 8, 30))
    far, near = UnitHomes("host", "host", "disk"), UnitHomes("device", "host", "host")
    full = search._fillings.fill(search._choice.uniform(far), near)
    count = full.kinds.count(near)
    loose = dataclasses.replace(full, kinds=(near,) * (count - 2) + (far,) * (11 - count + 2))
    assert 2 < count < 11
    assert full in search._around(loose)


def test_host_memory_that_units_on_the_device_leave_goes_to_the_next_units():
    """Units are filled from the first on. So those on the device were in host memory before, and leave room there."""
    search = _PlanSearch(job_of(16, 4, 6, 40))
    filled = search._fillings.fill(search._choice.uniform(ALL_DISK, TIGHT), ALL_HOST)
    moved = search._fillings.fill(filled, ALL_DEVICE)
    number, before = (each.kinds.count(kind) for each, kind in ((moved, ALL_DEVICE), (filled, ALL_HOST)))
    assert 2 < number < before
    more = {
        near.kinds.count(ALL_HOST) for near in search._fillings._nearer(filled, ALL_HOST) if near.kinds[0] == ALL_DEVICE
    }
    assert more == {before - number, before - 1}, "the root has no data, and counted before"


@pytest.mark.parametrize(("num_layers", "host"), [(4, 2.5), (12, 6)])
def test_updates_come_in_turn_where_forward_would_wait_for_those_whose_states_slots_keep(
    num_layers: int, host: float, monkeypatch: pytest.MonkeyPatch
):
    """Updates are about as fast as forward, and the disk is faster. The fastest plan counts, whatever it writes."""
    monkeypatch.setattr("outcore.planner.search.wear.WORTH", 0.0)
    job = job_of(num_layers, 0.5, host, 40)
    rates = rates_of(job.model, disk_read=30e9, disk_write=30e9)
    updates = {"update": MIB / 0.9e-3, "device_update": MIB / 10e-3, "compute": 30e9}
    found = search(dataclasses.replace(job, machine=dataclasses.replace(rates, parameters_per_s=updates)))
    usual = dataclasses.replace(found.plan, kept_updated_first=True)
    assert found.simulation.step_s < 0.997 * found.looks.simulation(usual, None).step_s


def test_of_plans_that_are_about_as_fast_the_one_that_writes_least_is_taken(monkeypatch: pytest.MonkeyPatch):
    """The drive is fast, and host memory has room for all. Without the drive a step is 2.7% longer."""
    monkeypatch.setattr("outcore.planner.search.wear.WORTH", 0.03)
    job = job_of(3, 1, 3.9, 9)
    job = dataclasses.replace(job, machine=rates_of(job.model, disk_read=28e9, disk_write=28e9))
    found = search(job)
    assert found.simulation.written_s == 0
    assert found.simulation.step_s <= 1.03 * found.fastest_s
    monkeypatch.setattr("outcore.planner.search.wear.WORTH", 0.0)
    assert search(job).simulation.written_s > 0


def test_plans_that_write_less_are_tried_as_well(monkeypatch: pytest.MonkeyPatch):
    """Host memory has no room for all. A search for speed alone does not come to the plan that is taken."""
    job = job_of(3, 1, 2.9, 9)
    job = dataclasses.replace(job, machine=rates_of(job.model, disk_read=10e9, disk_write=10e9))
    found = search(job)
    assert found.simulation.step_s <= 1.01 * found.fastest_s
    monkeypatch.setattr("outcore.planner.search.search.sparing", lambda *_: [])
    assert found.simulation.written_s < 0.7 * search(job).simulation.written_s


def test_small_losses_for_less_writing_do_not_add_up():
    """All times are compared with the fastest plan. Of plans that write as much, the fastest counts."""
    looks = Evaluations(job_of(3, 1, 2, 9))
    plans = [(looks.plan(c), c) for c in map(looks.choice.uniform, (ALL_DISK, ALL_HOST, ALL_DEVICE, KINDS[1]))]
    seconds = [(1.0, 1.0), (1.008, 0.5), (1.007, 0.501), (1.016, 0.0)]
    simulations = [Simulation(step_s, written_s, {}, 1, lambda: None) for step_s, written_s in seconds]
    for said in itertools.permutations(simulations):
        by_plan = {id(plan): simulation for (plan, _), simulation in zip(plans, said, strict=True)}
        looks.simulation = lambda plan, *_, by_plan=by_plan, **__: by_plan[id(plan)]
        (plan, _), fastest_s = least_worn(plans, looks)
        assert (by_plan[id(plan)].step_s, fastest_s) == (1.007, 1.0)


def compact(model: ModelSpec) -> ModelSpec:
    """The model with compact masters."""
    units = []
    for unit in model.units:
        params = tuple(dataclasses.replace(param, master_format="compact") for param in unit.params)
        units.append(dataclasses.replace(unit, params=params))
    return dataclasses.replace(model, units=tuple(units))


def assert_no_slower_than_decoding(job: PlanQuestion, whole: Found, found: Found) -> None:
    """Compact masters take fewer bytes, and make a step longer by no more than their decoding takes.

    That is what it adds to the plan for fp32 masters. Args: job: With compact masters.
    """
    fewer, more = (tier_bytes(model, whole.bare) for model in (job.model, whole.looks.job.model))
    assert fewer["host"] + fewer["disk"] <= more["host"] + more["disk"]
    decoded = Evaluations(job).simulation(whole.bare, whole.candidate.saves)
    assert found.simulation.step_s <= 1.01 * decoded.step_s


@pytest.mark.parametrize("seed", [7, 8])
def test_fewer_bytes_are_never_slower_by_more_than_decoding_takes(seed: int):
    job = random_job(random.Random(seed), 4)
    other = dataclasses.replace(job, model=compact(job.model))
    assert_no_slower_than_decoding(other, search(job), search(other))


def test_a_known_model_with_compact_masters_is_no_slower_than_decoding():
    asked = Asked("meta-llama/Llama-3.1-8B", "rtx-4090" + SERVER, "21.6GiB", "120GiB", 4).question()
    whole, found = (answer(dataclasses.replace(asked, master_format=form)) for form in ("fp32", "compact"))
    assert_no_slower_than_decoding(found.setting, whole.found, found.found)


def test_where_everything_fits_nothing_moves():
    found = search(job_of(5, 8, 9))
    assert {(u.weights, u.gradients, u.states) for u in found.plan.units} == {("device",) * 3}
    assert found.plan.prefetch_depth == 0


def test_nothing_fits():
    with pytest.raises(PlanInfeasibleError, match="no placement fits"):
        search(job_of(5, 0.1, 1))


@pytest.mark.parametrize("seed", [1, 8])
def test_is_near_the_best_of_all(seed: int):
    """Two units and a root; ``planning.near_best`` has more and larger models."""
    row = compare(seed)
    assert row.over_best <= 1.02
    assert row.over_today <= 1 + 1e-9


def test_what_wears_the_drive_must_gain_something():
    job = job_of(6, device=2, host=9, disk=9)
    looks = Evaluations(job)
    host, disk = (looks.choice.uniform(kind) for kind in (ALL_HOST, UnitHomes("host", "host", "disk")))
    assert looks.seconds(host) == looks.simulation(looks.plan(host), None).step_s
    written_s = 6 * 12 * MIB / job.rates.bytes_per_s["disk_write"]
    step_s = looks.simulation(looks.plan(disk), None).step_s
    assert looks.seconds(disk) == pytest.approx(step_s + 0.005 * written_s, rel=1e-6)


def test_a_balanced_share():
    rates = Rates(
        forward_s={},
        backward_s={},
        bytes_per_s={"h2d": 55e9, "d2h": 55e9},
        parameters_per_s={"update": 2.3e9, "device_update": 50e9},
    )
    assert balanced_share(rates, there=12, back=12) == pytest.approx(0.66, abs=0.01)  # as computed for an H100 node
    assert balanced_share(dataclasses.replace(rates, parameters_per_s={}), there=12, back=12) == 0.0


def test_many_units_take_seconds():
    job = job_of(60, 18, 120)
    start_s = time.process_time()
    found = search(job)
    assert time.process_time() - start_s < 15  # some 2 s on an idle core
    assert found.simulation.step_s < step_s(job, place(job.model, job.limits)) * 0.95


def test_the_root_comes_first_in_the_order_and_stays_there():
    choice = _PlanSearch(dataclasses.replace(job_of(10, 1, 8, 30), model=layered(10)))._choice
    plain = choice.uniform(UnitHomes("host", "host", "host"))
    (rooted,) = choice.turned(plain)
    assert rooted.first == (0,)
    assert not list(choice.turned(rooted))
    assert {candidate.first for candidate in choice.other_orders(plain)} == {(10,), (10, 9), (10, 9, 8, 7, 6)}
    assert {candidate.first for candidate in choice.other_orders(rooted)} == {(0, 10), (0, 10, 9), (0, 10, 9, 8, 7, 6)}
    assert choice.plan(rooted).updated_first == ("",)


def test_on_several_ranks_the_root_comes_first_anyway():
    job = dataclasses.replace(job_of(10, 1, 8, 30), model=layered(10).among(2, 0, 2))
    choice = _PlanSearch(job)._choice
    assert not list(choice.turned(choice.uniform(UnitHomes("host", "host", "host"))))


def test_beginning_again_finds_what_changes_alone_do_not(monkeypatch: pytest.MonkeyPatch):
    job = job_of(5, 0.7, 5, 12)
    fastest_s = search(job).fastest_s
    monkeypatch.setattr("outcore.planner.search.search._RESTARTS_OF_SMALL", 0)
    assert fastest_s < 0.98 * search(job).fastest_s


def test_updates_run_inside_backward_where_that_is_faster():
    """Updates take about as long as backward. Without the promise none may run there."""
    job = job_of(8, 1, 12, clipping=False)
    updates = {"update": MIB / 4e-3, "device_update": MIB / 100e-3, "compute": 30e9}
    job = dataclasses.replace(job, machine=dataclasses.replace(job.rates, parameters_per_s=updates))
    found = search(job)
    assert any(unit.early for unit in found.plan.units)
    late = search(dataclasses.replace(job, clipping=True))
    assert found.simulation.step_s < 0.8 * late.simulation.step_s
