"""Folders that somebody works in or reads: locked (``flock``), so that nobody else removes them meanwhile.

A lock ends with its process. Filesystems without locks on folders (NFS) refuse: there work goes on without.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK_AGAIN_S = 0.02


def make_locked(new_name: Callable[[], Path]) -> tuple[Path, int]:
    """A new folder, and its lock, which readers may share. Somebody who clears away may be first: then another one.

    Raises:
        OSError: It cannot be made.
    """
    while True:
        path = new_name()
        path.mkdir()
        with suppress(FileNotFoundError):
            lock = os.open(path, _FLAGS)
            try:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return path, lock
            except BaseException:
                os.close(lock)
                raise


def unlock(lock: int) -> None:
    """Also for children that were forked meanwhile: they have the lock until it is taken off."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nobody takes the folder alone inside the block, nor puts another one in its place."""
    lock = -1
    with suppress(OSError):  # gone already: whoever reads it says so
        while lock < 0:
            lock = os.open(path, _FLAGS)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_it = os.path.samestat(os.fstat(lock), path.stat())
            except BlockingIOError:  # it is replaced or removed in this moment
                is_it = False
            if not is_it:
                unlock(lock)
                lock = -1
                time.sleep(_LOOK_AGAIN_S)
    try:
        yield
    finally:
        if lock >= 0:
            unlock(lock)


@contextmanager
def taken_when_free(path: Path, timeout_s: float) -> Iterator[None]:
    """Nobody else has the folder inside the block; those who have it are waited for.

    Raises:
        OSError: EBUSY: Somebody has it after all that time. It cannot be opened.
    """
    end_s = time.monotonic() + timeout_s
    with ExitStack() as holding:
        while True:
            try:
                holding.enter_context(taken_alone(path, needs_lock=False))
                break
            except BlockingIOError as error:
                if time.monotonic() > end_s:
                    raise OSError(errno.EBUSY, f"somebody reads it for more than {timeout_s:g} s") from error
            time.sleep(_LOOK_AGAIN_S)
        yield


@contextmanager
def taken_alone(path: Path, *, needs_lock: bool) -> Iterator[None]:
    """Nobody else has the folder inside the block.

    Raises:
        BlockingIOError: Somebody has it.
        OSError: It cannot be opened; or, with ``needs_lock``, the filesystem has no locks.
    """
    lock = os.open(path, _FLAGS)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            if needs_lock:
                raise
        if not os.path.samestat(os.fstat(lock), path.stat()):
            raise BlockingIOError(errno.EAGAIN, f"somebody has put another folder at '{path}'")
        yield
    finally:
        unlock(lock)
