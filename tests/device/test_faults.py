"""Fault injection: delays, permutation, poison and skipped labels have the declared effects, repeatably."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from outcore.core.errors import ConfigError, LaneError, RaceError
from outcore.device.faults import COMPUTE, Delays, Faults
from outcore.device.lanes import pause
from outcore.device.opening import open_device
from outcore.device.race import RaceChecker
from outcore.memory.arena import Arena, Region
from outcore.spec.lane_names import Lane

LANES = list(Lane)


def test_nothing_goes_wrong_by_default():
    faults = Faults()
    assert (dict(faults.delays), faults.permute, faults.poison, faults.skip) == ({}, None, False, frozenset())


@pytest.mark.parametrize("delays", [{"h2h": 0.1}, {"host": 0.1}, {"h2d": -1.0}])
def test_delays_of_no_lane_are_refused(delays):
    with pytest.raises(ConfigError, match="expected delays"):
        Faults(delays=delays)


def test_delays_are_repeatable_bounded_and_per_lane():
    faults = Faults(delays={"h2d": 0.5, "update": 0.25, "compute": 0.125}, seed=7)
    one, other = Delays(faults), Delays(faults)
    first = [one.around(Lane.H2D) for _ in range(20)]
    other.around(Lane.UPDATE)  # draws of other lanes do not matter
    assert other.compute_s() == one.compute_s()
    assert [other.around(Lane.H2D) for _ in range(20)] == first
    assert all(0 <= s <= 0.5 for pair in first for s in pair)
    assert len(set(first)) == 20
    assert one.around(Lane.D2H) == (0.0, 0.0)
    assert Delays(Faults(delays=faults.delays, seed=8)).around(Lane.H2D) != first[0]


@pytest.mark.parametrize("permute", [None, 3])
def test_pauses_lie_around_the_work_and_before_compute(monkeypatch, permute):
    events = []
    monkeypatch.setattr("time.sleep", lambda s: events.append(round(s, 6)))
    faults = Faults(delays={"h2d": 1.0, COMPUTE: 1.0}, seed=5, permute=permute)
    expected = Delays(faults)
    with open_device("cpu", faults) as device:
        device.submit(Lane.H2D, "copy", lambda: events.append("work")).wait()
        device.compute("forward")
    before_s, after_s = expected.around(Lane.H2D)
    assert events == [round(before_s, 6), "work", round(after_s, 6), round(expected.compute_s(), 6)]


def _run_random_program(seed, permute, *, num_operations=60):
    """Submit a random program and wait here and there; return what ran, in order, and what had to run before it."""
    rng = random.Random(seed)
    ran, before, handles = [], {}, []
    with open_device("cpu", Faults(permute=permute)) as device:
        last = {}
        for i in range(num_operations):
            lane = rng.choice(LANES)
            needs = rng.sample(range(i), min(i, rng.randrange(3)))
            before[i] = set(needs) | ({last[lane]} if lane in last else set())
            last[lane] = i
            handles.append(
                device.submit(lane, f"op {i}", lambda i=i: ran.append(i), after={"x": [handles[n] for n in needs]})
            )
            if rng.random() < 0.1:
                handles[rng.randrange(i + 1)].wait()
            if rng.random() < 0.1:
                device.compute("use", after={"y": handles[rng.randrange(i + 1)]})
        device.synchronize()
        assert all(handle.done() for handle in handles)
    return ran, before


@pytest.mark.parametrize("seed", range(25))
def test_a_permuted_run_completes_in_a_legal_order_and_is_repeatable(seed):
    ran, before = _run_random_program(seed, permute=seed)
    assert sorted(ran) == list(range(60))
    place = {operation: i for i, operation in enumerate(ran)}
    assert all(place[need] < place[operation] for operation, needs in before.items() for need in needs)
    assert _run_random_program(seed, permute=seed)[0] == ran


def test_seeds_permute_differently_and_not_as_submitted():
    orders = {tuple(_run_random_program(0, permute=seed)[0]) for seed in range(20)}
    assert len(orders) >= 19
    assert tuple(range(60)) not in orders


def test_any_lane_may_come_last():
    last = set()
    for seed in range(300):
        ran = []
        with open_device("cpu", Faults(permute=seed)) as device:
            for lane in LANES:
                device.submit(lane, "work", lambda lane=lane, ran=ran: ran.append(lane))
            device.synchronize()
        last.add(ran[-1])
    assert last == set(LANES)


def test_permuted_operations_are_sometimes_early_and_sometimes_late():
    early = late = 0
    for seed in range(40):
        ran = []
        with open_device("cpu", Faults(permute=seed)) as device:
            handle = device.submit(Lane.H2D, "fetch", lambda ran=ran: ran.append(1))
            early += bool(ran)
            late += not ran
            handle.wait()
    assert early >= 5
    assert late >= 5


def test_a_loop_that_asks_until_done_ends():
    with open_device("cpu", Faults(permute=0)) as device:
        for i in range(20):
            handle = device.submit(LANES[i % 6], "work", lambda: None)
            while not handle.done():
                pass


def test_permuted_work_can_be_submitted_from_another_thread():
    """Autograd's device thread submits while the main thread is blocked."""
    ran = []
    with open_device("cpu", Faults(permute=2)) as device:

        def backward():
            first = device.submit(Lane.H2D, "fetch", lambda: ran.append("fetch"))
            device.compute("backward", after={"x": first})

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert ran == ["fetch"]


@pytest.mark.parametrize("seed", range(8))
def test_permuted_ranks_meet_although_they_draw_apart(seed):
    lanes = [Lane.REDUCE, Lane.UPDATE, Lane.GATHER, Lane.SAVE]
    meetings = [threading.Barrier(2, timeout=60) for _ in range(16)]
    with open_device("cpu", Faults(permute=seed)) as one, open_device("cpu", Faults(permute=seed + 50)) as other:
        handles = {}
        for device in (one, other):
            device.hangs_up_with(lambda: None)
            handles[device] = [
                device.submit(lanes[i % 4], f"meet {i}", (lambda: None) if i % 4 == 1 else meeting.wait)
                for i, meeting in enumerate(meetings)
            ]
        waiting = threading.Thread(target=lambda: other.wait("met", handles[other][::-1]))
        waiting.start()
        one.wait("met", handles[one])
        waiting.join(60)
        assert all(handle.done() for handle in handles[other])


@pytest.mark.parametrize("permute", [None, 3])
def test_closing_ends_waits_for_other_ranks(permute):
    begun, let_go = threading.Event(), threading.Event()
    device = open_device("cpu", Faults(permute=permute))
    device.hangs_up_with(let_go.set)
    met = device.submit(Lane.REDUCE, "wait for another rank", lambda: begun.set() or let_go.wait())
    while not begun.wait(0.01):
        met.done()
    device.close()
    assert let_go.is_set()
    assert met.done()


def test_closing_a_permuted_device_fails_what_is_queued():
    for seed in range(10):
        ran = []
        device = open_device("cpu", Faults(permute=seed))
        handles = [device.submit(lane, "x", lambda ran=ran: ran.append(1)) for lane in LANES]
        device.close()
        assert len(ran) == sum(handle.failure is None for handle in handles)
        for handle in handles:
            if handle.failure is not None:
                with pytest.raises(LaneError, match="closed before its turn"):
                    handle.wait()


def _buffer(device, nbytes=4096 + 100):
    arena = Arena("device", device.allocate(8 * 4096))
    arena.take(5)
    buffer = arena.take(nbytes)
    buffer.bytes.zero_()
    return arena, buffer


@pytest.mark.parametrize("lane", [None, Lane.H2D])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan_and_stays_inside(lane, dtype):
    with open_device("cpu", Faults(poison=True)) as device:
        arena, buffer = _buffer(device)
        after = arena.take(4096)
        after.bytes.fill_(1)
        handle = device.poison(buffer, lane)
        handle.wait()
        assert buffer.tensor(dtype, (1025,)).isnan().all()
        assert (after.bytes == 1).all()


def test_without_poison_nothing_happens():
    with open_device("cpu", Faults(), RaceChecker()) as device:
        _, buffer = _buffer(device)
        assert device.poison(buffer, Lane.H2D) is None
        assert device.poison(buffer) is None
        assert (buffer.bytes == 0).all()


def test_poison_comes_after_what_is_named_and_the_next_user_after_it():
    checker = RaceChecker()
    with open_device("cpu", Faults(poison=True), checker) as device:
        _, buffer = _buffer(device)
        release = threading.Event()
        read = device.submit(Lane.D2H, "offload", release.wait, reads=[buffer.region])
        poisoned = device.poison(buffer, Lane.H2D, {"read": read})
        assert not poisoned.done()
        release.set()
        device.compute("next", writes=[buffer.region], after={"free": poisoned})
    with open_device("cpu", Faults(poison=True), RaceChecker()) as device:
        _, buffer = _buffer(device)
        device.poison(buffer, Lane.H2D)
        with pytest.raises(RaceError, match="'poison device "):
            device.compute("next", writes=[buffer.region])


def test_a_skipped_label_is_dropped_everywhere_and_recorded():
    ran = []
    with open_device("cpu", Faults(skip=frozenset({"slot free"}))) as device:
        release = threading.Event()
        blocked = device.submit(Lane.D2H, "blocked", release.wait)
        early = device.submit(
            Lane.H2D, "early", lambda: ran.append("early"), after={"slot free": blocked, "other": None}
        )
        early.wait()  # would hang if the label were not skipped
        device.wait("slot free", blocked)
        device.compute("use", after={"slot free": [blocked]})
        assert ran == ["early"]
        assert not blocked.done()
        release.set()
        assert device.labels_seen == {"slot free"}  # a label that never carried a handle is not recorded


def test_every_label_is_recorded_without_skipping():
    with open_device("cpu") as device:
        handle = device.submit(Lane.H2D, "a", lambda: None)
        device.submit(Lane.H2D, "b", lambda: None, after={"one": handle})
        device.compute("c", after={"two": [None, handle]})
        device.wait("three", handle)
        device.poison(None, None, {"four": handle})  # poison is off: the label is not recorded
        assert device.labels_seen == {"one", "two", "three"}


@pytest.mark.parametrize("throttle", [{"h2h": 1.0}, {COMPUTE: 1.0}, {"h2d": 0.0}, {"h2d": -1.0}, {"h2d": float("nan")}])
def test_throttles_of_no_lane_and_of_no_rate_are_refused(throttle):
    with pytest.raises(ConfigError, match="expected a throttle"):
        Faults(throttle=throttle)


@pytest.mark.parametrize("permute", [None, 3])
def test_a_throttled_operation_takes_its_bytes_over_the_rate(monkeypatch, permute):
    slept, now = [], [0.0]
    monkeypatch.setattr("time.sleep", lambda s: slept.append(s))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work():
        now[0] += 0.25

    regions = [Region("host", 0, 60), Region("device", 100, 140)]
    faults = Faults(throttle={"h2d": 100.0, "d2h": 1000.0}, permute=permute)
    with open_device("cpu", faults) as device:
        device.submit(Lane.H2D, "fetch", work, reads=regions, writes=regions).wait()
        device.submit(Lane.D2H, "slower than its rate", work, writes=regions).wait()
        device.submit(Lane.UPDATE, "not throttled", work, writes=regions).wait()
    assert slept == [pytest.approx(0.75)]  # 100 bytes at 100 bytes per second, less the quarter that the work took


@pytest.mark.parametrize("permute", [None, 3])
def test_a_serial_device_waits_for_every_submission(permute):
    ran = []
    with open_device("cpu", Faults(serial=True, permute=permute)) as device:
        for lane in LANES:
            handle = device.submit(lane, "work", lambda lane=lane: (time.sleep(0.01), ran.append(lane)))
            assert handle.is_issued
            assert ran[-1] is lane
        assert sum(device.recorder.exposed_s().values()) > 0


def test_an_error_of_a_serial_device_comes_where_it_would_have_come():
    with open_device("cpu", Faults(serial=True)) as device:
        failed = device.submit(Lane.H2D, "fetch", lambda: 1 / 0)
        dependent = device.submit(Lane.D2H, "offload", lambda: None, after={"x": failed})
        for handle in (failed, dependent):
            with pytest.raises(LaneError, match="ZeroDivisionError"):
                handle.wait()


def test_serial_hides_no_race_from_the_checker():
    region = Region("host", 0, 10)
    with open_device("cpu", Faults(serial=True), RaceChecker()) as device:
        device.submit(Lane.H2D, "fetch", lambda: None, writes=[region])
        with pytest.raises(RaceError):
            device.submit(Lane.D2H, "offload", lambda: None, writes=[region])


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_pause_of_no_length_does_not_give_the_core_away(monkeypatch, seconds):
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("slept"))
    pause(seconds)
    with open_device("cpu") as device:
        device.compute("forward", after={"fetched": device.submit(Lane.H2D, "fetch", lambda: None)})
