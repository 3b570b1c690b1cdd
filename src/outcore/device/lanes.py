"""Lanes: ordered queues of asynchronous operations, and the handles that submissions return.

Asynchronous work has two halves: a submission, which returns a handle at once, and a wait on that handle. Operations of
one lane run one after the other in the order of submission. Operations of different lanes run at the same time unless a
dependency orders them. Since an operation can depend only on handles that exist already, lanes cannot deadlock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, Protocol, final

from outcore.core.errors import LaneError, OutcoreError
from outcore.device.interrupts import IN_BACKWARD
from outcore.device.recorder import HostStopwatch, Recorder, Stopwatch
from outcore.order import ledger
from outcore.spec.lane_names import Lane

Clock = tuple[int, ...]
SKIPPED = object()
"""Result of work on a host lane that found nothing to do: it is not recorded, and no throttle or pause follows."""


class Completion(Protocol):
    """A point on the device behind the work of an operation, such as a CUDA event."""

    def fix(self) -> None:
        """Fix the point where compute is now, if it still moves along with compute: something depends on it."""

    def query(self) -> bool:
        """Whether the device has reached the point."""

    def synchronize(self) -> None:
        """Block the host until the device has reached the point, without holding the interpreter lock."""


_SHORT_S, _LONG_S = 2e-5, 2e-4


def wait_for(completion: Completion) -> None:
    """``synchronize`` a completion so that a Ctrl-C interrupts. Not for lanes, whose threads may block."""
    pause_s = _SHORT_S
    while not completion.query():
        IN_BACKWARD.look()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONG_S)
    completion.synchronize()


@final
class Failure:
    """Why an operation failed. The operation shares it with everything that depended on it."""

    def __init__(self, error: BaseException, operation: str, lane: str) -> None:
        """Args: operation, lane: Where the error happened first."""
        self.error = error
        self.operation = operation
        self.lane = lane
        self.is_seen = False
        self._traceback: TracebackType | None = error.__traceback__

    def throw(self) -> NoReturn:
        """Raise the error: an ``OutcoreError`` as it is, any other as the cause of a ``LaneError``."""
        self.is_seen = True
        error = self.error.with_traceback(self._traceback)
        if isinstance(error, OutcoreError):
            raise error
        raise LaneError(
            f"expected '{self.operation}' on lane {self.lane} ({Lane(self.lane).route}) to finish, but it raised "
            f"{type(error).__name__}: {error}"
        ) from error


class Failures:
    """Failures of operations that failed by themselves, without those of operations that depended on them."""

    def __init__(self) -> None:
        self._first: Failure | None = None
        self._waiting: list[Failure] = []

    def add(self, failure: Failure) -> None:
        """Remember a failure. May be called from any thread."""
        self._waiting.append(failure)

    def raise_next(self) -> None:
        """Raise the first failure that was not raised yet; the next call raises the next one."""
        while self._waiting:
            failure = self._waiting.pop(0)
            self._first = self._first or failure
            if not failure.is_seen:
                failure.throw()

    def raise_first(self) -> None:
        """Raise the first failure ever, even if it was raised before."""
        for failure in (self._first, *self._waiting):
            if failure is not None:
                failure.throw()


class Lanes(Protocol):
    """Runs the queues: on threads, or by an executor that permutes them."""

    hang_up: Callable[[], None] | None
    """Ends waits for other ranks; None without other ranks."""

    def submit(self, operation: QueuedOperation) -> None:
        """Queue an operation."""

    def wait_issued(self, handle: Handle) -> None:
        """Block until the operation of ``handle`` ran or failed."""

    def poll(self, handle: Handle) -> None:
        """Take note that a caller asked whether ``handle`` is done."""

    def drain(self, lanes: Collection[Lane] = tuple(Lane)) -> None:
        """Block until nothing is queued on these lanes."""

    def close(self) -> None:
        """Let running operations finish, fail the queued ones, join the threads."""


_ISSUED = threading.Event()  # shared by all points of compute, which never wait for a lane
_ISSUED.set()


@final
class Handle:
    """One submitted operation, or a point in the work of compute.

    States: *queued* (nothing happened yet), *issued* (the work ran on its lane; on CUDA the bytes may still be in
    flight), *done* (the bytes are there), *failed*. Handles are cheap and keep neither work nor dependencies alive.
    """

    __slots__ = ("_failure", "_issued", "_lanes", "_pid", "began_s", "clock", "completion", "lane", "name")

    def __init__(self, name: str, lane: str, lanes: Lanes, clock: Clock = (), *, is_issued: bool = False) -> None:
        """Args: lane: A lane's value or ``compute``. clock: The race checker's vector clock of this operation."""
        self.name = name
        self.lane = lane
        self.clock = clock
        self.completion: Completion | None = None
        self.began_s: float | None = None
        """When the lane's thread began the work, by ``time.perf_counter``; None before, and for points of compute."""
        self._lanes = lanes
        self._failure: Failure | None = None
        self._issued = _ISSUED if is_issued else threading.Event()
        self._pid = 0 if is_issued else os.getpid()

    def __repr__(self) -> str:
        state = "queued" if not self._issued.is_set() else "failed" if self._failure is not None else "issued"
        return f"<Handle '{self.name}' on {self.lane}: {state}>"

    @property
    def is_issued(self) -> bool:
        """Whether the work ran on its lane or failed. Orders nothing."""
        return self._issued.is_set()

    @property
    def failure(self) -> Failure | None:
        """Why the operation failed; None if it did not."""
        return self._failure

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once. A hint: to the race checker it orders nothing."""
        if not self._issued.is_set():
            self._lanes.poll(self)
        return self.is_over()

    def is_over(self) -> bool:
        """``done`` that only looks and never makes lanes advance, so operations may call it too."""
        return self._issued.is_set() and (self.completion is None or self.completion.query())

    def wait(self) -> None:
        """Block the host until the bytes are there.

        Use ``Device.wait`` where the race checker must know of the wait.

        Raises:
            OutcoreError: The operation, or one that it depended on, failed with this error.
            LaneError: It failed with any other error, which is the cause; or its lane was closed before its turn; or an
                operation that it waits for stopped making progress.
        """
        self.wait_issued()
        if self._failure is not None:
            self._failure.throw()
        if self.completion is not None:
            wait_for(self.completion)

    def wait_issued(self) -> None:
        """Block the host until the work ran on its lane or failed. Does not raise the error of the work.

        Raises:
            LaneError: An operation that it waits for stopped making progress.
        """
        if self._issued.is_set():
            return
        if os.getpid() != self._pid:
            raise LaneError(
                f"expected a wait for '{self.name}' in the process that submitted it, but this is a forked child, "
                f"which has no lanes; wait before the fork"
            )
        self._lanes.wait_issued(self)

    def block(self, timeout_s: float | None = None) -> bool:
        """Block until another thread settles the handle; returns whether it is settled. For ``Lanes`` only."""
        return self._issued.wait(timeout_s)

    def finish(self, completion: Completion | None = None) -> None:
        """Settle the handle after its work ran; to be called once. A handle that was given up before stays failed."""
        self.completion = completion
        self._issued.set()

    def fail(self, failure: Failure) -> None:
        """Settle the handle of an operation that could not run, or that is given up."""
        self._failure = failure
        self._issued.set()


Dependency = ledger.Dependency[Handle]
After = ledger.After[Handle]


@dataclass(frozen=True, slots=True, eq=False)
class QueuedOperation:
    """One entry of a lane's queue."""

    handle: Handle
    lane: Lane
    work: Callable[[], object]
    dependencies: tuple[Handle, ...]
    nbytes: int
    """Bytes that it declares to write: those that a copy moves or an update changes."""
    is_due: Callable[[], bool] | None = None
    """Called when the operation's turn comes. If false, the operation is over at once, without waiting."""


class Throttle(NamedTuple):
    """How an operation is slowed down on purpose."""

    before_s: float = 0.0
    least_s: float = 0.0
    """The least time that the work takes; its own time if that is longer."""
    after_s: float = 0.0


class Execution(Protocol):
    """How a kind of device runs operations. All its lanes share it; it holds no reference to the device."""

    @property
    def stopwatch(self) -> Stopwatch:
        """Clock for the operations that it runs."""

    def begin_thread(self, lane: Lane | None) -> None:
        """Set up the calling thread to serve ``lane``, or any lane if None."""

    def run(self, operation: QueuedOperation, pace: Throttle, recorder: Recorder) -> Completion | None:
        """Order the operation behind its dependencies, all issued by now, and run its work at a pace."""

    def stream_name(self) -> str:
        """Name, for the race checker, of the stream on which compute works now."""

    def drain(self) -> None:
        """Block the host until the device is idle."""


@final
class HostExecution:
    """Runs operations on the host: they are over when their work returns."""

    def __init__(self) -> None:
        self.stopwatch = HostStopwatch()

    def begin_thread(self, lane: Lane | None) -> None:
        """Nothing to set up."""

    def run(self, operation: QueuedOperation, pace: Throttle, recorder: Recorder) -> None:
        """Run the work."""
        run_on_host(operation, pace, recorder)

    def stream_name(self) -> str:
        """Name of the only stream."""
        return "compute"

    def drain(self) -> None:
        """Nothing to wait for: the host itself does all work."""


def pause(seconds: float) -> None:
    """Sleep, or return at once if there is nothing to sleep: even a sleep of 0 s would yield the core."""
    if seconds > 0:
        time.sleep(seconds)


def run_on_host(operation: QueuedOperation, pace: Throttle, recorder: Recorder) -> None:
    """Run work that is over when it returns."""
    start_s = time.perf_counter()
    pause(pace.before_s)
    begun_s = operation.handle.began_s = time.perf_counter()
    if operation.work() is SKIPPED:
        return
    rest_s = begun_s + pace.least_s - time.perf_counter()
    pause(max(rest_s, 0.0) + pace.after_s)
    if recorder.is_on:
        recorder.add(operation.lane.value, operation.handle.name, start_s, time.perf_counter(), operation.nbytes)


@dataclass(frozen=True, slots=True)
class Service:
    """What lanes need in order to run operations."""

    execution: Execution
    pace: Callable[[QueuedOperation], Throttle]
    failures: Failures
    recorder: Recorder


def run_operation(operation: QueuedOperation, service: Service) -> None:
    """Run one operation and settle its handle, even if the work raises."""
    handle = operation.handle
    try:
        if operation.is_due is not None and not operation.is_due():
            handle.finish()
            return
        for dependency in operation.dependencies:
            dependency.block()
            if dependency.failure is not None:
                handle.fail(dependency.failure)
                return
        handle.finish(service.execution.run(operation, service.pace(operation), service.recorder))
    except BaseException as error:  # a lane survives any error of its work; the handle carries it
        failure = Failure(error, handle.name, handle.lane)
        service.failures.add(failure)
        handle.fail(failure)


def closed_failure(operation: str, lane: str) -> Failure:
    """Failure of an operation that was still queued when its lane closed. Only a wait for the operation raises it."""
    error = LaneError(f"expected '{operation}' to run on lane {lane}, but the device was closed before its turn")
    return Failure(error, operation, lane)


def refuse_closed(operation: QueuedOperation) -> NoReturn:
    """Raise for a submission to closed lanes."""
    raise LaneError(
        f"expected an open device for '{operation.handle.name}' on lane {operation.lane.value}, but it is closed; "
        f"submit before close()"
    )


def refuse_on_lane(what: str) -> NoReturn:
    """Raise for a submission or a wait from inside an operation."""
    raise AssertionError(f"{what} inside an operation of a lane: operations only work; name what they need in `after`")
