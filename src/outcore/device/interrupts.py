"""Ctrl-C while autograd works on a thread of its own.

[Note: interrupts in backward] On an accelerator autograd walks the graph on its own thread. The main thread waits for
it inside torch, and only the main thread may run signal handlers, so a Ctrl-C would be seen when backward is over. But
a signal also writes a byte into the file that ``signal.set_wakeup_fd`` names. Autograd's thread finds it there at the
next unit and raises ``KeyboardInterrupt``; torch hands that on to the main thread. There the handler runs at last, and
must not raise a second one: hence a handler of our own. It stands in for Python's own handler only. Who has another
one, or another file for wakeups (an event loop), keeps it, and is interrupted when backward is over.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import final

import torch

_AUTOGRAD = str(Path(torch.autograd.__file__).parent)


@final
class InterruptsInBackward:
    """One for the process, as signals are. See [Note: interrupts in backward]."""

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self._listeners: weakref.WeakSet[object] = weakref.WeakSet()
        self._is_raised = False
        """In backward, so that the handler that is still to run has nothing to do."""

    def listen(self, who: object) -> None:
        """Have ``look`` find a Ctrl-C from now on, until ``leave`` or until ``who`` is gone.

        From the main thread only, and if nobody else handles signals. Costs next to nothing again.
        """
        self._is_raised = False  # whatever was raised has come out by now
        handler = signal.getsignal(signal.SIGINT)
        if handler == self._handle:
            self._listeners.add(who)
        elif handler is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            if self._ends is None:
                self._open()
            if self._ends is not None:
                self._listeners.add(who)
                signal.signal(signal.SIGINT, self._handle)

    def look(self) -> None:
        """Raise ``KeyboardInterrupt`` in a backward if there was a Ctrl-C. Costs one read of a pipe."""
        if self._drain() and signal.getsignal(signal.SIGINT) == self._handle and _main_thread_is_in_autograd():
            self._is_raised = True
            raise KeyboardInterrupt

    def leave(self, who: object) -> None:
        """Behind the last one everything is as before.

        From another thread than the main one, signals stay as they are: harmless, until somebody else leaves.
        """
        self._listeners.discard(who)
        if self._listeners or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.forget()

    def forget(self) -> None:
        """Close the files. In a forked child, whose signals are not its parent's, this is all."""
        ends, self._ends = self._ends, None
        if ends is None:
            return
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, ends[1]):
            signal.set_wakeup_fd(found)
        for end in ends:
            os.close(end)

    def _open(self) -> None:
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        found = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._ends = read, write
        if found != -1:
            signal.set_wakeup_fd(found)
            self.forget()

    def _drain(self) -> bool:
        """Whether a Ctrl-C is among what was written since the last time."""
        if self._ends is None:
            return False
        try:
            return signal.SIGINT in os.read(self._ends[0], 4096)
        except BlockingIOError:
            return False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._drain()
        was_raised, self._is_raised = self._is_raised, False
        if not was_raised:
            signal.default_int_handler(signum, frame)


def _main_thread_is_in_autograd() -> bool:
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
    return frame is not None and frame.f_code.co_filename.startswith(_AUTOGRAD)


IN_BACKWARD = InterruptsInBackward()
os.register_at_fork(after_in_child=IN_BACKWARD.forget)
