"""CUDA and ROCm: each copy lane has a stream, points are events, host memory is pinned in place.

Work of a copy lane is ordered on the device: its stream waits for the events of its dependencies. Its thread waits only
until those events exist, except where it lets other streams pass (see below). Host lanes (disk, update) block their
thread on events, with the interpreter lock released.

[Note: who has the copy engine] Copies in one direction share one copy engine of the GPU. The engine serves a stream for
as long as that stream has copies ready. On an H100, states on their way to updates kept a fetch of weights waiting for
0.6 s, until the last of them had arrived, and forward waited with it. So the next states are given to the engine only
when the previous ones have arrived. In between, in the microseconds that a thread needs to wake, the engine turns to
the other streams. A caller that waits until such a copy is issued therefore waits for the previous copy to finish.

[Note: forked children] A forked child cannot call the driver, and torch aborts a process that destroys an event without
the driver. So a ``DataLoader`` worker would die when Python collects objects that it inherited. Children therefore keep
the events of this file and collect nothing that existed before the fork. This file lists the owners of events, because
the garbage collector does not track torch's events.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
import weakref
from collections.abc import Iterable
from typing import Any, Self, cast, final

import torch
from torch import distributed

from outcore.device.device import Device
from outcore.device.device_memory import ACCELERATOR_SHARE, aligned_bytes
from outcore.device.faults import Faults
from outcore.device.interrupts import IN_BACKWARD
from outcore.device.lanes import Handle, QueuedOperation, Throttle, run_on_host
from outcore.device.race import RaceChecker
from outcore.device.recorder import Recorder
from outcore.spec.lane_names import COPY_LANES, Lane
from outcore.spec.timeline import COMPUTE

BACKEND = "nccl" if distributed.is_available() and distributed.is_nccl_available() else "gloo"
"""Backend of process groups on the device. Gloo moves bytes through host memory."""

_CYCLES_PER_S = 1_000_000_000  # torch.cuda._sleep counts cycles; GPUs run at 1 to 2 GHz, and only tests sleep
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


_OWNERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Owners of events, which a forked child keeps alive."""


@final
class _Forks:
    """See [Note: forked children]."""

    def __init__(self) -> None:
        self._was_collecting = False
        os.register_at_fork(
            before=self._stop_collecting, after_in_parent=self._go_on, after_in_child=self._keep_what_was_there
        )

    def _stop_collecting(self) -> None:
        self._was_collecting = gc.isenabled()
        gc.disable()

    def _go_on(self) -> None:
        if self._was_collecting:
            gc.enable()

    def _keep_what_was_there(self) -> None:
        kept = list(_OWNERS)
        kept.append(kept)  # a cycle is never freed by reference counts, not even when the interpreter ends
        gc.freeze()
        self._go_on()


_watch_forks = functools.cache(_Forks)
"""Installs the fork handlers, once, when the first device is opened."""


@final
class StreamPoint:
    """A point on a stream: an event, recorded at construction or, if late, when something first depends on it."""

    def __init__(self, stream: torch.cuda.Stream, *, is_late: bool = False) -> None:
        """Args: is_late: Move along with the stream until ``fix``."""
        _OWNERS.add(self)
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
        """Record the event if it is not recorded yet."""
        if self._event is None:
            event = torch.cuda.Event(blocking=True)  # a host that waits sleeps instead of spinning
            event.record(self._stream)
            self._event = event

    def query(self) -> bool:
        """Whether the stream has reached the point."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Block the host until the stream has reached the point."""
        self.event.synchronize()


@final
class _ClockAnchor:
    """An event whose time on the host's clock is known, or follows from the anchor before it.

    ``elapsed_time`` is a float32 and loses precision over long spans, so each step records a fresh anchor.
    """

    def __init__(self, event: torch.cuda.Event, at_s: float | None, before: _ClockAnchor | None) -> None:
        _OWNERS.add(self)
        self.event = event
        self._at_s, self._before = at_s, before

    def seconds(self) -> float:
        if self._at_s is None:
            before = cast(_ClockAnchor, self._before)
            self._at_s, self._before = before.seconds() + before.event.elapsed_time(self.event) / 1e3, None
        return self._at_s


@final
class StreamMoment:
    """The moment when a stream reached an event."""

    def __init__(self, event: torch.cuda.Event, anchor: _ClockAnchor) -> None:
        """Args: event: Recorded, with timing. anchor: An earlier or later event on the same device."""
        _OWNERS.add(self)
        self._event, self._anchor = event, anchor

    def is_over(self) -> bool:
        """Whether the device has reached both the event and the anchor."""
        return bool(self._event.query()) and bool(self._anchor.event.query())

    def seconds(self) -> float:
        """Time on the host's clock, in seconds. Blocks until the event and the anchor are over."""
        self._event.synchronize()
        self._anchor.event.synchronize()
        return self._anchor.seconds() + self._anchor.event.elapsed_time(self._event) / 1e3

    def since(self, earlier: Self) -> float:
        """Seconds since an earlier moment, on the device's clock."""
        return earlier._event.elapsed_time(self._event) / 1e3


@final
class StreamStopwatch:
    """Times work by events on the calling thread's current stream."""

    def __init__(self, torch_device: torch.device) -> None:
        """Wait for the device, to relate its clock to the host's."""
        self._torch_device = torch_device
        self._anchor = self._drop_anchor()

    def begin(self) -> None:
        """Wait for the device once, to relate its clock to the host's anew."""
        self._anchor = self._drop_anchor()

    def tick(self) -> None:
        """Record a fresh anchor, without waiting."""
        self._anchor = _ClockAnchor(self._event(), None, self._anchor)

    def now(self) -> StreamMoment:
        """Return the current moment of the current stream."""
        return StreamMoment(self._event(), self._anchor)

    def _drop_anchor(self) -> _ClockAnchor:
        torch.cuda.synchronize(self._torch_device)
        event = self._event()
        event.synchronize()
        return _ClockAnchor(event, time.perf_counter(), None)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._torch_device))
        return event


@final
class CudaExecution:
    """How lanes run operations on one CUDA device. Owns the streams of the copy lanes."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.streams = {lane: torch.cuda.Stream(torch_device) for lane in COPY_LANES}
        self.stopwatch = StreamStopwatch(torch_device)
        self._names: dict[int, str] = {}
        self._last_states: StreamPoint | None = None
        """End of the last copy on ``states_h2d``. See [Note: who has the copy engine]."""

    def begin_thread(self, lane: Lane | None) -> None:
        """Select the device: the current device is per thread."""
        torch.cuda.set_device(self.torch_device)

    def run(self, operation: QueuedOperation, pace: Throttle, recorder: Recorder) -> StreamPoint | None:
        """Run an operation on its lane's stream, or on the host if it has none."""
        stream = self.streams.get(operation.lane)
        if stream is None:
            for dependency in operation.dependencies:
                if dependency.completion is not None:
                    dependency.completion.synchronize()
            run_on_host(operation, pace, recorder)
            return None
        if operation.lane is Lane.STATES_H2D and self._last_states is not None:
            self._last_states.synchronize()
        with torch.cuda.stream(stream):
            order_behind(stream, operation.dependencies)
            start = self.stopwatch.now() if recorder.is_on else None
            sleep_on_stream(pace.before_s)
            operation.handle.began_s = time.perf_counter()
            operation.work()
            sleep_on_stream(pace.least_s + pace.after_s)
            if start is not None:
                recorder.add(operation.lane.value, operation.handle.name, start, self.stopwatch.now(), operation.nbytes)
            point = StreamPoint(stream)
        if operation.lane is Lane.STATES_H2D:
            self._last_states = point
        return point

    def stream_name(self) -> str:
        """Name of the current stream, numbered in the order in which streams were first seen."""
        number, stream = len(self._names), torch.cuda.current_stream(self.torch_device)
        return self._names.setdefault(stream.cuda_stream, f"{COMPUTE} {number}" if number else COMPUTE)

    def drain(self) -> None:
        """Block the host until the device is idle."""
        torch.cuda.synchronize(self.torch_device)


@final
class AllocatorMeter:
    """Peak of torch's allocator (``torch.cuda.max_memory_allocated``). Resets that statistic."""

    def __init__(self, torch_device: torch.device) -> None:
        """Measure from here: memory allocated now does not count."""
        self._torch_device = torch_device
        self._before = torch.cuda.memory_allocated(torch_device)

    def begin(self) -> None:
        """Forget the peak and begin anew."""
        torch.cuda.reset_peak_memory_stats(self._torch_device)

    def peak_bytes(self) -> int:
        """Peak of allocated bytes since ``start``, less those allocated when the meter was made."""
        return max(0, torch.cuda.max_memory_allocated(self._torch_device) - self._before)


@final
class CudaDevice(Device):
    """A CUDA or ROCm device; compute is the calling thread's current stream."""

    has_host_memory = False
    computes_on_host = False
    update_block_bytes = 2**30
    activation_share = ACCELERATOR_SHARE
    group_backend = BACKEND
    interrupts = IN_BACKWARD

    def __init__(self, torch_device: torch.device, faults: Faults, race_checker: RaceChecker | None) -> None:
        """Start the lanes. Use ``open_device``."""
        _watch_forks()
        index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self._cuda = CudaExecution(torch.device("cuda", index))
        super().__init__(self._cuda.torch_device, self._cuda, faults, race_checker)

    def allocate(self, nbytes: int, *, is_touched: bool = True) -> torch.Tensor:
        """Allocate from torch's caching allocator; the result begins at a page."""
        return aligned_bytes(nbytes, self.torch_device)

    def touch_memory(self) -> None:
        """Do nothing: device memory is resident from the start."""

    def register_host(self, memory: torch.Tensor) -> bool:
        """Pin in one piece with cudaHostRegister: the driver may refuse a copy that crosses two registrations."""
        nbytes = memory.numel() * memory.element_size()
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE)) == 0:
            return True
        self._clear_error()
        return False

    def unregister_host(self, memory: torch.Tensor) -> None:
        """Undo ``register_host``."""
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) != 0:
            self._clear_error()

    def hand_over(self, tensor: torch.Tensor, lane: Lane | None) -> None:
        """Keep the allocator from reusing the tensor's memory before ``lane``'s stream is done with it."""
        stream = torch.cuda.current_stream(self.torch_device) if lane is None else self._cuda.streams.get(lane)
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)

    def receive(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Keep the allocator from reusing the tensors' memory on the stream that allocated them while compute reads."""
        stream = torch.cuda.current_stream(self.torch_device)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def rng_state(self) -> object:
        """Return the states of the CPU's default generator and of this device's. Does not wait for the device."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: object) -> None:
        """Restore both generators."""
        state_host, state_device = cast(tuple[torch.Tensor, torch.Tensor], state)
        torch.set_rng_state(state_host)
        torch.cuda.set_rng_state(state_device, self.torch_device)

    def memory_bytes(self) -> int:
        """Bytes that the driver has free, plus those that torch's allocator holds unused."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        idle_bytes = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free_bytes + idle_bytes)

    def total_bytes(self) -> int:
        """Bytes of memory of the GPU."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def meter(self) -> AllocatorMeter:
        """Return a meter of torch's allocator."""
        return AllocatorMeter(self.torch_device)

    def finish_copies(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def _free_memory(self) -> None:
        """Do nothing: the allocator takes memory back with its last tensor."""

    def _order_compute(self, dependencies: tuple[Handle, ...]) -> None:
        stream = torch.cuda.current_stream(self.torch_device)
        for handle in dependencies:
            self._blocked_by(handle, functools.partial(_put_behind, stream, handle))

    def _compute_point(self, *, is_late: bool) -> StreamPoint:
        return StreamPoint(torch.cuda.current_stream(self.torch_device), is_late=is_late)

    def _pause_compute(self, seconds: float) -> None:
        with torch.cuda.device(self.torch_device):
            sleep_on_stream(seconds)

    def _clear_error(self) -> None:
        """Clear the error that the runtime remembers: else the next kernel launch of any caller would report it."""
        with contextlib.suppress(RuntimeError):
            torch.empty(1, dtype=torch.uint8, device=self.torch_device).fill_(0)


def _put_behind(stream: torch.cuda.Stream, handle: Handle) -> None:
    """Let a stream wait for the device work of a handle; raise what that work raised."""
    handle.wait_issued()
    if handle.failure is not None:
        handle.failure.throw()
    order_behind(stream, (handle,))


def order_behind(stream: torch.cuda.Stream, dependencies: tuple[Handle, ...]) -> None:
    """Let a stream wait for the device work of issued handles. Host work is over once it is issued."""
    for dependency in dependencies:
        if isinstance(dependency.completion, StreamPoint):
            stream.wait_event(dependency.completion.event)


def sleep_on_stream(seconds: float) -> None:
    """Keep the current stream busy for about this long."""
    if seconds > 0:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # noqa: SLF001  (torch offers no public delay)
