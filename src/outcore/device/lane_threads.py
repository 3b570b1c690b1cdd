"""Lanes on threads, and the watch over them: what makes no progress is an error, never a wait without end.

[Note: stalls] A wait looks up now and then at the operation that it waits for in the end. If the work of that operation
has lasted for ``STALL_TIMEOUT_S``, it is given up. It fails, so that whatever depends on it ends too. It may still come
back at any time and write. So the lanes take no more work, and only ``close`` is left. Transfers of the disk tier are
not timed here: the store watches their pieces, and a long one that moves is no stall. Nor is the work of a device,
which has as much to do as the program gave it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import final

import torch

from outcore.core.errors import LaneError
from outcore.device.interrupts import IN_BACKWARD
from outcore.device.lanes import (
    Failure,
    Handle,
    Operation,
    Service,
    closed_failure,
    refuse_closed,
    refuse_on_lane,
    run_operation,
    wait_for,
)
from outcore.device.threads import start_threads
from outcore.spec.lanes import RANK_LANES, Lane

STALL_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 20.0  # an operation that runs longer than this while its lane closes is left behind, and said
_END_TIMEOUT_S = 1.0  # for threads to end once what they wait for was given up
_LOOK_S = 1.0
_PAUSE_S = 0.01
_WATCHED_ELSEWHERE = frozenset(
    {Lane.WEIGHTS_READ, Lane.STATES_READ, Lane.DISK_WRITE, Lane.STATES_WRITE, Lane.SAVE, *RANK_LANES}
)
"""By the disk store, and by the files of a checkpoint: piece by piece, so that slow drives have their time. By process
groups: other ranks may compute for long before they come."""


@final
class ThreadedLanes:
    """One daemon thread per lane, each with one ATen thread and without autograd; between ranks once they are used.

    Owns its threads until ``close``; idle threads hold no operation.
    """

    def __init__(self, service: Service) -> None:
        """Start the threads; returns when all are ready."""
        self.hang_up: Callable[[], None] | None = None
        """Ends waits for other ranks; None: there are none."""
        self._service = service
        self._lock = threading.RLock()
        self._is_closed = False
        self._stall: Failure | None = None
        self._queues: dict[Lane, SimpleQueue[Operation | None]] = {lane: SimpleQueue() for lane in Lane}
        self._last: dict[Lane, Handle] = {}
        self._heads: dict[str, Operation] = {}  # what each lane works at, or waits to
        self._threads: tuple[threading.Thread, ...] = ()
        self._start([lane for lane in Lane if lane not in RANK_LANES])

    def _start(self, lanes: Sequence[Lane]) -> None:
        """Start threads for lanes that have none."""
        bodies = {f"outcore-{lane.value}": partial(self._serve, lane) for lane in lanes}
        self._threads += tuple(start_threads(bodies))
        self._idents = frozenset(thread.ident for thread in self._threads)
        self._waiting = [lane for lane in RANK_LANES if lane not in lanes]

    def submit(self, operation: Operation) -> None:
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
            self._last[operation.lane] = operation.handle  # who is interrupted before must not be waited for

    def wait_issued(self, handle: Handle) -> None:
        """Block until the lane got to it."""
        if threading.get_ident() in self._idents:
            refuse_on_lane(f"wait for '{handle.name}'")
        while self._stall is None:
            if handle.block(min(_LOOK_S, STALL_TIMEOUT_S / 4)):
                return
            IN_BACKWARD.look()
            self._stall = self._stalled(handle)
        self._stall.throw()

    def poll(self, handle: Handle) -> None:
        """Threads advance on their own."""

    def drain(self) -> None:
        """Block until every operation submitted so far ran or failed, and its bytes are there."""
        for handle in tuple(self._last.values()):
            handle.wait_issued()
            if handle.completion is not None:
                wait_for(handle.completion)
        if self._stall is not None:
            self._stall.throw()

    def _serve(self, lane: Lane) -> None:
        """Run a lane's queue until it is closed; the body of its thread."""
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
        """Give up what a handle waits for in the end, if it has been at work for too long."""
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
        return _give_up(operation, f"it has made no progress for {STALL_TIMEOUT_S:g} s")

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
        stuck = [_give_up(head, "it still runs although the device was closed") for head in heads]
        if not self._have_ended(_END_TIMEOUT_S):
            names = " and ".join(f"'{failure.operation}' on lane {failure.lane}" for failure in stuck)
            raise LaneError(
                f"expected all lanes to end within {CLOSE_TIMEOUT_S:g} s of close, but {names or 'a lane'} still runs; "
                f"its thread is left behind, with the memory that it works on; it ends with the process"
            )

    def _have_met(self) -> bool:
        """Whether nothing waits for other ranks, neither a thread nor a stream, or soon will not any more."""
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


def _give_up(operation: Operation, reason: str) -> Failure:
    """Fail an operation that runs, so that whatever waits for it ends."""
    handle = operation.handle
    error = LaneError(
        f"expected '{handle.name}' on lane {handle.lane} ({operation.lane.route}) to finish, but {reason}; "
        "close the model, and look at dmesg and at what else runs on this machine"
    )
    failure = handle.failure or Failure(error, handle.name, handle.lane)
    handle.fail(failure)
    return failure
