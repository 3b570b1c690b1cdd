"""Locks (``flock``) on folders that are in use, so that no other process removes them meanwhile.

A lock ends with its process. Filesystems without locks on folders (NFS) refuse them; there, work goes on without locks.
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
    """Create a folder and lock it; readers may share the lock. Returns the folder and the lock.

    A process that clears away may remove the folder before it is locked. Then another one is created.

    Raises:
        OSError: The folder cannot be created.
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
    """Release a lock. Children that were forked meanwhile share it, and would keep it if it were only closed."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Share a folder's lock for the block, so that the folder is neither removed nor replaced meanwhile."""
    lock = -1
    with suppress(OSError):  # the folder is gone: the caller finds that when it reads
        while lock < 0:
            lock = os.open(path, _FLAGS)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_it = os.path.samestat(os.fstat(lock), path.stat())
            except BlockingIOError:  # it is being replaced or removed
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
    """Hold a folder's lock alone for the block. Waits for others that hold it.

    Raises:
        OSError: The folder cannot be opened; or, as EBUSY, it is still locked after ``timeout_s``.
    """
    end_s = time.monotonic() + timeout_s
    with ExitStack() as holding:
        while True:
            try:
                holding.enter_context(taken_alone(path, needs_lock=False))
                break
            except BlockingIOError as error:
                if time.monotonic() > end_s:
                    raise OSError(errno.EBUSY, f"a reader has held it for more than {timeout_s:g} s") from error
            time.sleep(_LOOK_AGAIN_S)
        yield


@contextmanager
def taken_alone(path: Path, *, needs_lock: bool) -> Iterator[None]:
    """Hold a folder's lock alone for the block.

    Raises:
        BlockingIOError: Another process or thread holds it.
        OSError: The folder cannot be opened; or, with ``needs_lock``, the filesystem has no locks.
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
            raise BlockingIOError(errno.EAGAIN, f"another folder was put at '{path}'")
        yield
    finally:
        unlock(lock)
