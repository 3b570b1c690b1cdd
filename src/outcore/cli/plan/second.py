"""A second process that works things out beside the first one: planning is pure, and Python uses one core.

[Note: second process] It is begun before the libraries are imported, which takes longer than its own imports: planning
needs none of them. It is a new process, no fork, so it knows nothing of threads and devices. What it works out is a
function of plain data, which both have in the same code. So whoever works it out finds the same. Where it cannot be
started or ends, where what it is sent cannot be pickled, or where it raises, the first one does the rest.
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
_SERVE = "import sys; from outcore.cli.plan import second; second.__file__ == sys.argv[1] and second.serve()"
"""Nothing, where a new process finds another outcore: the folder of a script is not among those that it looks in."""


class Second:
    """The other process, as the first one sees it."""

    def __init__(self, *, starts: bool = False) -> None:
        """Args: starts: Unless torch is there already: then nothing takes so long that it would be ready in time."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pickler: pickle.Pickler
        """One for all that is sent: what was sent before, such as the model, is not sent again."""
        self.num_done = 0
        """Calls that it has worked out."""
        if starts and "torch" not in sys.modules:
            self.start()

    def start(self) -> None:
        """Begin it, where there is another core."""
        command, pipe = [sys.executable, "-P", "-c", _SERVE, __file__], subprocess.PIPE
        if len(os.sched_getaffinity(0)) > 1:
            with suppress(OSError):
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                self._pickler = pickle.Pickler(_pipe(self._process.stdin))

    @property
    def is_there(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None

    def map(
        self, function: Callable[[_T], _R], items: Iterable[_T], *, before: Callable[[], object] = lambda: None
    ) -> list[_R]:
        """A function of every item, in their order. The other process takes the last ones.

        Args:
            function: Of a module, or of an object that can be pickled. Pure: it does not matter who works it out.
            items: Those that cannot be pickled come first.
            before: What the first process does before it takes any.
        """
        left, found = deque(enumerate(items)), dict[int, _R]()
        asking = Thread(target=self._ask_for, args=(function, left, found))
        if len(left) > 1 and self._send(function):  # by itself, while nobody adds to what it holds
            asking.start()
            before()
            _work_out(function, left, found)
            asking.join()
        _work_out(function, left, found)
        return [found[i] for i in range(len(found))]

    def _ask_for(self, function: Callable[[_T], _R], left: deque[tuple[int, _T]], found: dict[int, _R]) -> None:
        """Have it work out one after the other, as long as it is there."""
        while self.is_there and (taken := _taken(left.pop)) is not None:
            index, item = taken
            result = self._result() if self._send((function, item)) else ()
            if result:
                (found[index],) = result
                self.num_done += 1
            else:
                left.append(taken)

    def _send(self, what: object) -> bool:
        """Whether it could be sent."""
        try:
            if self._process is not None:
                self._pickler.dump(what)
                _pipe(self._process.stdin).flush()
        except Exception:  # it cannot be pickled, or nobody is there: the first process can do without
            self.close()
        return self.is_there

    def _result(self) -> tuple[Any, ...]:
        """Empty: there is none. What is wrong, the first process will find, too."""
        try:
            return () if self._process is None else (pickle.load(_pipe(self._process.stdout)),)
        except Exception:
            self.close()
            return ()

    def close(self) -> None:
        """End it. It holds nothing that must be closed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError), process:  # something may be in a buffer
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _work_out(function: Callable[[_T], _R], left: deque[tuple[int, _T]], found: dict[int, _R]) -> None:
    """The first ones, until none is left."""
    while (taken := _taken(left.popleft)) is not None:
        index, item = taken
        found[index] = function(item)


def _taken(take: Callable[[], _T]) -> _T | None:
    """None: the other process took the last one."""
    try:
        return take()
    except IndexError:
        return None


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    if end is None:
        raise AssertionError("the second process has no pipes")
    return end


def serve(requests: IO[bytes] | None = None, results: IO[bytes] | None = None) -> None:
    """Be the second process, until nothing more comes. Args: requests, results: None: standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one ends it
    asked, results = pickle.Unpickler(requests or sys.stdin.buffer), results or sys.stdout.buffer
    import outcore.planning.search.changes  # noqa: F401 (before it is asked for)

    with suppress(EOFError), rarely_collecting():
        while True:
            what = asked.load()
            if isinstance(what, tuple):  # else it is there for what comes
                function, item = what
                results.write(pickle.dumps(function(item)))
                results.flush()
