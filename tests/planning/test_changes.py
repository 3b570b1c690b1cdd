"""What would help: other settings, estimated from the plan that was found."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from outcore.core.errors import PlanInfeasibleError
from outcore.planning.homes.placement import Room, least, place
from outcore.planning.search.changes import best_changes, over_batch, over_device_memory, over_host_memory
from outcore.planning.search.search import Found, estimate, search
from outcore.planning.search.setting import Setting
from outcore.planning.timing.known_hardware import known_hardware
from outcore.planning.timing.profile import UnitWork
from outcore.spec.budget import Limits

from .models import layered

MIB = 2**20
STATE = 18 * MIB


def setting_of(device: float, host: float, disk: float, **options: object) -> Setting:
    """Args: device, host, disk: Layers' states that fit there."""
    model = layered(6, root=0, layer=MIB)
    work = {
        unit.name: UnitWork(product_flops=2e11, attention_flops=0, input_bytes=MIB / 2, saved_bytes=4 * MIB)
        for unit in model.units
    }
    limits = Limits(device_bytes=int(device * STATE), host_bytes=int(host * STATE), disk_bytes=int(disk * STATE))
    return Setting(
        model=model,
        hardware=known_hardware("rtx-4090"),
        limits=limits,
        work=work,
        batch_size=4,
        seq_len=128,
        **options,
    )


@pytest.fixture(scope="module")
def case() -> tuple[Setting, Found]:
    setting = setting_of(2, 4, 12)
    return setting, search(setting.job())


def test_each_change_has_a_gain_that_a_search_confirms(case):
    setting, found = case
    changes = best_changes(setting, found, most=99)
    assert all(change.gain > 1 for change in changes)
    more_host = next(change for change in changes if "host memory" in change.name)
    again = search(setting.with_limits(host_bytes=2 * setting.limits.host_bytes).job())
    assert again.simulation.step_s <= more_host.step_s * 1.001
    assert more_host.step_s <= again.simulation.step_s * 1.1
    assert more_host.gain == pytest.approx(found.simulation.step_s / more_host.step_s)


def test_more_memory_is_never_slower(case):
    setting, found = case
    for points in (over_device_memory(setting, found), over_host_memory(setting, found)):
        times = [point.step_s for point in points if point.step_s is not None]
        assert len(times) >= 4
        assert all(later <= earlier * 1.001 for earlier, later in itertools.pairwise(times))
        assert [point.step_s for point in points if point.is_today] == [found.simulation.step_s]


def test_batches_until_they_do_not_fit(case):
    setting, found = case
    points = over_batch(setting, found)
    assert [point.value for point in points if point.is_today] == [4]
    assert points[-1].step_s is None
    assert all(point.step_s is not None for point in points[:-1])
    assert [point.tokens for point in points] == [128 * point.value for point in points]


def test_activations_take_what_they_need():
    setting = setting_of(2, 4, 12)
    assert setting.activation_bytes == int(0.3 * setting.limits.device_bytes)
    larger = setting.with_batch(64)
    assert larger.activation_bytes == 16 * (6 * MIB // 2 + 4 * MIB)
    job = larger.job()
    share = int(job.activation_share * job.limits.device_bytes)
    assert share + job.activation_reserve_bytes == larger.activation_bytes
    on_cpu = dataclasses.replace(setting.hardware, device=dataclasses.replace(setting.hardware.device, runs_ahead=0))
    assert dataclasses.replace(setting, hardware=on_cpu).activation_bytes == 0


def test_nothing_fits():
    setting = setting_of(0.1, 4, 12)
    assert estimate(setting.job(), []) is None


@pytest.mark.parametrize("room", [Room(0, 0.0), Room(MIB, 0.3)])
def test_the_least_would_do_and_a_byte_less_would_not(room: Room):
    setting = setting_of(2, 4, 12)
    found = least(setting.model, setting.limits, room)

    def fits(**limits: int) -> bool:
        try:
            other = dataclasses.replace(setting.limits, **limits)
            place(setting.model, other, activation_reserve_bytes=room.nbytes, activation_share=room.share)
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
