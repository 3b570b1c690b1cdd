"""A second process that shares the work of the first one: planning is pure, and a Python process uses one core.

[Note: second process] The first process starts the second one before importing the libraries. These imports take
longer than the second one's own, since planning needs none of the libraries. It is a new process, not a fork, so it has
nothing of the first one's threads and devices. It works out functions of plain data, with the same code as the first
process, so either finds the same. If it cannot be started, ends or raises, or if what it is sent cannot be pickled, the
first process does the rest.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from outcore.core.collecting import rarely_collecting

_T = TypeVar("_T")
_R = TypeVar("_R")
_SERVE = "import sys; from outcore.command.plan import worker_process as w; w.__file__ == sys.argv[1] and w.serve()"
"""The second process's program. It does nothing if it finds another outcore: a script's folder is not on its path."""


class Second:
    """The second process, as the first one sees it."""

    def __init__(self, *, starts: bool = False) -> None:
        """Args: starts: Start it, unless torch is imported already: then no import gives it the time to get ready."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pickler: pickle.Pickler
        """One pickler for all that is sent: what was sent before, such as the model, is not sent again."""
        self.num_done = 0
        """Calls that the second process has worked out."""
        if starts and "torch" not in sys.modules:
            self.start()

    def start(self) -> None:
        """Start the process, if there is another core."""
        command, pipe = [sys.executable, "-P", "-c", _SERVE, __file__], subprocess.PIPE
        if len(os.sched_getaffinity(0)) > 1:
            with suppress(OSError):
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                self._pickler = pickle.Pickler(_pipe(self._process.stdin))

    @property
    def is_there(self) -> bool:
        """Whether the process was started, and has not ended."""
        return self._process is not None

    def map(
        self, function: Callable[[_T], _R], items: Iterable[_T], *, before: Callable[[], object] = lambda: None
    ) -> list[_R]:
        """Return a function's results for all items, in their order. The second process takes items from the end.

        Args:
            function: Of a module, or of an object that can be pickled. Pure: either process may work it out.
            items: Those that cannot be pickled come first.
            before: Called by the first process before it takes an item, if the second one works, too.
        """
        left, found = deque(enumerate(items)), dict[int, _R]()
        asking = Thread(target=self._ask_for, args=(function, left, found))
        if len(left) > 1 and self._send(function):  # sent first, while no thread changes the object that it belongs to
            asking.start()
            before()
            _work_out(function, left, found)
            asking.join()
        _work_out(function, left, found)
        return [found[i] for i in range(len(found))]

    def _ask_for(self, function: Callable[[_T], _R], left: deque[tuple[int, _T]], found: dict[int, _R]) -> None:
        """Let the second process work out one item after the other, as long as it is there."""
        while self.is_there and (taken := _taken(left.pop)) is not None:
            index, item = taken
            result = self._result() if self._send((function, item)) else ()
            if result:
                (found[index],) = result
                self.num_done += 1
            else:
                left.append(taken)

    def _send(self, what: object) -> bool:
        """Send an object. Returns: Whether it could be sent."""
        try:
            if self._process is not None:
                self._pickler.dump(what)
                _pipe(self._process.stdin).flush()
        except Exception:  # it cannot be pickled, or the process has ended: the first process can do without
            self.close()
        return self.is_there

    def _result(self) -> tuple[Any, ...]:
        """Receive one result; empty if there is none. The first process will meet the same error itself."""
        try:
            return () if self._process is None else (pickle.load(_pipe(self._process.stdout)),)
        except Exception:
            self.close()
            return ()

    def close(self) -> None:
        """Kill the process. It holds nothing that must be closed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError), process:  # a pipe's buffer may hold something, which can no longer be written
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work_out(function: Callable[[_T], _R], left: deque[tuple[int, _T]], found: dict[int, _R]) -> None:
    """Work out items from the front until none is left."""
    while (taken := _taken(left.popleft)) is not None:
        index, item = taken
        found[index] = function(item)


def _taken(take: Callable[[], _T]) -> _T | None:
    """Take an item; None if none is left, since the other process took the last one."""
    try:
        return take()
    except IndexError:
        return None


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    if end is None:
        raise AssertionError("the second process has no pipes")
    return end


def serve(requests: IO[bytes] | None = None, results: IO[bytes] | None = None) -> None:
    """Run as the second process until its input ends. Args: requests, results: None: standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after a Ctrl-C the first process ends this one
    asked, results = pickle.Unpickler(requests or sys.stdin.buffer), results or sys.stdout.buffer
    import outcore.planner.search.changes  # noqa: F401 (before it is asked for)

    with suppress(EOFError), rarely_collecting():
        while True:
            what = asked.load()
            if isinstance(what, tuple):  # else it is a function, kept by the unpickler for the requests that follow
                function, item = what
                results.write(pickle.dumps(function(item)))
                results.flush()
