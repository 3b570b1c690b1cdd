"""Ctrl-C while autograd works on a thread of its own.

[Note: interrupts in backward] On an accelerator autograd walks the graph on its own thread. The main thread waits for
that thread inside torch. Only the main thread may run signal handlers, so a Ctrl-C would be noticed only when backward
is over. But a signal also writes a byte into the file that ``signal.set_wakeup_fd`` names. At the next unit, autograd's
thread finds the byte there and raises ``KeyboardInterrupt``, which torch passes on to the main thread. There the signal
handler finally runs, and it must not raise a second ``KeyboardInterrupt``: hence a handler of our own. It replaces only
Python's default handler. A program with another handler, or with another wakeup file (an event loop), keeps it, and is
interrupted when backward is over.
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
    """Detects a Ctrl-C in backward. One per process, like signals. See [Note: interrupts in backward]."""

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self._listeners: weakref.WeakSet[object] = weakref.WeakSet()
        self._is_raised = False
        """Whether ``look`` has raised in backward, so that the signal handler, which runs later, must not."""

    def listen(self, who: object) -> None:
        """Let ``look`` find a Ctrl-C from now on, until ``leave`` or until ``who`` is garbage collected.

        Installs the handler only on the main thread, and only over Python's default handler. Further calls are cheap.
        """
        self._is_raised = False  # an error that was raised earlier has left backward by now
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
        """Raise ``KeyboardInterrupt`` if there was a Ctrl-C and a backward runs. Costs one read of a pipe."""
        if self._drain() and signal.getsignal(signal.SIGINT) == self._handle and _main_thread_is_in_autograd():
            self._is_raised = True
            raise KeyboardInterrupt

    def leave(self, who: object) -> None:
        """End ``listen`` for ``who``. After the last listener, signal handling is as before.

        On another thread than the main one, signals stay as they are, which is harmless, until a later ``leave``.
        """
        self._listeners.discard(who)
        if self._listeners or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.clear()

    def clear(self) -> None:
        """Close the pipe. A forked child does only this: its parent's signals are not its own."""
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
            self.clear()

    def _drain(self) -> bool:
        """Whether a Ctrl-C is among the bytes written to the pipe since the last call."""
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
os.register_at_fork(after_in_child=IN_BACKWARD.clear)
