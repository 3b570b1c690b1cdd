"""Fault injection for tests: late lanes, permuted lanes, poisoned frees, missing dependencies. Off by default.

Seeds and the order of submission decide everything, so that a failing run can be repeated.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import final

import torch

from outcore.core.errors import ConfigError
from outcore.device.lanes import (
    Handle,
    QueuedOperation,
    Service,
    Throttle,
    closed_failure,
    refuse_closed,
    refuse_on_lane,
    run_operation,
)
from outcore.device.threads import start_threads
from outcore.spec.lane_names import RANK_LANES, Lane

COMPUTE = "compute"
THROTTLED = tuple(lane.value for lane in Lane)
DELAYABLE = (COMPUTE, *THROTTLED)
_MEETINGS = (*RANK_LANES, Lane.SAVE)
_MOMENT_S, _END_S = 0.01, 1.0
POISON = 0xFF  # in every byte, this is a NaN in fp32, bf16, fp16 and fp64


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Faults to inject."""

    delays: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Lane's value, or ``compute`` -> the longest pause in seconds before, and again after, each operation."""
    seed: int = 0
    """Seed of the delays."""
    permute: int | None = None
    """Seed of an executor that runs operations in an arbitrary legal order instead of threads; None: threads."""
    poison: bool = False
    """Fill freed buffers with NaN."""
    skip: frozenset[str] = frozenset()
    """Labels of dependencies to drop, from the run and from the race checker: planted ordering bugs."""
    throttle: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Lane's value -> bytes per second: an operation lasts at least as long as the bytes that it writes take at this
    rate. On copy lanes of an accelerator this time is added to the copy's own time."""
    serial: bool = False
    """Whether to wait for every submission at once, so that nothing overlaps. The race checker is not told."""

    def __post_init__(self) -> None:
        for lane, longest_s in self.delays.items():
            if lane not in DELAYABLE or longest_s < 0:
                raise ConfigError(
                    f"faults: expected delays of 0 seconds or more on {', '.join(DELAYABLE)}, "
                    f"but got {longest_s!r} on '{lane}'"
                )
        for lane, bytes_per_s in self.throttle.items():
            if lane not in THROTTLED or not bytes_per_s > 0:
                raise ConfigError(
                    f"faults: expected a throttle in bytes per second on {', '.join(THROTTLED)}, "
                    f"but got {bytes_per_s!r} on '{lane}'"
                )


NO_FAULTS = Faults()


@final
class Delays:
    """Draws the pauses: the n-th operation of a lane pauses equally long in every run, whatever the timing."""

    def __init__(self, faults: Faults) -> None:
        """Args: faults: Their ``delays``, ``seed`` and ``throttle`` are used."""
        self._longest_s = dict(faults.delays)
        self._bytes_per_s = dict(faults.throttle)
        self._random = {lane: random.Random(f"{faults.seed} {lane}") for lane in DELAYABLE}

    def around(self, lane: Lane) -> tuple[float, float]:
        """Draw the pauses in seconds before and after the next operation of ``lane``."""
        return self._draw_s(lane.value), self._draw_s(lane.value)

    def pace(self, operation: QueuedOperation) -> Throttle:
        """Draw the pace of an operation, which is the next of its lane."""
        before_s, after_s = self.around(operation.lane)
        bytes_per_s = self._bytes_per_s.get(operation.lane.value)
        return Throttle(before_s, operation.nbytes / bytes_per_s if bytes_per_s else 0.0, after_s)

    def compute_s(self) -> float:
        """Draw the pause in seconds before the next access of compute."""
        return self._draw_s(COMPUTE)

    def _draw_s(self, lane: str) -> float:
        longest_s = self._longest_s.get(lane, 0.0)
        return self._random[lane].uniform(0.0, longest_s) if longest_s else 0.0


@final
class PermutedLanes:
    """Runs queued operations one at a time, as late and in as arbitrary an order as dependencies allow.

    Operations run when a caller waits, and sometimes at a submission or a call of ``done``. The seed decides which of
    the lanes' heads runs next. The caller blocks meanwhile. The work runs on one thread, set up like that of a lane, so
    that it sees neither the caller's autocast nor its number of threads.

    With several ranks, an operation that meets the other ranks (a meeting) begins in the same way, and then goes on by
    itself on a thread of its lane: ranks draw independently, and each may need others before its own operation can end.
    So the moments at which meetings end are not repeated from run to run.
    """

    def __init__(self, service: Service, seed: int) -> None:
        self.hang_up: Callable[[], None] | None = None
        """Ends waits for other ranks; None without other ranks."""
        self._meetings: dict[Lane, tuple[SimpleQueue[QueuedOperation | None], threading.Thread]] = {}
        self._under_way: list[Handle] = []
        """Meetings that run, and those queued behind them on their lanes."""
        self._service = service
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._is_closed = False
        self._queues: dict[Lane, deque[QueuedOperation]] = {lane: deque() for lane in Lane}
        self._turns: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        (self._thread,) = start_threads({"outcore-permuted": self._serve})

    def submit(self, operation: QueuedOperation) -> None:
        """Queue an operation; at random run up to three operations that are ready."""
        if threading.current_thread() is self._thread:
            refuse_on_lane(f"submit '{operation.handle.name}'")
        with self._lock:
            if self._is_closed:
                refuse_closed(operation)
            self._queues[operation.lane].append(operation)
            for _ in range(max(0, self._random.randrange(-4, 4))):
                self._run_any()

    def wait_issued(self, handle: Handle) -> None:
        """Run operations in random order until that of ``handle`` ran."""
        if threading.current_thread() is self._thread:
            refuse_on_lane(f"wait for '{handle.name}'")
        with self._lock:
            while not handle.is_issued:
                if not self._run_any() and not self._wait_for_others():
                    raise AssertionError(f"{handle!r} waits for nothing that could run")

    def poll(self, handle: Handle) -> None:
        """Let time pass: at random run one operation."""
        if threading.current_thread() is self._thread:
            return
        with self._lock:
            if not handle.is_issued and self._random.random() < 0.5:
                self._run_any()

    def drain(self, lanes: Collection[Lane] = tuple(Lane)) -> None:
        """Run operations, in random order, until these lanes have none."""
        with self._lock:
            while (any(self._queues[lane] for lane in lanes) or self._under_way) and (
                self._run_any() or self._wait_for_others()
            ):
                pass

    def close(self) -> None:
        """Fail the queued operations and join the threads. Idempotent."""
        if threading.current_thread() is self._thread:  # an operation collected it, and its caller holds the lock
            self._turns.put(None)
            return
        with self._lock:
            self._is_closed = True
            for lane, queue in self._queues.items():
                while queue:
                    handle = queue.popleft().handle
                    handle.fail(closed_failure(handle.name, lane.value))
            deadline_s = time.monotonic() + _END_S
            while self._wait_for_others() and time.monotonic() < deadline_s:
                pass
            if self._under_way and self.hang_up is not None:
                self.hang_up()
        self._turns.put(None)
        for meetings, thread in self._meetings.values():
            meetings.put(None)
            if thread is not threading.current_thread():
                thread.join(_END_S)
        self._thread.join()

    def _run_any(self) -> bool:
        """Run one of the lanes' heads whose dependencies are issued; return False if there is none."""
        heads = [queue for queue in self._queues.values() if queue and all(d.is_issued for d in queue[0].dependencies)]
        if not heads:
            return False
        operation = self._random.choice(heads).popleft()
        if self.hang_up is not None and operation.lane in _MEETINGS:
            self._begin_meeting(operation)
            return True
        over = threading.Event()
        self._turns.put(partial(self._turn, operation, over))
        over.wait()
        return True

    def _turn(self, operation: QueuedOperation, over: threading.Event) -> None:
        run_operation(operation, self._service)
        over.set()

    def _begin_meeting(self, operation: QueuedOperation) -> None:
        lane = operation.lane
        if lane not in self._meetings:
            meetings: SimpleQueue[QueuedOperation | None] = SimpleQueue()
            (thread,) = start_threads({f"outcore-{lane.value}": partial(self._meet, lane, meetings)})
            self._meetings[lane] = meetings, thread
        self._under_way.append(operation.handle)
        self._meetings[lane][0].put(operation)

    def _wait_for_others(self) -> bool:
        """Wait a moment for a meeting that runs. Returns whether any ran since the last call, ended ones included."""
        was_any = bool(self._under_way)
        self._under_way = [handle for handle in self._under_way if not handle.is_issued]
        for handle in self._under_way[:1]:
            handle.block(_MOMENT_S)
        return was_any

    def _meet(self, lane: Lane, meetings: SimpleQueue[QueuedOperation | None]) -> None:
        torch.set_grad_enabled(False)
        self._service.execution.begin_thread(lane)
        while (operation := meetings.get()) is not None:
            run_operation(operation, self._service)
            del operation

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        self._service.execution.begin_thread(None)
        while (turn := self._turns.get()) is not None:
            turn()
            del turn
