"""Operations without progress: a wait gives up with an error that names them, and closing does not hang."""

from __future__ import annotations

import threading
import time

import pytest

from outcore.core.errors import DiskError, LaneError
from outcore.device.opening import open_device
from outcore.spec.lane_names import Lane

BOUND_S = 0.1


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    monkeypatch.setattr("outcore.device.threads.STALL_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.device.threads.CLOSE_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.device.threads._END_TIMEOUT_S", BOUND_S)


class Stuck:
    """Work that does not end before it is released."""

    def __init__(self):
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        self.release.wait(30)


@pytest.fixture
def stuck():
    work = Stuck()
    yield work
    work.release.set()


def close_left_behind(device):
    start_s = time.monotonic()
    with pytest.raises(LaneError, match=r"still runs; its thread is left behind"):
        device.close()
    assert time.monotonic() - start_s < 10  # seconds; the stuck operation would last 30
    device.close()


@pytest.mark.parametrize("waits_for", ["itself", "what comes behind it", "a dependent", "a dependent's dependent"])
def test_a_wait_names_what_makes_no_progress(stuck, waits_for):
    device = open_device("cpu")
    handles = {"itself": device.submit(Lane.UPDATE, "update layers.3", stuck)}
    handles["what comes behind it"] = device.submit(Lane.UPDATE, "update layers.4", lambda: None)
    handles["a dependent"] = device.submit(Lane.H2D, "fetch", lambda: None, after={"x": handles["itself"]})
    handles["a dependent's dependent"] = device.submit(Lane.D2H, "x", lambda: None, after={"x": handles["a dependent"]})
    for _ in range(2):  # every wait raises
        with pytest.raises(
            LaneError,
            match=r"'update layers\.3' on lane update \(on the host\) to finish, but it has made no progress for 0.1 s",
        ):
            handles[waits_for].wait()
    close_left_behind(device)


def test_after_a_stall_only_closing_is_left(stuck):
    device = open_device("cpu")
    handle = device.submit(Lane.H2D, "fetch layers.3", stuck)
    done = device.submit(Lane.D2H, "done", lambda: None)
    done.wait()
    calls = {
        "compute": lambda: device.compute("use", after={"weights fetched": handle}),
        "wait": lambda: device.wait("weights fetched", handle),
        "submit": lambda: device.submit(Lane.D2H, "other", lambda: None),
        "synchronize": device.synchronize,
    }
    for call in calls.values():
        with pytest.raises(LaneError, match=r"'fetch layers\.3' on lane h2d \(host to device\)"):
            call()
    done.wait()  # a finished operation stays finished
    device.check()  # a caller has already seen the error
    close_left_behind(device)


def test_what_depended_on_it_has_failed_when_it_comes_back(stuck):
    device = open_device("cpu")
    ran = []
    handle = device.submit(Lane.H2D, "fetch", stuck)
    dependent = device.submit(Lane.UPDATE, "dependent", lambda: ran.append("dependent"), after={"x": handle})
    with pytest.raises(LaneError, match="no progress"):
        handle.wait()
    stuck.release.set()
    dependent.block(30)
    with pytest.raises(LaneError, match="'fetch' on lane h2d"):
        dependent.wait()
    assert not ran
    device.close()  # no thread is left behind any more


def test_many_short_operations_are_no_stall():
    with open_device("cpu") as device:
        handles = [device.submit(Lane.UPDATE, f"update {i}", lambda: time.sleep(BOUND_S / 3)) for i in range(6)]
        device.submit(Lane.H2D, "fetch", lambda: None, after={"weights updated": handles}).wait()


@pytest.mark.parametrize("lane", [Lane.WEIGHTS_READ, Lane.STATES_READ, Lane.DISK_WRITE, Lane.STATES_WRITE])
def test_a_long_transfer_of_the_disk_is_no_stall(lane):
    with open_device("cpu") as device:
        device.submit(lane, "read", lambda: time.sleep(3 * BOUND_S)).wait()


def test_an_error_is_not_a_stall(stuck):
    def fail():
        raise DiskError("short read")

    device = open_device("cpu")
    device.submit(Lane.UPDATE, "update", stuck)
    stuck.begun.wait(30)
    with pytest.raises(DiskError, match="short read"):
        device.submit(Lane.STATES_READ, "read", fail).wait()
    close_left_behind(device)


def test_closing_names_what_still_runs_and_ends_what_waits_for_it(stuck):
    device = open_device("cpu")
    handle = device.submit(Lane.H2D, "fetch layers.3", stuck)
    stuck.begun.wait(30)
    dependent = device.submit(Lane.UPDATE, "update", lambda: None, after={"x": handle})
    with pytest.raises(LaneError, match=r"0.1 s of close, but 'fetch layers\.3' on lane h2d still runs"):
        device.close()
    with pytest.raises(LaneError):
        dependent.wait()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("outcore")]
    assert left == ["outcore-h2d"]
