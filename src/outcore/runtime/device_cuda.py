"""CUDA and ROCm: copy lanes have a stream each, points are events, host memory is pinned in place.

Work of a copy lane is ordered on the device: its stream waits for the events of what it depends on, its thread only
until those events exist. Host lanes (disk, update) block their thread on events, with the interpreter lock released.
"""

from __future__ import annotations

import contextlib
import time
from typing import cast, final

import torch

from outcore.runtime.device import Device, aligned_bytes
from outcore.runtime.faults import Faults
from outcore.runtime.lanes import COPY_LANES, Handle, Lane, Operation
from outcore.runtime.race import RaceChecker

_CYCLES_PER_S = 1_000_000_000  # what torch.cuda._sleep counts; GPUs run at 1 to 2 GHz, and only tests sleep
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


@final
class Point:
    """A point on a stream: an event, recorded when made or, if late, when somebody first depends on it."""

    def __init__(self, stream: torch.cuda.Stream, *, is_late: bool = False) -> None:
        """Args: is_late: Move along with the stream until ``fix``."""
        self._stream = stream
        self._event: torch.cuda.Event | None = None
        if not is_late:
            self.fix()

    @property
    def event(self) -> torch.cuda.Event:
        """The recorded event."""
        self.fix()
        return cast(torch.cuda.Event, self._event)

    def fix(self) -> None:
        """Record the event if that was not done."""
        if self._event is None:
            event = torch.cuda.Event(blocking=True)  # a host that waits sleeps instead of spinning
            event.record(self._stream)
            self._event = event

    def query(self) -> bool:
        """Whether the stream got there."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Block the host until the stream got there."""
        self.event.synchronize()


@final
class CudaExecution:
    """How lanes run operations on one CUDA device. Owns the streams of the copy lanes."""

    def __init__(self, torch_device: torch.device) -> None:
        """Make the streams."""
        self.torch_device = torch_device
        self.streams = {lane: torch.cuda.Stream(torch_device) for lane in COPY_LANES}

    def begin_thread(self, lane: Lane | None) -> None:
        """Select the device, which each thread has its own notion of."""
        torch.cuda.set_device(self.torch_device)

    def run(self, operation: Operation, before_s: float, after_s: float) -> Point | None:
        """Run an operation on its lane's stream, or on the host if it has none."""
        stream = self.streams.get(operation.lane)
        if stream is None:
            for dependency in operation.dependencies:
                if dependency.completion is not None:
                    dependency.completion.synchronize()
            time.sleep(before_s)
            operation.work()
            time.sleep(after_s)
            return None
        with torch.cuda.stream(stream):
            order_behind(stream, operation.dependencies)
            sleep_on_stream(before_s)
            operation.work()
            sleep_on_stream(after_s)
            return Point(stream)

    def drain(self) -> None:
        """Block the host until the device is idle."""
        torch.cuda.synchronize(self.torch_device)


@final
class CudaDevice(Device):
    """A CUDA or ROCm device; compute is the calling thread's current stream."""

    kind = "cuda"
    update_block_bytes = 2**30

    def __init__(self, torch_device: torch.device, faults: Faults, race_checker: RaceChecker | None) -> None:
        """Start the lanes. Use ``open_device``."""
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self._cuda = CudaExecution(torch.device("cuda", index))
        super().__init__(self._cuda.torch_device, self._cuda, faults, race_checker)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of torch's caching allocator, cut to begin at a page."""
        return aligned_bytes(nbytes, self.torch_device)

    def register_host(self, memory: torch.Tensor) -> bool:
        """Pin with cudaHostRegister in one piece: a copy from one registration into the next may be refused."""
        nbytes = memory.numel() * memory.element_size()
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE)) == 0:
            return True
        self._clear_error()
        return False

    def unregister_host(self, memory: torch.Tensor) -> None:
        """Undo ``register_host``."""
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) != 0:
            self._clear_error()

    def hand_over(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Keep the allocator from reusing the tensor's memory before ``lane``'s stream is done with it."""
        stream = self._cuda.streams.get(lane)
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)

    def rng_state(self) -> object:
        """States of the CPU's default generator and of this device's. Does not wait for the device."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: object) -> None:
        """Restore both generators."""
        state_host, state_device = cast(tuple[torch.Tensor, torch.Tensor], state)
        torch.set_rng_state(state_host)
        torch.cuda.set_rng_state(state_device, self.torch_device)

    def memory_bytes(self) -> int:
        """What the driver has free, and what torch's allocator holds without use."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        idle_bytes = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free_bytes + idle_bytes)

    def _finish_copies(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()

    def _free_memory(self) -> None:
        """The allocator takes it back with the last tensor."""

    def _order_compute(self, dependencies: tuple[Handle, ...]) -> None:
        for handle in dependencies:
            self._blocked_by(handle, handle.wait_issued)
            if handle.failure is not None:
                handle.failure.throw()
        order_behind(torch.cuda.current_stream(self.torch_device), dependencies)

    def _compute_point(self, *, is_late: bool) -> Point:
        return Point(torch.cuda.current_stream(self.torch_device), is_late=is_late)

    def _pause_compute(self, seconds: float) -> None:
        with torch.cuda.device(self.torch_device):
            sleep_on_stream(seconds)

    def _clear_error(self) -> None:
        """Take the refusal away that the runtime remembers: else the next kernel, whoever launches it, reports it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, dtype=torch.uint8, device=self.torch_device).fill_(0)


def order_behind(stream: torch.cuda.Stream, dependencies: tuple[Handle, ...]) -> None:
    """Let a stream wait for the device work of handles that are issued; work of the host is over by then."""
    for dependency in dependencies:
        if isinstance(dependency.completion, Point):
            stream.wait_event(dependency.completion.event)


def sleep_on_stream(seconds: float) -> None:
    """Keep the current stream busy for about so long."""
    if seconds > 0:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # noqa: SLF001  (torch offers no public delay)
