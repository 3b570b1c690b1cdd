"""Changed settings, estimated from the plan that was found."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter

import pytest

from outcore.core.errors import PlanInfeasibleError
from outcore.planner.homes.activation_policies import ActivationPolicy, Activations
from outcore.planner.homes.placement import fitting, least, place
from outcore.planner.search.curves import curves
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import Found, search
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.profile import Profile, UnitWork
from outcore.spec.budget import Limits

from .models import even_footprint, layered

MIB = 2**20
STATE = 18 * MIB
LAYERS = 3  # a search takes much longer for more layers


def setting_of(device: float, host: float, disk: float, *, layers: int = LAYERS, **options: object) -> PlanQuestion:
    """Args: device, host, disk: Room of each tier, in states of a layer."""
    model = layered(layers, root=0, layer=MIB)
    names = [unit.name for unit in model.units[1:]]

    def profile_of(batch_size: int) -> Profile:
        work = UnitWork(product_flops=5e10 * batch_size, attention_flops=0)
        given, kept = MIB * batch_size // 8, MIB * batch_size
        footprint = even_footprint(names, given=given, selected=kept // 2, kept=kept)
        return Profile({unit.name: work for unit in model.units}, footprint)

    limits = Limits(device_bytes=int(device * STATE), host_bytes=int(host * STATE), disk_bytes=int(disk * STATE))
    return PlanQuestion(
        model=model,
        machine=known_hardware("rtx-4090"),
        limits=limits,
        profile_of=functools.cache(profile_of),
        batch_size=4,
        seq_len=128,
        activation_share=0.3,
        **options,
    )


@pytest.fixture(scope="module")
def case() -> tuple[PlanQuestion, Found]:
    setting = setting_of(1.5, 2, 6)
    return setting, search(setting)


def test_an_estimate_is_no_slower_than_the_plan_that_was_found(case):
    setting, found = case
    assert search(setting, known=[found.candidate], effort=0.01).simulation.step_s <= found.simulation.step_s


def test_an_estimate_fills_the_room_that_the_known_plan_leaves():
    """The plan for half of the device has far homes for units that now have room in near ones."""
    setting = setting_of(4, 2, 20, layers=12)
    found = search(setting)
    more = setting.with_limits(device_bytes=2 * setting.limits.device_bytes)
    estimated = search(more, known=[found.candidate], effort=0.25)
    assert estimated.simulation.step_s <= 1.15 * search(more).simulation.step_s


def test_more_memory_is_never_slower(case):
    """By no more than 0.5%, for which a plan is taken that writes less to the drive."""
    setting, found = case
    for points in curves(setting, found)[:2]:
        times = [point.step_s for point in points if point.step_s is not None]
        assert len(times) >= 4
        assert all(later <= earlier * 1.005 for earlier, later in itertools.pairwise(times))
        assert [point.step_s for point in points if point.is_today] == [found.simulation.step_s]


def test_a_point_fits_if_it_does_with_any_way_to_treat_activations():
    """In little host memory activations cannot rest there, and in a little of the device they cannot stay."""
    setting = dataclasses.replace(setting_of(1.5, 2, 6, ways=(ActivationPolicy("host", "select"), None)), batch_size=8)
    found = search(setting)
    for points in curves(setting, found)[:2]:
        field = "device_bytes" if points[3].value == setting.limits.device_bytes else "host_bytes"
        for point in points:
            job = setting.with_limits(**{field: point.value})
            ways = [job.activations(way) for way in job.ways]
            fits = any(fitting(job.model, job.limits, way) is not None for way in ways)
            assert (point.step_s is not None) == fits


def test_batches_until_they_do_not_fit(case):
    setting, found = case
    points = curves(setting, found).batch
    assert [point.value for point in points if point.is_today] == [4]
    assert points[-1].step_s is None
    assert all(point.step_s is not None for point in points[:-1])
    assert [point.tokens for point in points] == [128 * point.value for point in points]


def test_activations_take_what_they_need():
    setting = setting_of(1.5, 2, 6)
    small, large = (replaced.activations(None) for replaced in (setting, dataclasses.replace(setting, batch_size=64)))
    assert small.nbytes == pytest.approx(1.03 * (2 * MIB / 2 + 4 * MIB), abs=4096)
    assert large.nbytes == pytest.approx(16 * small.nbytes, abs=17 * 4096)
    assert small.share == large.share == 0
    on_cpu = dataclasses.replace(setting, activation_share=0.0)
    assert (on_cpu.activations(None).nbytes, on_cpu.activations(None).share) == (0, 0.0)


def test_of_a_model_that_cannot_be_followed_a_share_is_left():
    setting = setting_of(1.5, 2, 6)
    work = setting.profile_of(4).work
    job = dataclasses.replace(setting, profile_of=lambda _: Profile(work, None))
    assert (job.activations(None), job.saved) == (Activations(0, 0.3), {})


def test_activations_that_leave_leave_less_of_the_host():
    setting, away = setting_of(1.5, 2, 6), ActivationPolicy("host", "keep")
    job = dataclasses.replace(setting, ways=(away,))
    assert job.activations(away).left(job.limits).host_bytes == setting.limits.host_bytes - LAYERS * 4 * MIB
    assert job.activations(away).left(job.limits).device_bytes == setting.limits.device_bytes - 4 * MIB  # a slot
    found = search(job)
    assert found.candidate.saves == away
    assert found.simulation.timeline.moved_bytes()["d2h"] > 0


def test_a_part_of_the_units_may_save_more_where_they_are():
    setting, third = setting_of(1.5, 2, 6), ActivationPolicy("device", "select", 1 / LAYERS)
    job = dataclasses.replace(setting, ways=(third,))
    assert job.activations(third).left(job.limits) == setting.limits
    more = 2 * MIB - MIB / 2  # one unit keeps products instead of its arguments alone
    assert job.activations(third).nbytes == pytest.approx(job.activations(None).nbytes + 1.03 * more, rel=0.05)
    units = job.activations(third).applied(search(job).plan).units
    assert Counter((unit.policy, unit.activations) for unit in units[1:]) == {
        ("select", "device"): 1,
        ("recompute", "device"): 2,
    }


def test_as_many_units_save_more_as_there_is_room_for():
    """There is no room for all units."""
    setting, select = setting_of(0.6, 6, 6), ActivationPolicy("device", "select")
    found = search(dataclasses.replace(setting, ways=(None, select)))
    assert found.candidate.saves is not None
    assert 0 < found.candidate.saves.share < 1
    assert found.simulation.step_s < 0.95 * search(setting).simulation.step_s


def test_nothing_fits():
    with pytest.raises(PlanInfeasibleError, match="no placement fits"):
        search(setting_of(0.1, 4, 12), effort=0.25)


@pytest.mark.parametrize("activations", [Activations(), Activations(MIB, 0.3)])
def test_the_least_would_do_and_a_byte_less_would_not(activations: Activations):
    setting = setting_of(1.5, 2, 6)
    found = least(setting.model, setting.limits, [activations])

    def fits(**limits: int) -> bool:
        try:
            other = dataclasses.replace(setting.limits, **limits)
            place(setting.model, other, activations=activations)
        except PlanInfeasibleError:
            return False
        return True

    assert set(found.with_others) == {"device", "host", "disk"}
    for tier, nbytes in found.with_others.items():
        assert fits(**{f"{tier}_bytes": nbytes})
        assert not fits(**{f"{tier}_bytes": nbytes - 1})
    at_all = {f"{tier}_bytes": nbytes for tier, nbytes in found.at_all.items()}
    assert fits(**at_all)
    assert not fits(**(at_all | {"device_bytes": at_all["device_bytes"] - 1}))
