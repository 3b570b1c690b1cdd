"""The CPU device, the arguments that ``open_device`` accepts, and CUDA code that can be checked without a GPU."""

from __future__ import annotations

import inspect
import types

import pytest
import torch

from outcore.core.errors import RaceError, UnsupportedError
from outcore.device import cuda as device_cuda
from outcore.device.cpu import CpuDevice
from outcore.device.cuda import CudaDevice
from outcore.device.device import Device
from outcore.device.opening import open_device
from outcore.device.race import RaceChecker
from outcore.memory.arena import Region
from outcore.spec.lane_names import Lane

HAS_GPU = torch.cuda.is_available()


@pytest.fixture
def device():
    with open_device("cpu") as opened:
        yield opened


def test_the_cpu_can_be_asked_for_by_name_or_torch_device(device):
    assert isinstance(device, CpuDevice)
    assert device.torch_device == torch.device("cpu")
    with open_device(torch.device("cpu")) as other:
        assert isinstance(other, CpuDevice)


@pytest.mark.skipif(HAS_GPU, reason="this is about machines without a GPU")
def test_without_a_gpu_the_default_is_the_cpu_and_cuda_is_refused():
    with open_device() as default:
        assert isinstance(default, CpuDevice)
    with pytest.raises(UnsupportedError, match="expected a GPU for 'cuda:0'"):
        open_device("cuda:0")


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_other_devices_are_refused(name):
    with pytest.raises(UnsupportedError, match=f"expected 'cpu' or 'cuda' .* but got '{name}'"):
        open_device(torch.device(name))


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1_000_003])
def test_allocated_memory_is_aligned_and_exact(device, nbytes):
    memory = device.allocate(nbytes)
    assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (nbytes,), "cpu")
    assert memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert memory.untyped_storage().nbytes() <= nbytes + 4096


def test_pinning_is_nothing_on_the_cpu(device):
    memory = device.allocate(4096)
    assert device.register_host(memory)
    device.unregister_host(memory)
    device.hand_over(memory, Lane.D2H)


def test_the_random_state_comes_back(device):
    before = torch.get_rng_state()
    state = device.rng_state()
    first = torch.rand(5)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)
    torch.set_rng_state(before)


def test_memory_bytes_is_what_the_machine_has(device):
    assert 0 < device.memory_bytes() < 2**50


def test_the_race_checker_sees_every_kind_of_access():
    checker = RaceChecker()
    region = Region("host", 0, 10)
    with open_device("cpu", race_checker=checker) as device:
        handle = device.submit(Lane.UPDATE, "update", lambda: None, reads=[region], writes=[region])
        device.compute("forward", reads=[region], after={"updated": handle})
        device.wait("computed", device.mark("over"))
        device.host_access("save", reads=[region])
        device.host_access("load", writes=[region])
        assert checker.num_accesses == 5


def test_a_wait_on_the_handle_itself_orders_nothing_for_the_checker():
    """Only ``Device.wait`` declares a wait."""
    region = Region("host", 0, 10)
    with open_device("cpu", race_checker=RaceChecker()) as device:
        handle = device.submit(Lane.UPDATE, "update", lambda: None, writes=[region])
        handle.wait()
        assert handle.done()
        with pytest.raises(RaceError):
            device.host_access("save", reads=[region])
        device.wait("updated", [None, handle])
        device.host_access("save", reads=[region])


def test_an_operation_that_races_is_not_run():
    region = Region("host", 0, 10)
    ran = []
    with open_device("cpu", race_checker=RaceChecker()) as device:
        device.compute("forward", reads=[region])
        with pytest.raises(RaceError):
            device.submit(Lane.H2D, "fetch", lambda: ran.append(1), writes=[region])
        device.synchronize()
    assert not ran


@pytest.mark.parametrize("kind", [CpuDevice, CudaDevice])
def test_a_kind_of_device_is_complete_and_overrides_nothing(kind):
    assert not inspect.isabstract(kind)
    concrete = {
        name for name, member in vars(Device).items() if inspect.isfunction(member)
    } - Device.__abstractmethods__
    assert not concrete & set(vars(kind)) - {"__init__"}


class _Cudart:
    """Stands in for the runtime: refuses the registration at call number ``refuse_at``."""

    def __init__(self, refuse_at=None):
        self.registered, self.calls, self.refuse_at = {}, 0, refuse_at

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.calls += 1
        if self.calls == self.refuse_at:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        return 0 if self.registered.pop(address, None) else 1


@pytest.fixture
def cuda_device(monkeypatch):
    """Make a ``CudaDevice`` that was never opened: enough for methods that only talk to the runtime."""
    opened = object.__new__(CudaDevice)
    opened.torch_device = torch.device("cpu")  # the device on which the error is cleared
    cudart = _Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return opened, cudart


def test_host_memory_is_registered_in_one_piece_and_unregistered(cuda_device):
    device, cudart = cuda_device
    memory = torch.zeros(3 * 4096 - 1000, dtype=torch.uint8)
    assert device.register_host(memory)
    assert cudart.registered == {memory.data_ptr(): 3 * 4096 - 1000}
    device.unregister_host(memory)
    assert cudart.registered == {}


def test_a_refused_registration_is_cleared(cuda_device, monkeypatch):
    device, cudart = cuda_device
    cleared = []
    monkeypatch.setattr(CudaDevice, "_clear_error", lambda self: cleared.append(True))
    cudart.refuse_at = 1
    assert not device.register_host(torch.zeros(4 * 4096, dtype=torch.uint8))
    assert cudart.registered == {}
    assert cleared == [True]


def test_clearing_swallows_the_remembered_error_only(cuda_device, monkeypatch):
    device, _ = cuda_device

    def report(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", report)
    device._clear_error()


class _Stream:
    """Counts the work that is put on it."""

    def __init__(self):
        self.num_issued, self.waited = 0, []

    def wait_event(self, event):
        self.waited.append(event)


class _Event:
    def __init__(self, blocking):
        assert blocking
        self.at = None

    def record(self, stream):
        self.at = stream.num_issued


def test_a_late_point_moves_along_until_somebody_depends_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    stream = _Stream()
    exact, late = device_cuda.StreamPoint(stream), device_cuda.StreamPoint(stream, is_late=True)
    stream.num_issued += 1  # the declared access
    late.fix()
    stream.num_issued += 1
    assert (exact.event.at, late.event.at) == (0, 1)


def test_a_stream_waits_for_points_and_not_for_what_is_over(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    handle, over = device.mark("m"), device.mark("n")
    handle.completion = device_cuda.StreamPoint(_Stream())
    stream = _Stream()
    device_cuda.order_behind(stream, (handle, over))
    assert stream.waited == [handle.completion.event]


def test_depending_on_a_late_point_fixes_it_at_submission(device):
    fixed = []
    late = device.mark("late")
    late.completion = types.SimpleNamespace(fix=lambda: fixed.append(1), query=lambda: True, synchronize=lambda: None)
    device.submit(Lane.H2D, "fetch", lambda: None, after={"slot free": late})
    assert fixed == [1]
