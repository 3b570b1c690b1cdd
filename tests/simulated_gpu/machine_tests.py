"""The simulated GPU itself is asynchronous, protects and poisons memory, and fails on demand."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import simulator
import torch

pytestmark = pytest.mark.gpu
RUN = Path(__file__).with_name("run.py")
CYCLES = 100_000_000  # 0.1 s
MIB = 2**20


def test_work_is_queued_and_the_host_goes_on():
    x = torch.ones(3, device="cuda")
    start = time.monotonic()
    torch.cuda._sleep(10 * CYCLES)
    y = x + 1
    assert not torch.cuda.current_stream().query()
    assert y.tolist() == [2, 2, 2]
    assert time.monotonic() - start > 0.9


def test_a_stream_that_does_not_wait_reads_too_early():
    side, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    x.fill_(1)
    with torch.cuda.stream(side):
        early = x * 1
        side.wait_stream(torch.cuda.current_stream())
    made = torch.cuda.Event()
    made.record(torch.cuda.default_stream())
    side.wait_event(made)
    with torch.cuda.stream(side):
        late = x * 1
    torch.cuda.synchronize()
    assert early.sum() == 0
    assert late.sum() == 1000


def test_memory_that_another_stream_still_reads_is_overwritten_unless_it_is_recorded():
    side = torch.cuda.Stream()

    def read_after_free(*, is_recorded: bool) -> float:
        x = torch.ones(MIB, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            seen = x.sum()
        if is_recorded:
            x.record_stream(side)
        del x
        torch.cuda.default_stream().synchronize()
        side.synchronize()
        return seen.item()

    assert read_after_free(is_recorded=True) == MIB
    assert read_after_free(is_recorded=False) != MIB


def test_the_host_cannot_touch_device_memory():
    program = "import ctypes, torch; x = torch.ones(4, device='cuda'); ctypes.string_at(x.data_ptr(), 4)"
    done = subprocess.run([sys.executable, str(RUN), "-c", program], capture_output=True, check=False)
    assert done.returncode < 0, "killed by a signal"


def test_memory_runs_out_at_the_capacity_and_comes_back():
    with simulator.knobs(capacity_bytes=64 * MIB):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == 40 * MIB
        del kept
        assert torch.empty(40 * MIB, dtype=torch.uint8, device="cuda").numel() == 40 * MIB
    torch.cuda.empty_cache()


def test_a_failure_on_the_device_surfaces_when_somebody_waits():
    torch.cuda.synchronize()
    with simulator.knobs(fail_at=0):
        failed = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="an injected failure"):
            torch.cuda.synchronize()
    assert torch.cuda.is_available()
    assert failed.shape == (3,)


def test_a_blocking_call_is_counted_and_can_be_refused():
    x = torch.ones(3, device="cuda")
    before = simulator.num_syncs()
    assert x.sum().item() == 3
    assert simulator.num_syncs() == before + 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = (x + 1).sum()
        with pytest.raises(RuntimeError, match="synchronizing"):
            y.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_take_as_long_as_the_link_says():
    pinned = torch.ones(8 * MIB, dtype=torch.uint8).pin_memory()
    assert pinned.is_pinned()
    target = torch.empty_like(pinned, device="cuda")
    torch.cuda.synchronize()
    with simulator.knobs(h2d_bytes_per_s=8 * MIB / 0.2):
        start = time.monotonic()
        target.copy_(pinned, non_blocking=True)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert time.monotonic() - start >= 0.2


@pytest.mark.parametrize("knob", ["h2d_stall_s", "d2h_stall_s"])
def test_a_copy_stands_still_until_it_is_released_and_its_stream_with_it(knob):
    pinned, other, here = torch.ones(MIB).pin_memory(), torch.zeros(MIB).pin_memory(), torch.zeros(MIB, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    target, source = (here, pinned) if knob == "h2d_stall_s" else (other, here.fill_(1))
    with simulator.knobs(**{knob: 60}):
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            behind = torch.cuda.Event()
            behind.record()
        assert (torch.ones(3, device="cuda") * 2).sum().item() == 6, "other streams go on"
        time.sleep(0.1)
        assert not behind.query()
    side.synchronize()
    assert (target == 1).all()


def test_a_copy_stands_still_for_so_long_and_once():
    pinned, target = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    torch.cuda.synchronize()
    with simulator.knobs(h2d_stall_s=1):
        start = time.monotonic()
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        stalled_until = time.monotonic()
        assert stalled_until - start >= 1
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        assert time.monotonic() - stalled_until < 1


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_cells_of_recurrent_layers_are_those_of_the_cpu(kind):
    torch.manual_seed(0)
    layer, x = kind(5, 7, num_layers=2, bidirectional=True), torch.randn(4, 3, 5, requires_grad=True)
    twin, y = kind(5, 7, num_layers=2, bidirectional=True).cuda(), x.detach().cuda().requires_grad_()
    twin.load_state_dict(layer.state_dict())
    for model, given in ((layer, x), (twin, y)):
        (model(given)[0].square().sum() + sum(h.sum() for h in model(given)[1])).backward()
    torch.testing.assert_close(y.grad.cpu(), x.grad)
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_pinned_memory_that_a_copy_still_reads_is_not_given_out_again_and_nobody_waits():
    target = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * CYCLES)
    target.copy_(torch.ones(MIB).pin_memory(), non_blocking=True)
    others = [torch.zeros(MIB).pin_memory() for _ in range(3)]
    assert not torch.cuda.current_stream().query()
    assert (target == 1).all()
    assert not any(other.any() for other in others)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_no_device():
    x = torch.ones(3, device="cuda")
    child = os.fork()
    if child == 0:
        try:
            x.fill_(2)
        except RuntimeError as error:
            del x
            os._exit("Cannot re-initialize CUDA" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["nothing", "weights", "input"])
def test_norms_of_batches_in_mixed_precision_and_frozen_in_part(dtype, frozen):
    torch.manual_seed(0)
    norm, x = torch.nn.BatchNorm1d(8), torch.randn(2, 8, 7).to(dtype)
    twin = torch.nn.BatchNorm1d(8).cuda()
    seen = []
    for model, given in ((norm, x), (twin, x.cuda())):
        given.requires_grad_(frozen != "input")
        model.requires_grad_(frozen != "weights")
        result = model(given)
        result.float().square().sum().backward()
        seen.append([result, *(t.grad for t in (given, *model.parameters()) if t.requires_grad)])
    for a, b in zip(*seen, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b.cpu(), a)


def test_random_numbers_follow_the_seed_and_the_state():
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5).cpu()
    second = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5).cpu()
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5).cpu())
    generator = torch.Generator(device="cuda").manual_seed(5)
    drawn = torch.rand(7, device="cuda", generator=generator).cpu()
    assert torch.equal(drawn, torch.rand(7, device="cuda", generator=generator.manual_seed(5)).cpu())


def test_several_devices():
    with simulator.knobs(num_devices=2):
        assert torch.cuda.device_count() == 2
        x = torch.ones(3, device="cuda:1")
        assert x.device.index == 1
        assert (x * 2).sum().item() == 6
        assert torch.cuda.memory_allocated(1) > 0


def test_backward_runs_on_a_thread_of_autograd():
    source = textwrap.dedent("""
        import threading, torch
        x = torch.ones(3, device="cuda", requires_grad=True)
        seen = []
        x.register_hook(lambda g: seen.append(threading.current_thread() is threading.main_thread()))
        x.sum().backward()
        print(seen)
    """)
    done = subprocess.run([sys.executable, str(RUN), "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[False]", done.stderr
