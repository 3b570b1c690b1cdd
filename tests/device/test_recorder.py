"""The recorder keeps nothing while off; while on, it has every operation, wait and call, which add up to the step."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
import torch
from plans import prepare_for_test
from torch import nn

import outcore
from outcore.core.errors import LaneError
from outcore.device import cuda as device_cuda
from outcore.device.faults import Faults
from outcore.device.lanes import Handle
from outcore.device.opening import open_device
from outcore.device.recorder import MAX_SPANS, HostStopwatch, Recorder
from outcore.engine.module.timing import timing
from outcore.memory.arena import Region
from outcore.model.partition import partition
from outcore.optim.rules import rule_for
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.spec.lane_names import Lane
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.timeline import COMPUTE

NAP_S = 0.03


@pytest.fixture
def device():
    with open_device("cpu") as opened:
        yield opened


def nap():
    time.sleep(NAP_S)


def test_off_it_keeps_nothing(device):
    device.submit(Lane.H2D, "fetch", nap)
    device.compute("forward", after={"fetched": device.submit(Lane.D2H, "copy", nap)})
    with device.recorder.compute("forward"), device.recorder.step():
        device.synchronize()
    timeline = device.recorder.timeline()
    assert (timeline.spans, timeline.waits) == ((), ())


def test_an_operation_is_timed_around_its_work_not_its_wait(device):
    device.recorder.begin(num_steps=1)
    regions = [Region("host", 0, 10), Region("host", 20, 25)]
    first = device.submit(Lane.WEIGHTS_READ, "read", nap, reads=[Region("disk", 0, 99)], writes=regions)
    device.submit(Lane.H2D, "fetch", nap, writes=regions[:1], after={"read": first})
    device.synchronize()
    read, fetch = device.recorder.timeline().spans
    assert (read.lane, read.name, read.nbytes) == ("weights_read", "read", 15)
    assert (fetch.lane, fetch.name, fetch.nbytes) == ("h2d", "fetch", 10)
    assert read.duration_s >= NAP_S
    assert fetch.duration_s >= NAP_S
    assert fetch.start_s >= read.end_s


def test_a_throttled_operation_lasts_as_long_as_it_seems():
    with open_device("cpu", Faults(throttle={"h2d": 1000.0})) as device:
        device.recorder.begin(num_steps=1)
        device.submit(Lane.H2D, "fetch", lambda: None, writes=[Region("host", 0, 30)]).wait()
        device.synchronize()
        assert device.recorder.timeline().spans[0].duration_s >= NAP_S


def test_a_wait_stands_under_the_operation_that_is_waited_for(device):
    device.recorder.begin(num_steps=1)
    device.compute("forward", after={"fetched": device.submit(Lane.H2D, "fetch", nap)})
    device.wait("updated", device.submit(Lane.UPDATE, "update", nap))
    done = device.submit(Lane.H2D, "fetch", nap)
    device.synchronize()
    device.wait("done already", done)
    timeline = device.recorder.timeline()
    assert [(wait.lane, wait.name) for wait in timeline.waits] == [("h2d", "fetch"), ("update", "update")]
    ends_s = {(span.lane, span.name): span.end_s for span in reversed(timeline.spans)}  # of the first fetch
    assert all(wait.start_s < ends_s[wait.lane, wait.name] <= wait.end_s for wait in timeline.waits)


def test_what_fails_is_not_recorded_and_the_lane_goes_on(device):
    device.recorder.begin(num_steps=1)
    failed = device.submit(Lane.H2D, "fetch", lambda: 1 / 0)
    device.submit(Lane.H2D, "another", lambda: None).wait()
    with pytest.raises(LaneError):
        failed.wait()
    device.synchronize()
    assert [span.name for span in device.recorder.timeline().spans] == ["another"]


def test_a_recording_forgets_the_last_one_and_ends(device):
    for name in ("one", "two"):
        device.recorder.begin(num_steps=1)
        device.submit(Lane.H2D, name, nap).wait()
        device.synchronize()
        device.recorder.end()
    device.submit(Lane.H2D, "three", nap).wait()
    assert [span.name for span in device.recorder.timeline().spans] == ["two"]


def test_memory_is_bounded_by_steps_and_without_them():
    recorder = Recorder(HostStopwatch())
    recorder.begin(num_steps=3)
    for i in range(10):
        recorder.add("h2d", f"fetch {i}", time.perf_counter(), time.perf_counter())
        with recorder.step():
            pass
    names = [span.name for span in recorder.timeline().spans]
    assert names == ["step", "fetch 7", "step", "fetch 8", "step", "fetch 9", "step"], "three, and the one that began"
    for _ in range(MAX_SPANS + 10):
        recorder.add("h2d", "fetch", 0.0, 1.0)
        recorder.add_wait("h2d", "fetch", 0.0, 1.0)
    num_spans, num_waits = len(recorder.timeline().spans), len(recorder.timeline().waits)
    assert num_waits == MAX_SPANS
    assert num_spans == MAX_SPANS + len(names) - 1  # the spans that the last step settled, and those since


def test_lanes_may_add_while_a_step_forgets():
    recorder = Recorder(HostStopwatch())
    recorder.begin(num_steps=1000)

    def work():
        for _ in range(1000):
            recorder.add("h2d", "fetch", time.perf_counter(), time.perf_counter())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with recorder.step():
            recorder.timeline()
    assert sum(span.name == "fetch" for span in recorder.timeline().spans) == 3000


class Slow(nn.Module):
    """A block that takes its time, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        nap()
        return _SlowBackward.apply(x * self.weight)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        nap()
        return grad


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Slow() for _ in range(3))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        nap()
        return {"loss": self.head(x).mean(), "states": x}


def prepared(faults=None):
    torch.manual_seed(0)
    model = Row()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = rule_for(optimizer).state_names(optimizer.param_groups)
    spec = partition(model, units=[Slow], state_names=names).spec
    homes = ["device", "host", "host", "host"]
    units = [UnitPlan(name=u.name, weights=h, gradients=h, states=h) for u, h in zip(spec.units, homes, strict=True)]
    comfort = Comfort(prefetch_depth=1, num_buckets=1, max_slots_host=1)
    pools = pools_for(spec, units, comfort)
    plan = Plan(precision="fp32", units=tuple(units), pools=pools, prefetch_depth=1, accumulation_steps=1)
    return prepare_for_test(model, optimizer, faults=faults, plan=plan, units=[Slow], device="cpu")


def step(model, optimizer):
    loss = model(torch.ones(2, 64))["loss"]
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("serial", [False, True])
def test_compute_and_waits_explain_a_step(serial):
    faults = Faults(throttle={"h2d": 4096 / 0.05, "d2h": 4096 / 0.02, "update": 12288 / 0.02}, serial=serial)
    shares = []  # of the step's time: explained by waits and compute, and by phases, which contain waits
    close = pytest.approx((1.0, 1.0), rel=0.1)
    while len(shares) < 9 and close not in shares:  # another process may take time between them in one attempt
        shares.append(explained(faults))
    assert shares[-1] == close, shares


def explained(faults):
    with prepared(faults) as (model, optimizer):
        step(model, optimizer)
        with optimizer.recording() as recorder:
            before, before_s = optimizer.exposed_s(), recorder.phases_s()
            start_s = time.perf_counter()
            for _ in range(2):
                step(model, optimizer)
            end_s = time.perf_counter()
        timeline = recorder.timeline().between(start_s, end_s)
        busy_s, exposed_s = timeline.busy_s(), timeline.exposed_s()
        assert busy_s[COMPUTE] >= 2 * 10 * NAP_S  # 3 forwards, 3 recomputes, 3 backwards and the root
        assert exposed_s["h2d"] > 0.1
        summed_s = {lane: seconds - before[lane] for lane, seconds in optimizer.exposed_s().items()}
        assert summed_s == {lane: pytest.approx(exposed_s[lane]) for lane in summed_s}
        phases_s = recorder.phases_s() - before_s
    took_s = end_s - start_s
    return (busy_s[COMPUTE] + sum(exposed_s.values())) / took_s, phases_s / took_s


def test_a_step_has_calls_of_units_the_model_and_all_operations():
    with prepared() as (model, optimizer):
        step(model, optimizer)
        with optimizer.recording() as recorder:
            step(model, optimizer)
        optimizer.engine.device.synchronize()
        step(model, optimizer)
        timeline = recorder.timeline()
        compute = [span for span in timeline.spans if span.lane == COMPUTE]
        names = [span.name for span in compute]
        forwards, backwards = ([f"{phase} blocks.{i}" for i in range(3)] for phase in ("forward", "backward"))
        assert names == ["forward", *forwards, "backward", *reversed(backwards), "step"]
        spans = {span.name: span for span in timeline.spans}
        for phase, units in (("forward", forwards), ("backward", backwards)):
            assert all(spans[phase].start_s <= spans[n].start_s < spans[n].end_s <= spans[phase].end_s for n in units)
        lanes = {span.name: span.lane for span in timeline.spans}
        assert lanes["gradients of blocks.2"] == "d2h"
        assert {lane for name, lane in lanes.items() if name.startswith("fetch")} == {"h2d"}
        by_lane = [[s for s in timeline.spans if s.lane == lane] for lane in timeline.lanes() if lane != COMPUTE]
        assert all(a.end_s <= b.start_s for spans in by_lane for a, b in pairwise(spans)), "a lane is a queue"


def hooks_of(model) -> list[list[int]]:
    return [list(model._forward_hooks), list(model._forward_pre_hooks)]


def test_recording_changes_nothing_and_leaves_no_hooks():
    losses = []
    for is_recorded in (False, True):
        with prepared() as (model, optimizer):
            hooks = hooks_of(model)
            if is_recorded:
                with optimizer.recording():
                    losses.append([step(model, optimizer) for _ in range(3)])
            else:
                losses.append([step(model, optimizer) for _ in range(3)])
            assert hooks_of(model) == hooks
    assert losses[0] == losses[1]


def test_a_recording_may_begin_and_end_inside_a_forward():
    with prepared() as (model, optimizer):
        recordings = []

        def begin(*_):
            recordings.append(optimizer.recording())
            recordings[-1].__enter__()

        hook = model.blocks[0].register_forward_hook(begin)
        model(torch.ones(2, 64))["loss"].backward()
        hook.remove()
        recordings[0].__exit__(None, None, None)
        recorder = optimizer.engine.device.recorder
        assert {"forward blocks.1", "backward blocks.0"} <= {span.name for span in recorder.timeline().spans}


class _Event:
    """Stands in for a CUDA event: it is over once the device's clock has reached ``at_ms``."""

    now_ms = 0.0

    def __init__(self, at_ms):
        self.at_ms = at_ms

    def query(self):
        return self.at_ms <= _Event.now_ms

    def synchronize(self):
        _Event.now_ms = max(_Event.now_ms, self.at_ms)

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "not over"
        return end.at_ms - self.at_ms


def test_moments_of_a_stream_are_told_on_the_hosts_clock(monkeypatch):
    monkeypatch.setattr(_Event, "now_ms", 0.0)
    made = iter([0.0, 100.0, 150.0, 2000.0, 3000.0, 1500.0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(device_cuda.StreamStopwatch, "_event", lambda _: _Event(next(made)))
    stopwatch = device_cuda.StreamStopwatch(torch.device("cuda", 0))  # this starts it, too
    stopwatch.begin()  # at 100 ms of the device, 7 s of the host
    first = stopwatch.now()
    stopwatch.tick()  # another anchor, at 2000 ms
    late, early = stopwatch.now(), stopwatch.now()
    _Event.now_ms = 1600.0
    assert (first.is_over(), late.is_over()) == (True, False)
    assert not early.is_over(), "its anchor is not"
    assert late.seconds() == pytest.approx(7.0 + 2.9)
    assert early.is_over()
    assert (first.seconds(), early.seconds()) == (pytest.approx(7.05), pytest.approx(8.4))


def test_entries_of_a_stream_become_seconds_when_they_are_over(monkeypatch):
    monkeypatch.setattr(_Event, "now_ms", 0.0)
    recorder = Recorder(HostStopwatch())
    recorder.begin(num_steps=1)
    anchor = device_cuda._ClockAnchor(_Event(0.0), 0.0, None)
    moments = [device_cuda.StreamMoment(_Event(ms), anchor) for ms in (1e9, 2e9, 3e9)]
    recorder.add("h2d", "fetch", moments[0], moments[1])
    recorder.add("h2d", "another", moments[1], moments[2])
    _Event.now_ms = 2e9
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    for _ in range(3):
        with recorder.step():
            pass
    assert _Event.now_ms == 2e9, "no step blocked"
    spans = recorder.timeline().spans  # blocks until the rest is over
    assert [(s.start_s, s.end_s) for s in spans if s.lane == "h2d"] == [(1e6, 2e6), (2e6, 3e6)]


def moment(ms):
    return device_cuda.StreamMoment(_Event(ms), device_cuda._ClockAnchor(_Event(0.0), 0.0, None))


def test_waits_of_a_stream_are_added_up_when_they_are_over_and_nothing_blocks(monkeypatch):
    monkeypatch.setattr(_Event, "now_ms", 0.0)
    monkeypatch.setattr(_Event, "synchronize", lambda _: pytest.fail("blocked"))
    recorder = Recorder(HostStopwatch())
    recorder.add_phase("forward", moment(100), moment(500))
    recorder.add_wait("h2d", "fetch", moment(500), moment(700))
    recorder.add_wait("d2h", "gradients", moment(700), moment(750))
    assert (recorder.phases_s(), set(recorder.exposed_s().values())) == (0.0, {0.0})
    _Event.now_ms = 720
    assert recorder.phases_s() == pytest.approx(0.4)
    assert {lane: s for lane, s in recorder.exposed_s().items() if s} == {"h2d": pytest.approx(0.2)}
    _Event.now_ms = 1000
    recorder.add_wait("h2d", "another", moment(900), moment(950))
    assert {lane: s for lane, s in recorder.exposed_s().items() if s} == {
        "h2d": pytest.approx(0.25),
        "d2h": pytest.approx(0.05),
    }
    assert not recorder.timeline().waits, "it was off"


class _Streams:
    """Stands in for a CUDA device that orders compute behind lanes of the CPU."""

    torch_device = torch.device("cpu")

    def __init__(self, device):
        self.recorder, self._blocked_by = device.recorder, device._blocked_by

    order_compute = device_cuda.CudaDevice._order_compute


def test_compute_of_a_stream_is_put_behind_operations_and_raises_what_they_raised(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    streams, ran = _Streams(device), []
    fetched = device.submit(Lane.H2D, "fetch", lambda: (nap(), ran.append("fetch")))
    streams.order_compute((fetched,))
    assert ran == ["fetch"]
    assert device.recorder.exposed_s()["h2d"] >= 0.9 * NAP_S
    with pytest.raises(LaneError, match="ZeroDivisionError"):
        streams.order_compute((device.submit(Lane.H2D, "fetch", lambda: 1 / 0),))


def test_waits_are_added_up_without_being_asked_for(device):
    device.wait("fetched", device.submit(Lane.H2D, "fetch", nap))
    with pytest.raises(LaneError):
        device.wait("fetched", device.submit(Lane.D2H, "copy", lambda: (nap(), 1 / 0)))
    exposed_s = device.recorder.exposed_s()
    assert exposed_s["h2d"] >= 0.9 * NAP_S
    assert exposed_s["d2h"] >= 0.9 * NAP_S
    assert exposed_s.keys() == {lane.value for lane in Lane}
    for _ in range(3):
        device.wait("over", device.submit(Lane.H2D, "fetch", lambda: None))
        device.synchronize()
    assert device.recorder.exposed_s()["update"] == 0.0


def test_a_wait_for_compute_itself_is_none(device):
    handle = Handle("backward is over", COMPUTE, None)
    device._blocked_by(handle, nap)
    assert not any(device.recorder.exposed_s().values())
    assert device.recorder.phases_s() == 0.0


def test_phases_are_timed_while_asked_for_recorded_or_not():
    with prepared() as (model, optimizer):
        hooks = hooks_of(model)
        recorder = optimizer.engine.device.recorder
        step(model, optimizer)
        before_s = recorder.phases_s()
        assert before_s < 20 * NAP_S, "step() alone"
        with timing(model, recorder):
            step(model, optimizer)
            assert recorder.phases_s() - before_s >= 10 * NAP_S
            loss = model(torch.ones(2, 64))["loss"]
        before_s = recorder.phases_s()
        loss.backward()
        assert recorder.phases_s() == before_s, "a backward after the block"
        assert not recorder.timeline().spans
        assert hooks_of(model) == hooks


def test_prepare_still_needs_no_recorder():
    assert "recording" not in outcore.__all__
