"""The recorder on a GPU: work and waits of streams are timed on the streams, without blocking."""

from __future__ import annotations

import time

import pytest
import torch

from outcore.device.opening import open_device
from outcore.memory.arena import Region
from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE

pytestmark = pytest.mark.gpu

CYCLES = 400_000_000  # 0.2 to 0.4 s: far longer than any launch
LATE_S = 0.05
"""What may lie between an event and the host's look at the clock, on a machine with other programs."""


def sleep() -> None:
    torch.cuda._sleep(CYCLES)


def test_copies_compute_and_its_waits_are_timed_on_their_streams():
    with open_device("cuda") as device:
        torch.cuda._sleep(1)  # loading the kernel takes time
        device.recorder.begin(num_steps=1)
        start_s = time.perf_counter()
        fetched = device.submit(Lane.H2D, "fetch", sleep, writes=[Region("device", 0, 10)])
        device.compute("forward", after={"fetched": fetched})
        with device.recorder.compute("forward"):
            sleep()
        over = torch.cuda.Event()
        over.record()
        with device.recorder.step():
            pass
        assert not over.query(), "nothing blocked"
        timeline = device.recorder.timeline()
        end_s = time.perf_counter()
        exposed_s = device.recorder.exposed_s()
    spans = {span.name: span for span in timeline.spans}
    fetch, forward, (wait,) = spans["fetch"], spans["forward"], timeline.waits
    assert (fetch.lane, fetch.nbytes, forward.lane) == ("h2d", 10, COMPUTE)
    assert (wait.lane, wait.name) == ("h2d", "fetch")
    assert fetch.duration_s > 0.05
    assert forward.duration_s > 0.05
    assert wait.duration_s == pytest.approx(fetch.duration_s, rel=0.2)
    assert forward.start_s >= fetch.end_s - 1e-3
    assert start_s - LATE_S <= fetch.start_s
    assert forward.end_s <= end_s + LATE_S
    assert exposed_s["h2d"] == pytest.approx(wait.duration_s, rel=0.2), "also without a recording"


def test_compute_that_need_not_wait_shows_no_wait():
    with open_device("cuda") as device:
        device.recorder.begin(num_steps=1)
        fetched = device.submit(Lane.H2D, "fetch", lambda: None)
        device.synchronize()
        device.compute("forward", after={"fetched": fetched})
        assert not device.recorder.timeline().waits
