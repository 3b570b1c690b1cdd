"""Threads that do the pieces of blocking requests. Requests take turns, or give way, and none waits forever."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, final

PieceT = TypeVar("PieceT")


class StalledError(Exception):
    """No piece of a request finished within the time allowed. ``piece`` is one under way, or None."""

    def __init__(self, piece: object) -> None:
        super().__init__(f"no progress at {piece}")
        self.piece = piece


class ClosedError(Exception):
    """The pool was closed before the request was done."""


_LAST_PIECES_TIMEOUT_S = 2.0  # for pieces under way when the pool stops; healthy drives need milliseconds


@final
class _Request(Generic[PieceT]):
    """Pieces still to start, and pieces under way. The pool's lock guards all fields."""

    def __init__(
        self, work: Callable[[PieceT], None], pieces: Iterable[PieceT], lock: threading.Lock, kind: str, *, yields: bool
    ) -> None:
        self.work, self.kind, self.yields = work, kind, yields
        self.to_start = deque(pieces)
        self.under_way: list[PieceT] = []
        self.num_started = self.num_finished = 0
        self.error: BaseException | None = None
        self.finished = threading.Condition(lock)

    @property
    def is_finished(self) -> bool:
        return not self.to_start and not self.under_way

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.to_start.clear()


@final
class PiecePool(Generic[PieceT]):
    """A few threads that take one piece of each waiting request in turn.

    A short request (the next unit's weights) therefore never waits behind all of a long one. A request that gives way
    starts no piece while another one of its kind has pieces to start. The threads are daemons: a thread that hangs in a
    dead disk does not keep the process from ending.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._lock = threading.Lock()
        self._something_to_do = threading.Condition(self._lock)
        self._requests: deque[_Request[PieceT]] = deque()
        self._waiting: set[_Request[PieceT]] = set()
        self._closed = False
        self._has_stalled = False
        self._num_finished = 0
        """Number of pieces of all requests that are done."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(
        self,
        work: Callable[[PieceT], None],
        pieces: Iterable[PieceT],
        *,
        stall_timeout_s: float,
        kind: str = "",
        gives_way: bool = False,
    ) -> None:
        """Do ``work`` on every piece; return when all are done.

        After an error, or when the caller is interrupted, no further piece starts. The error is raised when the pieces
        under way have ended, so nothing touches the caller's memory afterwards (except after ``StalledError``, or if
        the caller is interrupted again).

        Args:
            work: Called on the pool's threads.
            pieces: Done in any order, several at once.
            stall_timeout_s: Raise when no piece ends for between one and two times this long. The time for which the
                request gives way to others that go on does not count.
            kind: A request gives way only to others of its kind.
            gives_way: Whether this one does.

        Raises:
            StalledError: No piece ended for that long.
            ClosedError: ``stop`` was called before all pieces had started, or pieces under way hang after it.
            BaseException: The first error that ``work`` raised.
        """
        request = _Request(work, pieces, self._lock, kind, yields=gives_way)
        with self._lock:
            if self._closed:
                raise ClosedError
            self._requests.append(request)
            self._waiting.add(request)
            self._something_to_do.notify_all()
            try:
                self._wait(request, stall_timeout_s)
            except (StalledError, ClosedError):
                raise
            except BaseException:  # Ctrl-C
                request.to_start.clear()
                self._wait(request, stall_timeout_s)
                raise
            finally:
                request.to_start.clear()
                self._waiting.remove(request)
        if request.error is not None:
            raise request.error

    def stop(self) -> None:
        """Fail requests with pieces still to start, without waiting for pieces under way. Idempotent."""
        with self._lock:
            self._closed = True
            for request in self._waiting:
                if request.to_start:
                    request.fail(ClosedError())
                request.finished.notify_all()
            self._something_to_do.notify_all()

    def close(self, *, timeout_s: float) -> bool:
        """``stop``, and end the threads. Idempotent.

        Args:
            timeout_s: How long to wait for pieces under way; after a stall at most a second.

        Returns:
            Whether all threads ended. A thread that has not ended may still use the memory of its request.
        """
        self.stop()
        deadline_s = time.monotonic() + (min(timeout_s, 1.0) if self._has_stalled else timeout_s)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _wait(self, request: _Request[PieceT], stall_timeout_s: float) -> None:
        before = request.num_started, request.num_finished, self._num_finished
        while not request.is_finished:
            timeout_s = min(stall_timeout_s, _LAST_PIECES_TIMEOUT_S) if self._closed else stall_timeout_s
            if not request.finished.wait(timeout_s) and not request.is_finished:
                now = request.num_started, request.num_finished, self._num_finished
                gave_way = not request.under_way or now[0] != before[0]  # it waits, or its turn has just come
                may_wait = request.yields and gave_way and now != before and not self._closed
                if now[1] == before[1] and not may_wait:
                    self._has_stalled = True
                    if self._closed:
                        raise ClosedError
                    raise StalledError(request.under_way[0] if request.under_way else None)
                before = now

    def _next(self) -> _Request[PieceT] | None:
        """Take the request whose turn it is out of the queue. None: there is none."""
        first = {request.kind for request in self._requests if request.to_start and not request.yields}
        for place, request in enumerate(self._requests):
            if not (request.yields and request.kind in first):
                del self._requests[place]
                return request
        return None

    def _serve(self) -> None:
        while self._serve_one():
            pass  # `_serve_one` is a function of its own so that an idle thread holds no piece, hence no memory

    def _serve_one(self) -> bool:
        with self._lock:
            while (request := self._next()) is None:
                if self._closed:
                    return False
                self._something_to_do.wait()
            if not request.to_start:
                return True
            piece = request.to_start.popleft()
            if request.to_start:
                self._requests.append(request)
            request.under_way.append(piece)
            request.num_started += 1
        error: BaseException | None = None
        try:
            request.work(piece)
        except BaseException as caught:  # any error must reach the waiting caller
            error = caught
        with self._lock:
            request.under_way.remove(piece)
            request.num_finished += 1
            self._num_finished += 1
            if error is not None:
                request.fail(error)
            if request.is_finished:
                request.finished.notify_all()
        return True
