"""Lanes: ordered queues of asynchronous operations, and the handles they return.

Every asynchronous act is a pair: submit, which returns a handle at once, and a wait on that handle. Operations of one
lane run one after the other in the order of submission; operations of different lanes run at the same time unless a
dependency orders them. Since an operation can depend only on handles that exist already, lanes cannot deadlock.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import NoReturn, Protocol, final

import torch

from outcore.core.errors import LaneError, OutcoreError
from outcore.runtime.threads import start_single_threaded

Clock = tuple[int, ...]
CLOSE_TIMEOUT_S = 60.0  # an operation that runs longer than this while its lane closes is reported, not waited for


class Lane(enum.Enum):
    """The queues that take operations. Compute (the caller's thread or stream) and the host are not among them."""

    H2D = "h2d"
    D2H = "d2h"
    WRITE_BACK = (
        "write_back"  # host to device too, apart from fetches: it waits for updates that come after the next fetch
    )
    WEIGHTS_READ = "weights_read"
    STATES_READ = "states_read"
    DISK_WRITE = "disk_write"
    UPDATE = "update"


COPY_LANES = frozenset({Lane.H2D, Lane.D2H, Lane.WRITE_BACK})
"""Lanes whose operations are device work: on CUDA they have a stream of their own."""


class Completion(Protocol):
    """A point on the device that work was put behind, such as a CUDA event."""

    def fix(self) -> None:
        """Somebody depends on the point: if it still moves along with compute, it stays where it is now."""

    def query(self) -> bool:
        """Whether the device got there."""

    def synchronize(self) -> None:
        """Block the host until it did, without holding the interpreter lock."""


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
            f"expected '{self.operation}' on lane {self.lane} to finish, but it raised {type(error).__name__}: {error}"
        ) from error


class Lanes(Protocol):
    """What runs the queues: threads, or an executor that permutes them."""

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


@final
class Handle:
    """One submitted operation, or a point in what compute was given.

    States: *queued* (nothing happened yet), *issued* (the work ran on its lane; on CUDA the bytes may still be in
    flight), *done* (the bytes are there), *failed*. Handles are cheap and keep neither work nor dependencies alive.
    """

    __slots__ = ("_failure", "_issued", "_lanes", "_pid", "clock", "completion", "lane", "name")

    def __init__(self, name: str, lane: str, lanes: Lanes, clock: Clock = ()) -> None:
        """Args: lane: A lane's value or ``compute``. clock: What the race checker knows of it."""
        self.name = name
        self.lane = lane
        self.clock = clock
        self.completion: Completion | None = None
        self._lanes = lanes
        self._failure: Failure | None = None
        self._issued = threading.Event()
        self._pid = os.getpid()

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
        return self._issued.is_set() and (self.completion is None or self.completion.query())

    def wait(self) -> None:
        """Block the host until the bytes are there.

        Use ``Device.wait`` where the race checker shall know of it.

        Raises:
            OutcoreError: The operation, or one that it depended on, failed with it.
            LaneError: It failed with anything else, which is the cause; or its lane was closed first.
        """
        self.wait_issued()
        if self._failure is not None:
            self._failure.throw()
        if self.completion is not None:
            self.completion.synchronize()

    def wait_issued(self) -> None:
        """Block the host until the work ran on its lane or failed; raises nothing that the work raised."""
        if self._issued.is_set():
            return
        if os.getpid() != self._pid:
            raise LaneError(
                f"expected a wait for '{self.name}' in the process that submitted it, but this is a forked child, "
                f"which has no lanes; wait before the fork"
            )
        self._lanes.wait_issued(self)

    def block(self) -> None:
        """Block until somebody else settles the handle; for implementations of ``Lanes``."""
        self._issued.wait()

    def finish(self, completion: Completion | None = None) -> None:
        """Called once by whoever ran the work."""
        self.completion = completion
        self._issued.set()

    def fail(self, failure: Failure) -> None:
        """Called once by whoever could not run the work."""
        self._failure = failure
        self._issued.set()


Dependency = Handle | Iterable[Handle | None] | None
After = Mapping[str, Dependency]
"""Label -> what must have happened first. Labels are short phrases: ``slot free``, ``weights updated``."""


def newest(handles: Iterable[Handle]) -> list[Handle]:
    """The last handle of each lane, in the order of submission: whoever comes after these comes after all of them.

    Keeps a list of readers short, and unlike a look at ``done`` always in the same way.
    """
    return list({handle.lane: handle for handle in handles}.values())


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One entry of a lane's queue."""

    handle: Handle
    lane: Lane
    work: Callable[[], object]
    dependencies: tuple[Handle, ...]


class Execution(Protocol):
    """How a kind of device runs operations; shared by all its lanes, holds no device."""

    def begin_thread(self, lane: Lane | None) -> None:
        """Set up the calling thread to serve ``lane``, or any lane if None."""

    def run(self, operation: Operation, before_s: float, after_s: float) -> Completion | None:
        """Order behind the dependencies, which are issued, and run the work between two pauses."""

    def drain(self) -> None:
        """Block the host until the device is idle."""


@final
class HostExecution:
    """Operations are over when their work returns."""

    def begin_thread(self, lane: Lane | None) -> None:
        """Nothing to set up."""

    def run(self, operation: Operation, before_s: float, after_s: float) -> None:
        """Run the work between two pauses."""
        time.sleep(before_s)
        operation.work()
        time.sleep(after_s)

    def drain(self) -> None:
        """Nothing runs behind the host's back."""


Pauses = Callable[[Lane], tuple[float, float]]
"""Seconds to pause before and after the next operation of a lane."""


@dataclass(frozen=True, slots=True)
class Service:
    """What lanes need to serve operations."""

    execution: Execution
    pauses: Pauses
    failures: list[Failure]
    """Every operation that failed by itself is appended, not those that depended on it."""


def run_operation(operation: Operation, service: Service) -> None:
    """Run one operation and settle its handle, whatever happens."""
    handle = operation.handle
    try:
        for dependency in operation.dependencies:
            dependency.block()
            if dependency.failure is not None:
                handle.fail(dependency.failure)
                return
        before_s, after_s = service.pauses(operation.lane)
        handle.finish(service.execution.run(operation, before_s, after_s))
    except BaseException as error:  # a lane survives whatever its work raises; the handle carries it
        failure = Failure(error, handle.name, handle.lane)
        service.failures.append(failure)
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


@final
class ThreadedLanes:
    """One daemon thread per lane, each with one ATen thread and without autograd.

    Owns its threads until ``close``; idle threads hold no operation.
    """

    def __init__(self, service: Service) -> None:
        """Start the threads; returns when all are ready."""
        self._service = service
        self._lock = threading.RLock()
        self._is_closed = False
        self._queues: dict[Lane, SimpleQueue[Operation | None]] = {lane: SimpleQueue() for lane in Lane}
        self._last: dict[Lane, Handle] = {}
        self._threads = start_single_threaded({f"outcore-{lane.value}": partial(self._serve, lane) for lane in Lane})
        self._idents = frozenset(thread.ident for thread in self._threads)

    def submit(self, operation: Operation) -> None:
        """Queue an operation at the end of its lane."""
        if threading.get_ident() in self._idents:
            refuse_on_lane(f"submit '{operation.handle.name}'")
        with self._lock:
            if self._is_closed:
                refuse_closed(operation)
            self._last[operation.lane] = operation.handle
            self._queues[operation.lane].put(operation)

    def wait_issued(self, handle: Handle) -> None:
        """Block until the lane got to it."""
        if threading.get_ident() in self._idents:
            refuse_on_lane(f"wait for '{handle.name}'")
        handle.block()

    def poll(self, handle: Handle) -> None:
        """Threads advance on their own."""

    def drain(self) -> None:
        """Block until every operation submitted so far ran or failed."""
        for handle in tuple(self._last.values()):
            handle.wait_issued()

    def _serve(self, lane: Lane) -> None:
        """Run a lane's queue until it is closed; the body of its thread."""
        torch.set_grad_enabled(False)
        self._service.execution.begin_thread(lane)
        queue = self._queues[lane]
        while (operation := queue.get()) is not None:
            if self._is_closed:
                operation.handle.fail(closed_failure(operation.handle.name, lane.value))
            else:
                run_operation(operation, self._service)
            del operation  # an idle lane must not keep the last operation's tensors alive

    def close(self) -> None:
        """Let running operations finish, fail the queued ones, join the threads. Idempotent.

        Raises:
            LaneError: An operation still runs after a minute; its thread is left behind.
        """
        with self._lock:
            self._is_closed = True
            for queue in self._queues.values():
                queue.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in others if thread.is_alive()]
        if stuck:
            raise LaneError(f"expected all lanes to end within {CLOSE_TIMEOUT_S:.0f} s of close, but {stuck} still run")
