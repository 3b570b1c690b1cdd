"""Threads with one ATen thread each, made without touching the count of any other thread.

[Note: ATen's thread count] ``torch.set_num_threads`` sets the count of the calling thread and a default of the process.
A thread takes the default over the first time that it asks for its count or runs a parallel kernel, even if it set a
count of its own before. The count changes the bits of sums, so neither the main thread's count nor the default may
change: a new thread first takes the default over and then sets one, and at last a thread that dies at once sets the
default again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

_LOCK = threading.Lock()  # two callers at once would take each other's one for the default
_STARTED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_single_threaded(bodies: Mapping[str, Callable[[], None]]) -> tuple[threading.Thread, ...]:
    """Start a daemon thread with one ATen thread per body; returns when all of them have begun.

    Args:
        bodies: Name of the thread -> what it runs.
    """
    with _LOCK, ThreadPoolExecutor(max_workers=1) as other:
        torch.get_num_threads()  # the calling thread takes the default over before it changes for a moment
        default = other.submit(torch.get_num_threads).result()
        ready = threading.Barrier(len(bodies) + 1)
        threads = tuple(
            threading.Thread(target=_begin, args=(body, ready), name=name, daemon=True) for name, body in bodies.items()
        )
        _STARTED.update(threads)
        try:
            for thread in threads:
                thread.start()
            ready.wait()
        except BaseException:
            ready.abort()  # those that did start end, instead of waiting for the rest
            raise
        finally:
            other.submit(torch.set_num_threads, default).result()
    return threads


def join_started(timeout_s: float) -> None:
    """Wait for all threads that were ever started here to end; they were told to.

    Args:
        timeout_s: For all of them together.
    """
    deadline_s = time.monotonic() + timeout_s
    for thread in tuple(_STARTED):
        if thread.is_alive():
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _begin(body: Callable[[], None], ready: threading.Barrier) -> None:
    torch.get_num_threads()  # or the first parallel kernel would bring the default back
    torch.set_num_threads(1)
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        return
    body()
