"""The device: asynchronous operations, their order, and device memory.

``Device`` does the bookkeeping that all kinds of device share: labels, the race checker, errors not reported yet. Each
kind defines how work is ordered behind other work and where memory comes from.
"""

from __future__ import annotations

import abc
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType

import torch

from outcore.core.closing import Closing
from outcore.core.errors import LaneError
from outcore.device.device_memory import DeviceMemory
from outcore.device.faults import POISON, Delays, Faults, PermutedLanes
from outcore.device.interrupts import InterruptsInBackward
from outcore.device.lanes import (
    After,
    Clock,
    Completion,
    Dependency,
    Execution,
    Failures,
    Handle,
    Lanes,
    QueuedOperation,
    Service,
    Throttle,
)
from outcore.device.race import RaceChecker
from outcore.device.recorder import Recorder
from outcore.device.threads import ThreadedLanes
from outcore.memory.arena import Buffer, Region
from outcore.spec.lane_names import RANK_LANES, Lane
from outcore.spec.timeline import COMPUTE, HOST

NOTHING: After = MappingProxyType({})


class Device(DeviceMemory, Closing):
    """Lanes, compute and memory of one device.

    Owns the threads of its lanes from construction to ``close``, to garbage collection or to the end of the process. In
    a forked child it has no lanes: operations raise there, and ``close`` leaves the parent's lanes alone.

    Order: operations of a lane run in the order of submission. ``compute`` orders compute; ``wait`` orders the host.
    """

    computes_on_host: bool
    """Whether compute runs on the host's cores: it then competes with host updates for them, and is never late."""
    update_block_bytes: int
    """Bytes of gradients per block of an update on the device: few enough for a cache, or enough to fill the device."""
    group_backend: str
    """Backend of torch's process groups for bytes on this device."""
    interrupts: InterruptsInBackward | None
    """Detects a Ctrl-C during a backward on another thread; None if backward runs on the calling thread."""

    def __init__(
        self, torch_device: torch.device, execution: Execution, faults: Faults, race_checker: RaceChecker | None
    ) -> None:
        """Start the lanes. Use ``open_device``."""
        self.torch_device, self.faults = torch_device, faults
        self.labels_seen: set[str] = set()
        """Labels under which any handle was ever a dependency, including skipped labels."""
        self._checker = race_checker
        self._delays, self._execution = Delays(faults) if faults.delays or faults.throttle else None, execution
        self.stream_name = execution.stream_name
        """Returns the name of the stream on which compute works now."""
        self._failures = Failures()
        self.check = self._failures.raise_next
        """Raises the first error of a lane that was not raised yet; the next call raises the next one."""
        self.refuse_after_failure = self._failures.raise_first
        """Raises the first error that a lane ever hit: the work of that operation was not done."""
        self.recorder = Recorder(execution.stopwatch)
        """Adds up the seconds that compute waits; keeps operations if asked to."""
        pace, seed = _at_once if self._delays is None else self._delays.pace, faults.permute
        service = Service(execution, pace, self._failures, self.recorder)
        self._lanes: Lanes = ThreadedLanes(service) if seed is None else PermutedLanes(service, seed)
        self.pid = os.getpid()
        """Process that opened the device. A forked child cannot use the device."""
        self._finalizer = weakref.finalize(self, _close_lanes, self._lanes, execution, self.pid)

    def submit(
        self,
        lane: Lane,
        name: str,
        work: Callable[[], object],
        *,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: After = NOTHING,
        is_due: Callable[[], bool] | None = None,
    ) -> Handle:
        """Queue an operation at the end of a lane and return at once.

        Args:
            lane: The lane that runs it. Each lane has its own thread and, for copies on CUDA, its own stream.
            name: Name for errors, such as ``fetch model.layers.3``.
            work: Copies or computes. It must neither submit nor wait, and must not enter autograd.
            reads: Bytes that ``work`` reads.
            writes: Bytes that ``work`` writes.
            after: Dependencies. If one of them failed, this operation fails with the same error and does not run.
                To wait for device work, a copy lane is ordered on the device; other lanes block their thread.
            is_due: Called when the operation's turn comes, and with a race checker also at submission. Its answer must
                not change. If false, the operation is over without waiting for ``after``: operations that depend on it
                are then ordered behind earlier operations of its lane only. Not for copy lanes.

        Raises:
            RaceError: A conflicting access is not ordered before this one (only with a race checker).
            LaneError: The device is closed.
        """
        self._refuse_in_child(name)
        dependencies = self._dependencies(after)
        counts = self._checker is None or is_due is None or is_due()
        clock = self._declare(lane.value, name, *((reads, writes, dependencies) if counts else ((), (), ())))
        handle = Handle(name, lane.value, self._lanes, clock)
        nbytes = sum([stop - start for _, start, stop in writes])
        self._lanes.submit(QueuedOperation(handle, lane, work, dependencies, nbytes, is_due))
        if self.faults.serial:
            self._blocked_by(handle, self._finish)
        return handle

    def compute(
        self, name: str, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), after: After = NOTHING
    ) -> Handle:
        """Order compute behind ``after``, and declare what the next code on compute reads and writes.

        Compute is the calling thread on the CPU and its current stream on CUDA.

        Returns:
            A handle behind the declared access and all earlier ones. Use it only after the code ran; ``mark`` is exact.

        Raises:
            RaceError: A conflicting access is not ordered before this one (only with a race checker).
            OutcoreError: An operation in ``after`` failed.
        """
        self._refuse_in_child(name)
        dependencies = self._dependencies(after)
        clock = () if self._checker is None else self._declare(self.stream_name(), name, reads, writes, dependencies)
        self._order_compute(dependencies)
        if self._delays is not None and (pause_s := self._delays.compute_s()) > 0:
            self._pause_compute(pause_s)
        return self._point(name, clock, self._compute_point(is_late=True))

    def mark(self, name: str) -> Handle:
        """Return a handle behind all work that compute was given so far."""
        self._refuse_in_child(name)
        clock = self._checker.mark(self.stream_name()) if self._checker is not None else ()
        return self._point(name, clock, self._compute_point(is_late=False))

    def wait(self, label: str, handle: Dependency) -> None:
        """Block the host until the bytes are there.

        Raises:
            OutcoreError: The operation failed.
        """
        handles = self._dependencies({label: handle})
        for one in handles:
            self._blocked_by(one, one.wait)
        if self._checker is not None:
            self._checker.wait(one.clock for one in handles)

    def host_access(self, name: str, *, reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """Declare that the host itself reads or writes these bytes now.

        Raises:
            RaceError: The host has not waited for a conflicting access (only with a race checker).
        """
        self._declare(HOST, name, reads, writes, ())

    def poison(self, buffer: Buffer, lane: Lane | None = None, after: After = NOTHING) -> Handle | None:
        """Fill a freed buffer with NaN, if the faults include poison.

        Args:
            buffer: The freed buffer, which must not be read until it is written again.
            lane: The lane that frees the buffer, and therefore fills it; None: compute.
            after: Dependencies besides the lane's earlier operations.

        Returns:
            A handle that the next use of the buffer must come after; None without poison.
        """
        if not self.faults.poison:
            return None
        region = buffer.region
        name = f"poison {region.arena} [{region.start}, {region.stop})"
        if lane is not None:
            return self.submit(lane, name, lambda: self._fill(buffer), writes=[region], after=after)
        self.compute(name, writes=[region], after=after)
        self._fill(buffer)
        return self.mark(name)

    def _fill(self, buffer: Buffer) -> None:
        if buffer.bytes.is_cpu:  # this thread writes at once, so copies on its stream must be over first
            self.finish_copies()
        buffer.bytes.fill_(POISON)

    def _finish(self) -> None:
        """Block the host until all submitted operations are over, failed ones included."""
        self._lanes.drain()
        self._execution.drain()

    def _blocked_by(self, handle: Handle, wait: Callable[[], None]) -> None:
        """Wait for a handle, and record that time as a wait of compute."""
        if handle.lane == COMPUTE or handle.is_over():
            wait()
            return
        with self.recorder.waiting(handle.lane, handle.name):
            wait()

    def synchronize(self) -> None:
        """Block the host until all lanes are empty and the device is idle. ``check`` raises the lanes' errors."""
        self._refuse_in_child("synchronize")
        self._finish()
        if self._checker is not None:
            self._checker.synchronize()

    def meet_others(self) -> None:
        """Block the host until all operations between ranks are over, failed ones included."""
        self._lanes.drain(RANK_LANES)

    def hangs_up_with(self, hang_up: Callable[[], None]) -> None:
        """Set how ``close`` ends a lane's wait for another rank. Args: hang_up: Ends such waits."""
        self._lanes.hang_up = hang_up

    def stop(self) -> None:
        """Let running operations finish, fail the queued ones and join the threads. Memory stays. Idempotent.

        Raises LaneError if an operation does not end.
        """
        if self.interrupts is not None:
            self.interrupts.leave(self)
        self._finalizer()

    def close(self) -> None:
        """``stop``, and free what ``allocate`` took. Idempotent. Call ``synchronize`` first to have all work done."""
        try:
            self.stop()
        finally:
            self._free_memory()

    @abc.abstractmethod
    def hand_over(self, tensor: torch.Tensor, lane: Lane | None) -> None:
        """Let compute free a tensor that still has a user: ``lane``, or with None the current stream of compute."""

    @abc.abstractmethod
    def receive(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """``hand_over`` gradients from autograd to compute: autograd's nodes work on the streams of their forward."""

    @abc.abstractmethod
    def rng_state(self) -> object:
        """Return the state of the random generators that compute draws from: the CPU's and this device's."""

    @abc.abstractmethod
    def set_rng_state(self, state: object) -> None:
        """Restore what ``rng_state`` returned."""

    @abc.abstractmethod
    def finish_copies(self) -> None:
        """Block the calling thread until the copies that it has issued are over."""

    @abc.abstractmethod
    def _order_compute(self, dependencies: tuple[Handle, ...]) -> None:
        """Put compute behind these handles; raise what they raised."""

    @abc.abstractmethod
    def _compute_point(self, *, is_late: bool) -> Completion | None:
        """Return compute's current point. With ``is_late`` it moves along with compute until its ``fix``."""

    @abc.abstractmethod
    def _pause_compute(self, seconds: float) -> None:
        """Keep compute busy."""

    def _dependencies(self, after: After) -> tuple[Handle, ...]:
        """Return the handles of ``after``, each once, without those under skipped labels."""
        chosen: dict[Handle, None] = {}
        for label, value in after.items():
            if handles := _handles(value):
                self.labels_seen.add(label)
                if label not in self.faults.skip:
                    chosen.update(dict.fromkeys(handles))
        return _fixed(chosen)

    def _declare(
        self, actor: str, name: str, reads: Sequence[Region], writes: Sequence[Region], after: tuple[Handle, ...]
    ) -> Clock:
        if self._checker is None:
            return ()
        return self._checker.act(actor, name, reads=reads, writes=writes, after=[handle.clock for handle in after])

    def _point(self, name: str, clock: Clock, completion: Completion | None) -> Handle:
        handle = Handle(name, COMPUTE, self._lanes, clock, is_issued=True)
        handle.completion = completion
        return handle

    def _refuse_in_child(self, what: str) -> None:
        if os.getpid() != self.pid:
            raise LaneError(_in_child(what, self.pid))


_AT_ONCE = Throttle()


def _at_once(_: QueuedOperation) -> Throttle:
    """No operation is slowed down."""
    return _AT_ONCE


def _handles(dependency: Dependency) -> tuple[Handle, ...]:
    if dependency is None:
        return ()
    if isinstance(dependency, Handle):
        return (dependency,)
    return tuple([handle for handle in dependency if handle is not None])


def _fixed(handles: Iterable[Handle]) -> tuple[Handle, ...]:
    """Fix the points of these handles, since an operation now depends on them; return the handles as a tuple."""
    for handle in handles:
        if handle.completion is not None:
            handle.completion.fix()
    return tuple(handles)


def _in_child(what: str, pid: int) -> str:
    return (
        f"expected '{what}' in process {pid}, which opened the device, but this is the forked child {os.getpid()}; "
        "a streamed model can only be used in the process that prepared it"
    )


def _close_lanes(lanes: Lanes, execution: Execution, pid: int) -> None:
    if os.getpid() == pid:
        try:
            lanes.close()
        finally:
            execution.drain()  # must not be interrupted: afterwards, memory that copies read and write is freed
