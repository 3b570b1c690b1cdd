"""Lanes and handles on threads: order, dependencies, errors, closing, and the number of ATen threads of each thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref

import nursery
import pytest
import torch

from outcore.core.errors import DiskError, LaneError
from outcore.device.faults import Faults
from outcore.device.lanes import Handle
from outcore.device.opening import open_device
from outcore.device.threads import start_threads
from outcore.order.ledger import newest
from outcore.spec.lane_names import RANK_LANES, Lane

NUMEL = 1_000_003  # large enough that torch splits the sum among threads, and odd


@pytest.fixture(params=[None, 1], ids=["threads", "permuted"])
def device(request):
    with open_device("cpu", Faults(permute=request.param)) as opened:
        yield opened


def test_a_lane_is_first_in_first_out(device):
    ran = []
    handles = [device.submit(Lane.H2D, f"copy {i}", lambda i=i: ran.append(i)) for i in range(50)]
    handles[-1].wait()
    assert ran == list(range(50))
    assert all(handle.done() for handle in handles)


def test_submit_returns_before_the_work_ran():
    with open_device("cpu") as device:
        release = threading.Event()
        handle = device.submit(Lane.UPDATE, "update", release.wait)
        assert not handle.done()
        release.set()
        handle.wait()
        assert handle.done()


def test_lanes_run_beside_one_another():
    with open_device("cpu") as device:
        met = threading.Barrier(len(Lane), timeout=30)  # breaks unless all lanes are in an operation at once
        for handle in [device.submit(lane, "meet", met.wait) for lane in Lane]:
            handle.wait()


def test_an_operation_comes_after_its_dependencies():
    ran = []
    with open_device("cpu") as device:
        release = threading.Event()

        def read():
            release.wait()
            ran.append("read")

        first = device.submit(Lane.WEIGHTS_READ, "read", read)
        copy = device.submit(Lane.H2D, "copy", lambda: ran.append("copy"), after={"weights read": first})
        device.submit(Lane.D2H, "other", lambda: ran.append("other")).wait()
        release.set()
        copy.wait()
    assert ran == ["other", "read", "copy"]


def test_a_dependency_may_be_none_a_handle_or_several(device):
    ran = []
    others = [lane for lane in Lane if lane is not Lane.UPDATE]
    handles = (device.submit(lane, lane.value, lambda lane=lane: ran.append(lane)) for lane in others)
    last = device.submit(
        Lane.UPDATE, "update", lambda: ran.append(Lane.UPDATE), after={"a": None, "b": [None], "c": handles, "d": []}
    )
    last.wait()
    assert set(ran) == set(Lane)
    assert ran[-1] is Lane.UPDATE
    assert device.labels_seen == {"c"}


def test_compute_waits_for_its_dependencies(device):
    target = torch.zeros(5)
    fetched = device.submit(Lane.H2D, "fetch", lambda: target.fill_(3.0))
    used = device.compute("forward", after={"weights fetched": fetched})
    assert target.tolist() == [3.0] * 5
    assert used.done()
    assert device.mark("forward is over").done()


def test_an_error_of_the_family_is_raised_as_it_is(device):
    def fail():
        raise DiskError("short read")

    handle = device.submit(Lane.STATES_READ, "read states of layers.3", fail)
    for _ in range(2):  # every wait raises
        with pytest.raises(DiskError, match="short read") as caught:
            handle.wait()
    assert "fail" in [entry.name for entry in caught.traceback]


def test_any_other_error_is_a_lane_error_that_names_the_operation(device):
    handle = device.submit(Lane.H2D, "fetch layers.3", lambda: 1 // 0)
    with pytest.raises(LaneError, match=r"'fetch layers\.3' on lane h2d .* ZeroDivisionError") as caught:
        device.wait("weights fetched", handle)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert handle.done()


def test_dependents_fail_without_running_and_the_lane_goes_on(device):
    ran = []
    bad = device.submit(Lane.H2D, "bad", lambda: 1 // 0)
    child = device.submit(Lane.D2H, "child", lambda: ran.append("child"), after={"x": bad})
    grandchild = device.submit(Lane.H2D, "grandchild", lambda: ran.append("grandchild"), after={"x": [None, child]})
    good = device.submit(Lane.H2D, "good", lambda: ran.append("good"))
    good.wait()
    with pytest.raises(LaneError, match="'bad' on lane h2d"):
        grandchild.wait()
    with pytest.raises(LaneError, match="'bad' on lane h2d"):
        device.compute("use", after={"x": child})
    assert ran == ["good"]


def test_check_raises_each_unseen_error_once(device):
    device.check()
    device.submit(Lane.H2D, "first", lambda: 1 // 0)
    device.synchronize()  # raises nothing
    seen = device.submit(Lane.H2D, "second", lambda: 1 // 0)
    device.submit(Lane.H2D, "third", lambda: 1 // 0, after={})
    device.submit(Lane.H2D, "follows", lambda: None, after={"x": seen})
    with pytest.raises(LaneError, match="'second'"):
        seen.wait()
    device.synchronize()
    with pytest.raises(LaneError, match="'first'"):
        device.check()
    with pytest.raises(LaneError, match="'third'"):
        device.check()
    device.check()


def test_synchronize_empties_every_lane(device):
    ran = []
    for i in range(4):
        for lane in Lane:
            device.submit(lane, "append", lambda i=i: ran.append(i))
    device.synchronize()
    assert len(ran) == 4 * len(Lane)


def _submit_until_refused(device):
    while True:
        device.submit(Lane.DISK_WRITE, "late", lambda: None)


def test_close_ends_the_running_operation_and_fails_the_queued_ones():
    device = open_device("cpu")
    begun, release, ran = threading.Event(), threading.Event(), []

    def run():
        begun.set()
        release.wait()
        ran.append("running")

    running = device.submit(Lane.H2D, "running", run)
    queued = device.submit(Lane.H2D, "queued", lambda: ran.append("queued"))
    dependent = device.submit(Lane.UPDATE, "dependent", lambda: ran.append("dependent"), after={"x": queued})
    begun.wait()
    closing = threading.Thread(target=device.close)
    closing.start()
    with pytest.raises(LaneError, match="closed"):
        _submit_until_refused(device)
    release.set()
    closing.join()
    running.wait()
    for handle in (queued, dependent):
        with pytest.raises(LaneError, match="to run on lane .*, but the device was closed before its turn"):
            handle.wait()
    assert ran == ["running"]
    device.check()  # cancelled operations raise nothing


def test_close_reports_an_operation_that_does_not_end(monkeypatch):
    monkeypatch.setattr("outcore.device.threads.CLOSE_TIMEOUT_S", 0.05)
    device = open_device("cpu")
    begun, release = threading.Event(), threading.Event()
    stuck = device.submit(Lane.DISK_WRITE, "stuck", lambda: (begun.set(), release.wait()))
    begun.wait()
    dependent = device.submit(Lane.UPDATE, "dependent", lambda: None, after={"x": stuck})
    with pytest.raises(LaneError, match="'stuck' on lane disk_write still runs; its thread is left behind"):
        device.close()
    with pytest.raises(LaneError, match=r"'stuck' on lane disk_write \(host to disk\) to finish, but it still runs"):
        stuck.wait()
    with pytest.raises(LaneError):
        dependent.wait()
    release.set()


def test_close_twice_and_after_an_error(device):
    device.submit(Lane.H2D, "bad", lambda: 1 // 0)
    device.close()
    device.close()
    with pytest.raises(LaneError, match="'late' on lane h2d, but it is closed"):
        device.submit(Lane.H2D, "late", lambda: None)


def test_closing_leaves_no_threads(device):
    names = {"outcore-permuted"} | {f"outcore-{lane.value}" for lane in Lane}
    assert names & {thread.name for thread in threading.enumerate()}
    device.close()
    assert not names & {thread.name for thread in threading.enumerate()}


def test_a_device_that_nobody_holds_closes_itself(device):
    other = open_device("cpu", device.faults)
    threads = threading.active_count()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert threading.active_count() == threads - (len(Lane) - len(RANK_LANES) if device.faults.permute is None else 1)


def test_lanes_and_handles_keep_nothing_alive(device):
    class Payload:
        pass

    payload = Payload()
    gone = weakref.ref(payload)
    first = device.submit(Lane.H2D, "first", lambda held=payload: held)
    second = device.submit(Lane.H2D, "second", lambda held=payload: held, after={"x": first})
    second.wait()
    device.synchronize()
    device.submit(Lane.D2H, "other", lambda: None).wait()
    del payload, first
    gc.collect()
    for _ in range(1000):  # the lane drops the operation just after it settles the handle
        if gone() is None:
            break
        device.submit(Lane.UPDATE, "time passes", lambda: None).wait()
    assert gone() is None
    assert second.done()


def test_operations_neither_submit_nor_wait(device):
    submitting = device.submit(Lane.H2D, "outer", lambda: device.submit(Lane.D2H, "inner", lambda: None))
    with pytest.raises(LaneError, match="submit 'inner' inside an operation"):
        submitting.wait()
    never = Handle("never", "h2d", device._lanes)
    waiting = device.submit(Lane.UPDATE, "waiting", never.wait)
    with pytest.raises(LaneError, match="wait for 'never' inside an operation"):
        waiting.wait()
    looking = device.submit(Lane.UPDATE, "looking", never.done)
    looking.wait()  # asking does not wait


def test_the_callers_modes_do_not_reach_an_operation(device):
    seen = []

    def look():
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        device.submit(Lane.UPDATE, "look", look).wait()
    assert seen == [(False, False)]
    assert torch.is_grad_enabled()


def test_newest_keeps_the_last_handle_of_each_lane(device):
    a, b, c = (device.submit(lane, "x", lambda: None) for lane in (Lane.H2D, Lane.D2H, Lane.H2D))
    mark = device.mark("m")
    assert set(newest([a, b, c, mark])) == {b, c, mark}
    device.synchronize()


def _in_new_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_operations_run_with_one_aten_thread(three_threads, device):
    counts = []

    def work():
        torch.randn(NUMEL).sum()  # a thread adopts the default count at its first parallel kernel
        counts.append(torch.get_num_threads())

    for lane in Lane:
        device.submit(lane, "count", work).wait()
    assert counts == [1] * len(Lane)


def test_the_main_thread_keeps_its_count_and_its_bits(three_threads):
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    before = values.sum()
    with open_device("cpu") as device:
        device.submit(Lane.UPDATE, "sum", values.sum).wait()
        assert torch.get_num_threads() == 3
        assert torch.equal(values.sum(), before)
    assert torch.get_num_threads() == 3
    assert torch.equal(values.sum(), before)


def test_later_threads_inherit_what_they_would_have(three_threads):
    with open_device("cpu"):
        assert _in_new_thread(torch.get_num_threads) == 3
        torch.set_num_threads(2)  # the user changes it later
        assert _in_new_thread(torch.get_num_threads) == 2
    torch.set_num_threads(3)


def test_threads_that_exist_but_ran_no_kernel_yet_are_unaffected(three_threads):
    go, counts = threading.Event(), []
    user = threading.Thread(target=lambda: (go.wait(), counts.append(torch.get_num_threads())))
    user.start()
    with open_device("cpu"):
        go.set()
        user.join()
    assert counts == [3]


def test_a_body_that_cannot_start_does_not_hang_the_others(monkeypatch, three_threads):
    ran, start = [], threading.Thread.start

    def refuse(thread):
        if thread.name == "b":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        start_threads({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")})
    assert not ran
    assert torch.get_num_threads() == 3
    assert _in_new_thread(torch.get_num_threads) == 3


def _hold(lock, locked, until):
    with lock:
        locked.set()
        until.wait()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("permute", [None, 1])
def test_a_forked_child_has_no_lanes(permute):
    with open_device("cpu", Faults(permute=permute)) as device:
        release = threading.Event()
        if permute is None:
            pending = device.submit(Lane.H2D, "pending", release.wait)
        locked, forked = threading.Event(), threading.Event()
        holder = threading.Thread(target=_hold, args=(device._lanes._lock, locked, forked))
        holder.start()
        locked.wait()
        child = os.fork()  # exactly while another thread is submitting
        if child == 0:
            status = 1
            try:
                signal.alarm(30)  # ends a child that hangs
                device.close()
                refused = 0
                for call in (lambda: device.submit(Lane.H2D, "x", lambda: None), device.synchronize):
                    try:
                        call()
                    except LaneError as error:
                        refused += "forked child" in str(error)
                if permute is None:
                    try:
                        pending.wait()
                    except LaneError as error:
                        refused += "forked child" in str(error)
                status = 0 if refused == (3 if permute is None else 2) else 2
            finally:
                os._exit(status)
        forked.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
        release.set()
        ran = []
        device.submit(Lane.H2D, "still works", lambda: ran.append(1)).wait()
        assert ran == [1]


@pytest.mark.parametrize("permute", [None, 1])
def test_the_interpreter_exits_with_work_queued_and_no_close(permute):
    program = f"""
import time, torch
from outcore.device.opening import open_device
from outcore.device.faults import Faults
from outcore.spec.lane_names import RANK_LANES, Lane
device = open_device("cpu", Faults(permute={permute}))
for lane in Lane:
    for i in range(50):
        device.submit(lane, "work", lambda: (time.sleep(0.001), torch.randn(1000).sum()))
print("end")
"""
    done = nursery.run(
        [sys.executable, "-c", program], kind=nursery.Whole, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
