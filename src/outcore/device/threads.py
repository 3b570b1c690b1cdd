"""Threads of lanes and workers, the watch over lanes, and the end of the process.

An operation without progress is an error, never an endless wait ([Note: stalls]).

[Note: ATen's thread count] ``torch.set_num_threads`` sets the count of the calling thread and a default for the
process. A thread adopts the default when it first asks for its count or runs a parallel kernel, even if it set its own
count before. The count changes the bits of sums, so neither the main thread's count nor the default may change.
Therefore a new thread first adopts the default and then sets its own count, and finally a short-lived thread sets the
default back.

[Note: threads at the end] Once Python shuts down, a thread that asks for the interpreter lock is unwound. If it returns
from a kernel, it is unwound through C++ code, which aborts the process. So no thread may be in a kernel by then: models
are closed, which stops updates at their next block, and copies are waited for. A Ctrl-C during this time ends the
process at once, as it ends a program that handles no signals. A thread that never returns to the interpreter, such as
one that waits for a dead drive, ends with the process in any case.

[Note: stalls] Every ``_LOOK_S`` or sooner, a wait looks at the operation that blocks it, through any chain of
dependencies. If the work of that operation has lasted for ``STALL_TIMEOUT_S``, the operation is given up: it fails, so
that everything that depends on it ends too. Its work may still come back at any time and write, so the lanes take no
more operations, and the caller can only ``close``. Transfers of the disk tier are not timed here: the store watches
them piece by piece, and a long transfer that moves is no stall. Work of a device is not timed either: it takes as long
as the program's kernels take.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import NoReturn, Protocol, final

import torch

from outcore.core.errors import LaneError
from outcore.device.interrupts import IN_BACKWARD
from outcore.device.lanes import (
    Failure,
    Handle,
    QueuedOperation,
    Service,
    closed_failure,
    refuse_closed,
    refuse_on_lane,
    run_operation,
    wait_for,
)
from outcore.spec.lane_names import RANK_LANES, Lane

_LOCK = threading.Lock()  # of two callers at once, one could take the count that the other sets for the default
_STARTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_threads(bodies: Mapping[str, Callable[[], None]], *, aten_threads: int = 1) -> tuple[threading.Thread, ...]:
    """Start a daemon thread per body; returns when all of them have begun.

    Args:
        bodies: Name of the thread -> its function.
        aten_threads: Number of ATen threads of each.
    """
    with _LOCK, ThreadPoolExecutor(max_workers=1) as other:
        torch.get_num_threads()  # the calling thread adopts the default before the default changes for a moment
        default = other.submit(torch.get_num_threads).result()
        ready = threading.Barrier(len(bodies) + 1)
        threads = tuple(
            threading.Thread(target=_begin, args=(body, ready, aten_threads), name=name, daemon=True)
            for name, body in bodies.items()
        )
        _STARTED.update(threads)
        try:
            for thread in threads:
                thread.start()
            ready.wait()
        except BaseException:
            ready.abort()  # threads that did start now end, instead of waiting for the rest
            raise
        finally:
            other.submit(torch.set_num_threads, default).result()
    return threads


def join_started(timeout_s: float) -> None:
    """Wait until all threads ever started here have ended. They must have been told to end.

    Args:
        timeout_s: Timeout for all of them together.
    """
    deadline_s = time.monotonic() + timeout_s
    for thread in tuple(_STARTED):
        if thread.is_alive():
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _begin(body: Callable[[], None], ready: threading.Barrier, aten_threads: int) -> None:
    torch.get_num_threads()  # adopts the default: else the first parallel kernel would do so later
    torch.set_num_threads(aten_threads)
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        return
    body()


# The end of the process.

_WAIT_S = 5.0  # longer than any one kernel or copy


class _Closable(Protocol):
    def close(self) -> None:
        """Close. Idempotent. Removes files and tells threads to end even if it is interrupted."""


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(something: _Closable) -> None:
    """Close an object at the end of the process, if it still exists then. Holds a weak reference."""
    _open.add(something)


@atexit.register
def _end() -> None:
    """See [Note: threads at the end]."""
    try:
        with ExitStack() as closing:  # if one is interrupted, the others still close
            for something in tuple(_open):
                closing.callback(something.close)
        join_started(_WAIT_S)
    except (KeyboardInterrupt, SystemExit) as stop:
        _end_at_once(stop)


def _forget_the_parents() -> None:
    """Forget the parent's objects and threads: a forked child has none of the threads, and may open its own objects."""
    _open.clear()
    _STARTED.clear()


os.register_at_fork(after_in_child=_forget_the_parents)


def _end_at_once(stop: KeyboardInterrupt | SystemExit) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if isinstance(stop, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    code = stop.code if isinstance(stop, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


STALL_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 20.0  # if an operation runs for longer while its lane closes, its thread is left and ``close`` raises
_END_TIMEOUT_S = 1.0  # for threads to end once the operations that they wait for are given up
_LOOK_S = 1.0
_PAUSE_S = 0.01
_WATCHED_ELSEWHERE = frozenset(
    {Lane.WEIGHTS_READ, Lane.STATES_READ, Lane.DISK_WRITE, Lane.STATES_WRITE, Lane.SAVE, *RANK_LANES}
)
"""Lanes whose operations are not timed here. The disk store and the files of a checkpoint watch theirs piece by piece,
so that slow drives get the time they need. Process groups have timeouts of their own: other ranks may compute for long
before they arrive."""


@final
class ThreadedLanes:
    """One daemon thread per lane, each with one ATen thread and without autograd.

    The threads of lanes between ranks start at the first use. Owns its threads until ``close``. Idle threads hold no
    operation.
    """

    def __init__(self, service: Service) -> None:
        """Start the threads; returns when all are ready."""
        self.hang_up: Callable[[], None] | None = None
        """Ends waits for other ranks; None without other ranks."""
        self._service = service
        self._lock = threading.RLock()
        self._is_closed = False
        self._stall: Failure | None = None
        self._queues: dict[Lane, SimpleQueue[QueuedOperation | None]] = {lane: SimpleQueue() for lane in Lane}
        self._last: dict[Lane, Handle] = {}
        self._heads: dict[str, QueuedOperation] = {}  # the operation that each lane runs, or is about to run
        self._threads: tuple[threading.Thread, ...] = ()
        self._start([lane for lane in Lane if lane not in RANK_LANES])

    def _start(self, lanes: Sequence[Lane]) -> None:
        """Start threads for lanes that have none yet."""
        bodies = {f"outcore-{lane.value}": partial(self._serve, lane) for lane in lanes}
        self._threads += tuple(start_threads(bodies))
        self._idents = frozenset(thread.ident for thread in self._threads)
        self._waiting = [lane for lane in RANK_LANES if lane not in lanes]

    def submit(self, operation: QueuedOperation) -> None:
        """Queue an operation at the end of its lane."""
        if threading.get_ident() in self._idents:
            refuse_on_lane(f"submit '{operation.handle.name}'")
        with self._lock:
            if self._is_closed:
                refuse_closed(operation)
            if self._stall is not None:
                self._stall.throw()
            if operation.lane in self._waiting:
                self._start(self._waiting)
            self._queues[operation.lane].put(operation)
            self._last[operation.lane] = operation.handle  # after `put`: `drain` must not wait for what was not queued

    def wait_issued(self, handle: Handle) -> None:
        """Block until the lane ran the operation or failed it."""
        if threading.get_ident() in self._idents:
            refuse_on_lane(f"wait for '{handle.name}'")
        while self._stall is None:
            if handle.block(min(_LOOK_S, STALL_TIMEOUT_S / 4)):
                return
            IN_BACKWARD.look()
            self._stall = self._stalled(handle)
        self._stall.throw()

    def poll(self, handle: Handle) -> None:
        """Do nothing: threads advance on their own."""

    def drain(self, lanes: Collection[Lane] = tuple(Lane)) -> None:
        """Block until all operations submitted so far to these lanes ran or failed, and their bytes are there."""
        for handle in [handle for lane, handle in tuple(self._last.items()) if lane in lanes]:
            handle.wait_issued()
            if handle.completion is not None:
                wait_for(handle.completion)
        if self._stall is not None:
            self._stall.throw()

    def _serve(self, lane: Lane) -> None:
        """Run a lane's queue until the lane is closed. This is the body of the lane's thread."""
        torch.set_grad_enabled(False)
        self._service.execution.begin_thread(lane)
        queue = self._queues[lane]
        while (operation := queue.get()) is not None:
            self._heads[lane.value] = operation
            if self._is_closed:
                operation.handle.fail(closed_failure(operation.handle.name, lane.value))
            else:
                run_operation(operation, self._service)
            del self._heads[lane.value], operation  # an idle lane must not keep the last operation's tensors alive

    def _stalled(self, handle: Handle) -> Failure | None:
        """Give up the operation that blocks a handle, through any chain of dependencies, if it has run for too long."""
        lane = handle.lane
        while (operation := self._heads.get(lane)) is not None:
            awaited = next((d for d in operation.dependencies if not d.is_issued), None)
            if awaited is None:
                break
            lane = awaited.lane
        if operation is None or operation.lane in _WATCHED_ELSEWHERE:
            return None
        began_s = operation.handle.began_s
        if began_s is None or time.perf_counter() - began_s < STALL_TIMEOUT_S:
            return None
        return _stop_waiting(operation, f"it has made no progress for {STALL_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Let running operations finish, fail the queued ones, join the threads. Idempotent.

        Raises:
            LaneError: An operation still runs after ``CLOSE_TIMEOUT_S``; its thread is left behind.
        """
        with self._lock:
            self._is_closed = True
            for queue in self._queues.values():
                queue.put(None)
        if self.hang_up is not None and not self._have_met():
            self.hang_up()
        if self._have_ended(CLOSE_TIMEOUT_S if self._stall is None else _END_TIMEOUT_S):
            return
        heads = [head for head in tuple(self._heads.values()) if all(d.is_issued for d in head.dependencies)]
        stuck = [_stop_waiting(head, "it still runs although the device was closed") for head in heads]
        if not self._have_ended(_END_TIMEOUT_S):
            names = " and ".join(f"'{failure.operation}' on lane {failure.lane}" for failure in stuck)
            raise LaneError(
                f"expected all lanes to end within {CLOSE_TIMEOUT_S:g} s of close, but {names or 'a lane'} still runs; "
                f"its thread is left behind, with the memory that it works on; it ends with the process"
            )

    def _have_met(self) -> bool:
        """Whether no thread and no stream waits for other ranks, after at most ``_END_TIMEOUT_S``."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        last = [handle for lane in (*RANK_LANES, Lane.SAVE) if (handle := self._last.get(lane)) is not None]
        while not all(handle.is_over() for handle in last):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _have_ended(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in others)


def _stop_waiting(operation: QueuedOperation, reason: str) -> Failure:
    """Fail an operation that still runs, so that everything that waits for it ends."""
    handle = operation.handle
    error = LaneError(
        f"expected '{handle.name}' on lane {handle.lane} ({operation.lane.route}) to finish, but {reason}; "
        "close the model, and look at dmesg and at what else runs on this machine"
    )
    failure = handle.failure or Failure(error, handle.name, handle.lane)
    handle.fail(failure)
    return failure
