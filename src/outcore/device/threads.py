"""Threads with one ATen thread each, which leave the count of every other thread alone; and the end of the process.

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
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import NoReturn, Protocol

import torch

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
