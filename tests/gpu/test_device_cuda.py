"""Lanes on a GPU: streams that are kept busy prove the order, never clocks."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch

from outcore.core.errors import LaneError
from outcore.device import cuda as device_cuda
from outcore.device.faults import Faults
from outcore.device.opening import open_device
from outcore.device.race import RaceChecker
from outcore.memory.arena import Arena, Region
from outcore.memory.host import HostMemory
from outcore.spec.lane_names import Lane

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # 0.1 to 0.2 s: far longer than any launch
NUMEL = 1_000_003


@pytest.fixture(params=[None, 1], ids=["threads", "permuted"])
def device(request):
    with open_device("cuda", Faults(permute=request.param)) as opened:
        yield opened


@pytest.fixture
def pinned(device):
    memory = torch.zeros(4 * (NUMEL + 1021), dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :][: 4 * NUMEL]
    assert device.register_host(memory)
    yield memory.view(torch.float32)
    device.synchronize()
    device.unregister_host(memory)


def test_it_is_the_default_device(device):
    with open_device() as default:
        assert default.torch_device.type == "cuda"
        assert default.torch_device == torch.device("cuda", torch.cuda.current_device())


def test_allocated_memory_is_aligned(device):
    memory = device.allocate(1_000_003)
    assert memory.is_cuda
    assert memory.data_ptr() % 4096 == 0
    assert memory.shape == (1_000_003,)
    assert device.memory_bytes() > 0


def test_registered_memory_is_pinned_everywhere_and_no_longer_afterwards(device):
    with HostMemory.open((3 << 20) + 4096) as opened:  # its tensor's storage begins where the registration does
        memory = opened.tensor
        assert device.register_host(memory)
        assert all(memory[start : start + 4096].is_pinned() for start in range(0, memory.numel(), 1 << 19))
        middle = memory[1 << 19 : 5 << 19].fill_(3)
        assert torch.equal(middle.to("cuda", non_blocking=True).cpu(), middle)
        device.unregister_host(memory)
        assert not memory[: 1 << 19].is_pinned()


def test_a_refused_registration_leaves_no_error_behind(device):
    memory = device_cuda.aligned_bytes(1 << 20, torch.device("cpu"))
    assert device.register_host(memory)
    assert not device.register_host(memory)  # twice is an error
    assert torch.ones(3, device="cuda").sum().item() == 3  # a remembered error would surface here
    device.unregister_host(memory)


def test_a_fetch_waits_on_the_device_for_compute_that_reads_the_slot(device, pinned):
    slot = torch.ones(NUMEL, device="cuda")
    pinned.fill_(2.0)
    torch.cuda._sleep(CYCLES)
    seen = slot * 1
    used = device.mark("forward is over")
    fetched = device.submit(Lane.H2D, "fetch", lambda: slot.copy_(pinned, non_blocking=True), after={"slot free": used})
    device.compute("forward", after={"weights fetched": fetched})
    now = slot * 1
    assert (seen == 1).all()
    assert (now == 2).all()


def test_a_handle_of_compute_covers_the_access_it_declares(device, pinned):
    slot = torch.ones(NUMEL, device="cuda")
    pinned.fill_(2.0)
    used = device.compute("forward")
    torch.cuda._sleep(CYCLES)
    seen = slot * 1
    device.submit(Lane.H2D, "fetch", lambda: slot.copy_(pinned, non_blocking=True), after={"slot free": used}).wait()
    assert (seen == 1).all()


def test_compute_waits_for_a_late_copy_without_blocking_the_host(device, pinned):
    slot = torch.ones(NUMEL, device="cuda")
    pinned.fill_(2.0)

    def late():
        torch.cuda._sleep(CYCLES)
        slot.copy_(pinned, non_blocking=True)

    fetched = device.submit(Lane.H2D, "fetch", late, after={"slot made": device.mark("made")})
    device.compute("forward", after={"weights fetched": fetched})
    assert not fetched.done()
    assert (slot * 1 == 2).all()
    assert fetched.done()


def test_copy_lanes_wait_for_one_another_on_the_device(device, pinned):
    slot = torch.ones(NUMEL, device="cuda")

    def late():
        torch.cuda._sleep(CYCLES)
        slot.fill_(5.0)

    filled = device.submit(Lane.H2D, "fill", late, after={"slot made": device.mark("made")})
    left = device.submit(Lane.D2H, "offload", lambda: pinned.copy_(slot, non_blocking=True), after={"filled": filled})
    left.wait()
    assert (pinned == 5).all()


def test_states_come_one_after_another_and_let_fetches_pass(device, pinned):
    there = torch.empty_like(pinned, device="cuda")

    def stage() -> None:
        torch.cuda._sleep(CYCLES)
        there.copy_(pinned, non_blocking=True)

    first, second = (device.submit(Lane.STATES_H2D, "stage", stage) for _ in range(2))
    device.submit(Lane.H2D, "fetch", lambda: there.copy_(pinned, non_blocking=True)).wait_issued()
    first.wait_issued()
    assert not first.done()
    assert not second.is_issued
    second.wait_issued()
    assert first.done()


def test_host_lanes_and_the_host_wait_until_the_bytes_are_there(device, pinned):
    slot, seen = torch.full((NUMEL,), 5.0, device="cuda"), []
    torch.cuda.synchronize()

    def late():
        torch.cuda._sleep(CYCLES)
        pinned.copy_(slot, non_blocking=True)

    left = device.submit(Lane.D2H, "offload", late)
    update = device.submit(Lane.UPDATE, "update", lambda: seen.append(bool((pinned == 5).all())), after={"x": left})
    update.wait()
    assert seen == [True]
    mark_after = torch.full((NUMEL,), 6.0, device="cuda")
    torch.cuda._sleep(CYCLES)
    pinned.copy_(mark_after, non_blocking=True)
    device.wait("computed", device.mark("copied"))
    assert (pinned == 6).all()


def test_a_tensor_handed_over_may_be_freed_before_the_lane_is_done(device, pinned):
    gradient = torch.full((NUMEL,), 7.0, device="cuda")
    ready = device.mark("backward is over")
    device.hand_over(gradient, Lane.D2H)

    def late(tensor=gradient):
        torch.cuda._sleep(CYCLES)
        pinned.copy_(tensor, non_blocking=True)

    left = device.submit(Lane.D2H, "offload", late, after={"gradients ready": ready})
    left.wait_issued()
    del gradient, late
    torch.full((NUMEL,), 8.0, device="cuda")  # would get the same memory if it were free
    left.wait()
    assert (pinned == 7).all()


def test_poison_is_written_on_the_lane():
    with open_device("cuda", Faults(poison=True), RaceChecker()) as device:
        buffer = Arena("device", device.allocate(1 << 20)).take(1 << 20)
        buffer.bytes.zero_()
        poisoned = device.poison(buffer, Lane.H2D, {"free": device.mark("over")})
        device.compute("look", reads=[buffer.region], after={"poisoned": poisoned})
        assert buffer.tensor(torch.bfloat16, (1 << 19,)).isnan().all()


def test_delays_reach_the_streams():
    faults = Faults(delays={"h2d": 0.2, "d2h": 0.2, "update": 0.01, "compute": 0.05}, seed=1)
    region = Region("device", 0, 4)
    with open_device("cuda", faults, RaceChecker()) as device:
        slot = torch.zeros(1, device="cuda")
        device.synchronize()
        handle = device.submit(Lane.H2D, "fill", lambda: slot.fill_(1.0), writes=[region])
        device.compute("read", reads=[region], after={"filled": handle})
        assert slot.item() == 1.0


def test_errors_fail_dependents_and_leave_the_lane_alive(device):
    bad = device.submit(Lane.H2D, "bad copy", lambda: torch.zeros(3, device="cuda").copy_(torch.zeros(4)))
    child = device.submit(Lane.D2H, "child", lambda: None, after={"x": bad})
    device.submit(Lane.H2D, "good", lambda: None).wait()
    with pytest.raises(LaneError, match="'bad copy' on lane h2d"):
        child.wait()
    with pytest.raises(LaneError, match="'bad copy'"):
        device.compute("use", after={"x": child})
    device.check()


def test_the_random_states_come_back(device):
    state = device.rng_state()
    first = torch.rand(5), torch.rand(5, device="cuda")
    device.set_rng_state(state)
    assert torch.equal(torch.rand(5), first[0])
    assert torch.equal(torch.rand(5, device="cuda"), first[1])


def test_backward_runs_on_another_thread_and_may_submit(device, pinned):
    class Offload(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ready = device.mark("backward")
            device.hand_over(grad, Lane.D2H)
            left = device.submit(
                Lane.D2H, "offload", lambda: pinned.copy_(grad, non_blocking=True), after={"gradients ready": ready}
            )
            device.compute("bucket free", after={"left": left})
            return grad

    x = torch.ones(NUMEL, device="cuda", requires_grad=True)
    Offload.apply(x).backward(torch.full((NUMEL,), 9.0, device="cuda"))
    device.synchronize()
    assert (pinned == 9).all()
    assert (x.grad == 9).all()


def test_the_host_arena_can_be_pinned(device):
    with HostMemory.open(3 * 4096) as memory:
        assert device.register_host(memory.tensor)
        assert memory.tensor[4096:].is_pinned()
        device.unregister_host(memory.tensor)


def test_a_forked_child_destroys_no_event(device):
    """Torch ends a process that destroys an event without a driver, such as a DataLoader's worker."""
    points = [device_cuda.StreamPoint(torch.cuda.current_stream()) for _ in range(2)]
    events = [weakref.ref(point.event) for point in points]
    held = points.pop()
    points.append(points)  # a cycle, left to the garbage collector
    del points
    child = os.fork()
    if child == 0:
        del held
        gc.collect()
        os._exit(any(event() is None for event in events))
    assert os.waitpid(child, 0)[1] == 0
    gc.collect()
    assert events[0]() is None


def test_a_copy_that_is_not_given_to_the_device_is_noticed(monkeypatch):
    monkeypatch.setattr("outcore.device.threads.STALL_TIMEOUT_S", 0.1)
    release = threading.Event()
    with open_device("cuda") as device:
        handle = device.submit(Lane.H2D, "fetch layers.3", lambda: release.wait(30))
        with pytest.raises(LaneError, match=r"'fetch layers\.3' on lane h2d .* no progress for 0.1 s"):
            device.submit(Lane.UPDATE, "update", lambda: None, after={"x": handle}).wait()
        release.set()


def test_long_work_of_the_device_is_no_stall(monkeypatch):
    monkeypatch.setattr("outcore.device.threads.STALL_TIMEOUT_S", 0.05)
    with open_device("cuda") as device:
        handles = [device.submit(Lane.STATES_H2D, f"states {i}", lambda: torch.cuda._sleep(CYCLES)) for i in range(2)]
        device.synchronize()
        assert all(handle.done for handle in handles)
