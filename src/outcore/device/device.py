"""The device: what runs asynchronously, in which order, and device memory.

``Device`` keeps the bookkeeping that all kinds share (labels, the race checker, errors nobody has seen); a kind says
how work is ordered behind other work and where memory comes from.
"""

from __future__ import annotations

import abc
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from outcore.core.closing import Closing
from outcore.core.errors import LaneError
from outcore.core.quantities import PAGE_BYTES
from outcore.device.faults import POISON, Delays, Faults, PermutedLanes
from outcore.device.interrupts import InterruptsInBackward
from outcore.device.lane_threads import ThreadedLanes
from outcore.device.lanes import (
    After,
    Clock,
    Completion,
    Dependency,
    Execution,
    Failures,
    Handle,
    Lanes,
    Operation,
    Pace,
    Service,
)
from outcore.device.race import RaceChecker
from outcore.device.recorder import Recorder
from outcore.memory.arena import Buffer, Region
from outcore.spec.lanes import Lane
from outcore.spec.timeline import COMPUTE, HOST

NOTHING: After = MappingProxyType({})
ACCELERATOR_SHARE = 0.3
"""Of a device with memory of its own: see ``Device.activation_share``."""


def aligned_bytes(nbytes: int, torch_device: torch.device) -> torch.Tensor:
    """1D uint8 tensor of ``nbytes`` that begins at a multiple of 4 KiB; takes up to 4 KiB more."""
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device=torch_device)
    return memory.narrow(0, -memory.data_ptr() % PAGE_BYTES, nbytes)


class Meter(Protocol):
    """Measures device memory."""

    def start(self) -> None:
        """Begin anew."""

    def peak_bytes(self) -> int:
        """The most that was taken since ``start``, beside what the plan takes."""


class Device(Closing):
    """Lanes, compute and memory of one device.

    Owns the lanes' threads from construction to ``close``, which also runs when the device is collected and at exit. In
    a forked child it has no lanes: ``close`` does nothing there, everything else raises.

    Order: operations of a lane run in the order of submission; compute is ordered by ``compute``, the host by ``wait``.
    """

    has_host_memory: bool
    """Whether device memory is the host's own, so that the same bytes are free in both tiers."""
    computes_on_host: bool
    """Whether the host's cores compute: then updates on the host take them away, and results are there at once."""
    update_block_bytes: int
    """Gradients that an update on the device takes at a time: so few that they fit a cache, or enough to fill it."""
    activation_share: float
    """Of the device budget, what a plan leaves to activations and workspace where nobody knows what they take."""

    group_backend: str
    """Of torch's process groups, for bytes on this device."""
    interrupts: InterruptsInBackward | None
    """Finds a Ctrl-C during a backward that another thread runs."""

    def __init__(
        self, torch_device: torch.device, execution: Execution, faults: Faults, race_checker: RaceChecker | None
    ) -> None:
        """Start the lanes. Use ``open_device``."""
        self.torch_device = torch_device
        self.faults = faults
        self.labels_seen: set[str] = set()
        """Labels under which some handle was ever a dependency, skipped ones included."""
        self._checker = race_checker
        self._delays, self._execution = Delays(faults) if faults.delays or faults.throttle else None, execution
        self.stream_name = execution.stream_name
        """Tells the stream on which compute works now."""
        self._failures = Failures()
        self.check = self._failures.raise_next
        """Raises the first error that a lane hit and nobody has seen yet; the next call raises the next one."""
        self.refuse_after_failure = self._failures.raise_first
        """Raises the first error that a lane ever hit: what it was to do is not done."""
        self.recorder = Recorder(execution.stopwatch)
        """Adds up what compute waits for; keeps operations if asked to."""
        pace, seed = _at_once if self._delays is None else self._delays.pace, faults.permute
        service = Service(execution, pace, self._failures, self.recorder)
        self._lanes: Lanes = ThreadedLanes(service) if seed is None else PermutedLanes(service, seed)
        self.pid = os.getpid()
        """Of the process that opened it. A forked child can use nothing of it."""
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
            lane: Who runs it, on its own thread and, for copies on CUDA, on its own stream.
            name: Such as ``fetch model.layers.3``; stands in errors.
            work: Copies or computes. Must neither submit nor wait; must not enter autograd.
            reads: Bytes that ``work`` reads.
            writes: Bytes that ``work`` writes.
            after: What must have happened first. If any of it failed, this fails with the same error and does not run.
                Behind device work a copy lane is ordered on the device; other lanes block their thread.
            is_due: Asked when the operation's turn comes, with a race checker at once; always says the same. If no, the
                operation is over without waiting for ``after``: what comes after it is ordered by its lane's earlier
                operations only. Not for copy lanes.

        Raises:
            RaceError: A conflicting access is not ordered before (only with a race checker).
            LaneError: The device is closed.
        """
        self._refuse_in_child(name)
        dependencies = self._dependencies(after)
        counts = self._checker is None or is_due is None or is_due()
        clock = self._declare(lane.value, name, *((reads, writes, dependencies) if counts else ((), (), ())))
        handle = Handle(name, lane.value, self._lanes, clock)
        nbytes = sum([stop - start for _, start, stop in writes])
        self._lanes.submit(Operation(handle, lane, work, dependencies, nbytes, is_due))
        if self.faults.serial:
            self._blocked_by(handle, self._finish)
        return handle

    def compute(
        self, name: str, *, reads: Sequence[Region] = (), writes: Sequence[Region] = (), after: After = NOTHING
    ) -> Handle:
        """Order compute behind ``after`` and declare what the code that runs next there reads and writes.

        Compute is the calling thread on the CPU and its current stream on CUDA.

        Returns:
            A handle behind the declared access and all earlier ones. Use it only after the code ran; ``mark`` is exact.

        Raises:
            RaceError: A conflicting access is not ordered before (only with a race checker).
            OutcoreError: Something in ``after`` failed.
        """
        self._refuse_in_child(name)
        dependencies = self._dependencies(after)
        clock = () if self._checker is None else self._declare(self.stream_name(), name, reads, writes, dependencies)
        self._order_compute(dependencies)
        if self._delays is not None and (pause_s := self._delays.compute_s()) > 0:
            self._pause_compute(pause_s)
        return self._point(name, clock, self._compute_point(is_late=True))

    def mark(self, name: str) -> Handle:
        """A handle behind everything that compute was given so far."""
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
            RaceError: The host did not wait for a conflicting access (only with a race checker).
        """
        self._declare(HOST, name, reads, writes, ())

    def poison(self, buffer: Buffer, lane: Lane | None = None, after: After = NOTHING) -> Handle | None:
        """Fill a freed buffer with NaN where it is freed, if faults say so.

        Args:
            buffer: Nobody may read it until it is written again.
            lane: Who frees it, and so who fills it; None: compute.
            after: What must have happened first, beside what came before on the lane.

        Returns:
            None without poison. Else a handle that whoever uses the buffer next must come after.
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
        if buffer.bytes.is_cpu:  # this thread writes at once, unseen by copies on its stream
            self.finish_copies()
        buffer.bytes.fill_(POISON)

    def _finish(self) -> None:
        """Block the host until everything that was submitted is over, whether it failed or not."""
        self._lanes.drain()
        self._execution.drain()

    def _blocked_by(self, handle: Handle, wait: Callable[[], None]) -> None:
        """Wait, and have the time recorded in which compute has nothing else to do."""
        if handle.lane == COMPUTE or handle.is_over():
            wait()
            return
        with self.recorder.waiting(handle.lane, handle.name):
            wait()

    def synchronize(self) -> None:
        """Block the host until all lanes are empty and the device is idle. Raises no errors of lanes; see ``check``."""
        self._refuse_in_child("synchronize")
        self._finish()
        if self._checker is not None:
            self._checker.synchronize()

    def hangs_up_with(self, hang_up: Callable[[], None]) -> None:
        """When the lanes are closed, and one of them waits for another rank. Args: hang_up: Ends such waits."""
        self._lanes.hang_up = hang_up

    def stop(self) -> None:
        """Let running operations finish, fail the queued ones, join the threads; memory stays. Idempotent.

        Raises LaneError if an operation does not end.
        """
        if self.interrupts is not None:
            self.interrupts.leave(self)
        self._finalizer()

    def close(self) -> None:
        """``stop``, and give back what ``allocate`` took. Idempotent. ``synchronize`` first to have everything done."""
        try:
            self.stop()
        finally:
            self._free_memory()

    @abc.abstractmethod
    def allocate(self, nbytes: int, *, is_touched: bool = True) -> torch.Tensor:
        """Device memory: 1D uint8 of ``nbytes``, aligned to 4 KiB, not initialised.

        Where it is host memory, ``is_touched=False`` leaves its pages to whoever writes them, and to ``touch_memory``.
        Memory: device, ``nbytes`` and at most 4 KiB more, until the tensor and its views are gone.
        """

    @abc.abstractmethod
    def touch_memory(self) -> None:
        """Take what ``allocate`` left to be taken later. Nothing may be in flight."""

    @abc.abstractmethod
    def register_host(self, memory: torch.Tensor) -> bool:
        """Pin host memory (contiguous, aligned, alive until ``unregister_host``) in place: its copies are fast then.

        Returns:
            False if the driver refuses; the memory is then pageable, as before.
        """

    @abc.abstractmethod
    def unregister_host(self, memory: torch.Tensor) -> None:
        """Undo ``register_host``. Nothing may be in flight to or from the memory."""

    @abc.abstractmethod
    def hand_over(self, tensor: torch.Tensor, lane: Lane | None) -> None:
        """Let compute free a tensor that ``lane``, or (None) compute on the stream of now, uses until later."""

    @abc.abstractmethod
    def receive(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """``hand_over`` to compute of what autograd found, whose nodes work on the streams of their forward."""

    @abc.abstractmethod
    def rng_state(self) -> object:
        """State of the random generators that compute draws from: the CPU's and this device's."""

    @abc.abstractmethod
    def set_rng_state(self, state: object) -> None:
        """Restore what ``rng_state`` returned."""

    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Device memory that is free now."""

    @abc.abstractmethod
    def total_bytes(self) -> int:
        """Device memory that there is, whoever has it now."""

    @abc.abstractmethod
    def meter(self) -> Meter | None:
        """Measures what is taken beside what is taken now; None where that is other memory than the device tier's."""

    @abc.abstractmethod
    def finish_copies(self) -> None:
        """Block the calling thread until the copies that it has issued are over."""

    @abc.abstractmethod
    def _free_memory(self) -> None:
        """Give back what ``allocate`` took, as far as tensors do not do so when they go."""

    @abc.abstractmethod
    def _order_compute(self, dependencies: tuple[Handle, ...]) -> None:
        """Put compute behind these; raise what they raised."""

    @abc.abstractmethod
    def _compute_point(self, *, is_late: bool) -> Completion | None:
        """The point that compute has come to; with ``is_late`` it moves along until somebody depends on it."""

    @abc.abstractmethod
    def _pause_compute(self, seconds: float) -> None:
        """Keep compute busy."""

    def _dependencies(self, after: After) -> tuple[Handle, ...]:
        """The handles to come after, each once, without those under skipped labels."""
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


_AT_ONCE = Pace()


def _at_once(_: Operation) -> Pace:
    """No operation is slowed down."""
    return _AT_ONCE


def _handles(dependency: Dependency) -> tuple[Handle, ...]:
    if dependency is None:
        return ()
    if isinstance(dependency, Handle):
        return (dependency,)
    return tuple([handle for handle in dependency if handle is not None])


def _fixed(handles: Iterable[Handle]) -> tuple[Handle, ...]:
    """Somebody depends on these: points of compute that move along stay where they are."""
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
            execution.drain()  # never to be interrupted: behind this, memory that copies read and write is given back
