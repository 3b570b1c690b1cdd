"""Lanes: ordered queues of asynchronous operations, and the handles they return.

Every asynchronous act is a pair: submit, which returns a handle at once, and a wait on that handle. Operations of one
lane run one after the other in the order of submission; operations of different lanes run at the same time unless a
dependency orders them. Since an operation can depend only on handles that exist already, lanes cannot deadlock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, NoReturn, Protocol, final

from outcore.core.errors import LaneError, OutcoreError
from outcore.device.interrupts import IN_BACKWARD
from outcore.device.recorder import HostStopwatch, Recorder, Stopwatch
from outcore.order import ledger
from outcore.spec.lanes import Lane

Clock = tuple[int, ...]
SKIPPED = object()
"""What the work of a host lane returns if it found nothing to do: it is not recorded, and no fault slows it down."""


class Completion(Protocol):
    """A point on the device that work was put behind, such as a CUDA event."""

    def fix(self) -> None:
        """Somebody depends on the point: if it still moves along with compute, it stays where it is now."""

    def query(self) -> bool:
        """Whether the device got there."""

    def synchronize(self) -> None:
        """Block the host until it did, without holding the interpreter lock."""


_SHORT_S, _LONG_S = 2e-5, 2e-4


def wait_for(completion: Completion) -> None:
    """As ``synchronize``, but a Ctrl-C comes through: not for lanes, whose threads may block."""
    pause_s = _SHORT_S
    while not completion.query():
        IN_BACKWARD.look()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONG_S)
    completion.synchronize()


@final
class Failure:
    """Why an operation failed; shared by the operation and everything that depended on it."""

    def __init__(self, error: BaseException, operation: str, lane: str) -> None:
        """Args: operation, lane: Where it happened first."""
        self.error = error
        self.operation = operation
        self.lane = lane
        self.is_seen = False
        self._traceback: TracebackType | None = error.__traceback__

    def throw(self) -> NoReturn:
        """Raise: an error of the family as it is, anything else as ``LaneError`` from it."""
        self.is_seen = True
        error = self.error.with_traceback(self._traceback)
        if isinstance(error, OutcoreError):
            raise error
        raise LaneError(
            f"expected '{self.operation}' on lane {self.lane} ({Lane(self.lane).route}) to finish, but it raised "
            f"{type(error).__name__}: {error}"
        ) from error


class Failures:
    """Of operations that failed by themselves, not of those that depended on them."""

    def __init__(self) -> None:
        self._first: Failure | None = None
        self._waiting: list[Failure] = []

    def add(self, failure: Failure) -> None:
        """May be called from any thread."""
        self._waiting.append(failure)

    def raise_next(self) -> None:
        """Raise the first that nobody has seen yet; the next call raises the next one."""
        while self._waiting:
            failure = self._waiting.pop(0)
            self._first = self._first or failure
            if not failure.is_seen:
                failure.throw()

    def raise_first(self) -> None:
        """Raise the first that there ever was."""
        for failure in (self._first, *self._waiting):
            if failure is not None:
                failure.throw()


class Lanes(Protocol):
    """What runs the queues: threads, or an executor that permutes them."""

    hang_up: Callable[[], None] | None
    """Ends waits for other ranks; None: there are none."""

    def submit(self, operation: Operation) -> None:
        """Queue an operation."""

    def wait_issued(self, handle: Handle) -> None:
        """Block until the operation of ``handle`` ran or failed."""

    def poll(self, handle: Handle) -> None:
        """The caller asked whether ``handle`` is done."""

    def drain(self) -> None:
        """Block until nothing is queued."""

    def close(self) -> None:
        """Let running operations finish, fail the queued ones, join the threads."""


_ISSUED = threading.Event()  # shared by all points of compute, at which nobody ever waits for a lane
_ISSUED.set()


@final
class Handle:
    """One submitted operation, or a point in what compute was given.

    States: *queued* (nothing happened yet), *issued* (the work ran on its lane; on CUDA the bytes may still be in
    flight), *done* (the bytes are there), *failed*. Handles are cheap and keep neither work nor dependencies alive.
    """

    __slots__ = ("_failure", "_issued", "_lanes", "_pid", "began_s", "clock", "completion", "lane", "name")

    def __init__(self, name: str, lane: str, lanes: Lanes, clock: Clock = (), *, is_issued: bool = False) -> None:
        """Args: lane: A lane's value or ``compute``. clock: What the race checker knows of it."""
        self.name = name
        self.lane = lane
        self.clock = clock
        self.completion: Completion | None = None
        self.began_s: float | None = None
        """When its work began, on ``time.perf_counter``; None before, and for work of a device."""
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
        """Why it failed, if it did."""
        return self._failure

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once. A hint: the race checker does not count it as an order."""
        if not self._issued.is_set():
            self._lanes.poll(self)
        return self.is_over()

    def is_over(self) -> bool:
        """``done`` for operations: looks and does nothing else."""
        return self._issued.is_set() and (self.completion is None or self.completion.query())

    def wait(self) -> None:
        """Block the host until the bytes are there.

        Use ``Device.wait`` where the race checker shall know of it.

        Raises:
            OutcoreError: The operation, or one that it depended on, failed with it.
            LaneError: It failed with anything else, which is the cause; its lane was closed first; or something that
                it waits for makes no progress any more.
        """
        self.wait_issued()
        if self._failure is not None:
            self._failure.throw()
        if self.completion is not None:
            wait_for(self.completion)

    def wait_issued(self) -> None:
        """Block the host until the work ran on its lane or failed; raises nothing that the work raised.

        Raises:
            LaneError: Something that it waits for makes no progress any more.
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
        """Block until somebody else settles the handle; for implementations of ``Lanes``. Returns whether it is."""
        return self._issued.wait(timeout_s)

    def finish(self, completion: Completion | None = None) -> None:
        """Called once by whoever ran the work. It stays failed if it was given up before."""
        self.completion = completion
        self._issued.set()

    def fail(self, failure: Failure) -> None:
        """Called by whoever could not run the work, or gives it up."""
        self._failure = failure
        self._issued.set()


Dependency = ledger.Dependency[Handle]
After = ledger.After[Handle]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One entry of a lane's queue."""

    handle: Handle
    lane: Lane
    work: Callable[[], object]
    dependencies: tuple[Handle, ...]
    nbytes: int
    """What it declares to write: the bytes that a copy moves, or an update changes."""
    is_due: Callable[[], bool] | None = None
    """Asked when its turn comes; if not, it is over at once, without waiting for anything."""


class Pace(NamedTuple):
    """How an operation is slowed down on purpose."""

    before_s: float = 0.0
    least_s: float = 0.0
    """The work lasts so long, or longer if it does by itself."""
    after_s: float = 0.0


class Execution(Protocol):
    """How a kind of device runs operations; shared by all its lanes, holds no device."""

    @property
    def stopwatch(self) -> Stopwatch:
        """Times what it runs."""

    def begin_thread(self, lane: Lane | None) -> None:
        """Set up the calling thread to serve ``lane``, or any lane if None."""

    def run(self, operation: Operation, pace: Pace, recorder: Recorder) -> Completion | None:
        """Order behind the dependencies, which are issued, and run the work at a pace."""

    def stream_name(self) -> str:
        """The race checker's name of the stream on which compute works now."""

    def drain(self) -> None:
        """Block the host until the device is idle."""


@final
class HostExecution:
    """Operations are over when their work returns."""

    def __init__(self) -> None:
        self.stopwatch = HostStopwatch()

    def begin_thread(self, lane: Lane | None) -> None:
        """Nothing to set up."""

    def run(self, operation: Operation, pace: Pace, recorder: Recorder) -> None:
        """Run the work."""
        run_on_host(operation, pace, recorder)

    def stream_name(self) -> str:
        """There is one."""
        return "compute"

    def drain(self) -> None:
        """Nothing runs behind the host's back."""


def pause(seconds: float) -> None:
    """Sleep, or go on at once: a sleep of no length still gives the core away."""
    if seconds > 0:
        time.sleep(seconds)


def run_on_host(operation: Operation, pace: Pace, recorder: Recorder) -> None:
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
    """What lanes need to serve operations."""

    execution: Execution
    pace: Callable[[Operation], Pace]
    failures: Failures
    recorder: Recorder


def run_operation(operation: Operation, service: Service) -> None:
    """Run one operation and settle its handle, whatever happens."""
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
    except BaseException as error:  # a lane survives whatever its work raises; the handle carries it
        failure = Failure(error, handle.name, handle.lane)
        service.failures.add(failure)
        handle.fail(failure)


def closed_failure(operation: str, lane: str) -> Failure:
    """Why an operation that was still queued fails when its lane closes. Only who waits for it hears of it."""
    error = LaneError(f"expected '{operation}' to run on lane {lane}, but the device was closed before its turn")
    return Failure(error, operation, lane)


def refuse_closed(operation: Operation) -> NoReturn:
    """Raise for a submission to closed lanes."""
    raise LaneError(
        f"expected an open device for '{operation.handle.name}' on lane {operation.lane.value}, but it is closed; "
        f"submit before close()"
    )


def refuse_on_lane(what: str) -> NoReturn:
    """Raise for a submission or a wait from inside an operation."""
    raise AssertionError(f"{what} inside an operation of a lane: operations only work; name what they need in `after`")
