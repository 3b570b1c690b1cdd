"""The end of the process: models that are still open, threads that are still at work.

[Note: threads at the end] Once Python shuts down, a thread that asks for the interpreter lock is unwound. If it comes
out of a kernel, it is unwound through C++ code, which aborts the process. So no thread may be in a kernel by then:
models are closed, which stops updates at their next block, and copies are waited for. Whoever has no patience for that
and presses Ctrl-C gets the end at once, as by a program that handles no signals. A thread that has left the interpreter
for good, such as one behind a dead drive, ends with the process in any case.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import weakref
from contextlib import ExitStack, suppress
from typing import NoReturn, Protocol

from outcore.device.threads import join_started

_WAIT_S = 5.0  # longer than any one kernel or copy


class _Closable(Protocol):
    def close(self) -> None:
        """Idempotent; whatever interrupts it, files are removed and threads told to end."""


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
_pid = os.getpid()


def close_at_exit(something: _Closable) -> None:
    """Close it when the process ends, if it still exists and was not closed before."""
    _open.add(something)


@atexit.register
def _end() -> None:
    """See [Note: threads at the end]."""
    if os.getpid() != _pid:
        return  # a forked child has none of the threads
    try:
        with ExitStack() as closing:  # the rest even if one is interrupted
            for something in tuple(_open):
                closing.callback(something.close)
        join_started(_WAIT_S)
    except (KeyboardInterrupt, SystemExit) as stop:
        _end_at_once(stop)


def _end_at_once(stop: KeyboardInterrupt | SystemExit) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if isinstance(stop, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    code = stop.code if isinstance(stop, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
