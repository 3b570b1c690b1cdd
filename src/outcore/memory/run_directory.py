"""A run's own folder below a path of the disk tier. Runs never share a folder, and foreign files are never removed.

[Note: nothing stays behind] The data file is unlinked as soon as it is open. The kernel frees its bytes when the
process ends, however it ends: exit, exception, Ctrl-C, SIGTERM, SIGKILL, a crash. This needs no signal handler. A
library should not install one: handlers belong to the user's program, and a handler would make a process that hangs
inside a kernel deaf to SIGTERM. An abrupt end leaves a folder with an owner file of a few hundred bytes. While the run
lives, this file shows a person why the disk fills up: which process holds how much. Afterwards the next run removes it.

[Note: is the owner alive] The owner file is locked with ``flock`` while the run lives. The kernel drops the lock with
the last process that holds it, so this works across containers, where process ids mean nothing. Forked workers share
the lock, which errs on the safe side. The file is written after it is locked, so an empty file belongs to a run that is
just starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import weakref
from pathlib import Path
from typing import Any, Self, final

from outcore.core.closing import Closing

DATA_NAME = "data"
OWNER_NAME = "owner.json"

_PATTERN = re.compile(r"outcore-\d+-[0-9a-f]{8}")
_FORMAT = "outcore run directory 1"


@final
class RunDirectory(Closing):
    """The folder ``outcore-<pid>-<random>``, which exists until ``close``, garbage collection or the process's end."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        """Only ``create`` calls this."""
        self.path = path
        self._remove = weakref.finalize(self, _remove_own, path, lock_fd, os.getpid())

    @classmethod
    def create(cls, parent: Path, *, reserved_bytes: int = 0) -> Self:
        """Make a folder for this run below ``parent``, which must exist.

        Args:
            parent: The path that the user gave.
            reserved_bytes: Size for people who read the owner file.

        Raises:
            OSError: The folder cannot be made.
        """
        path = parent / f"outcore-{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir()
        try:
            lock_fd = os.open(path / OWNER_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            path.rmdir()
            raise
        directory = cls(path, lock_fd)
        try:
            _lock(lock_fd)
            os.write(lock_fd, json.dumps(_owner(reserved_bytes), indent=2).encode() + b"\n")
        except OSError:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        """Remove the folder. Idempotent; does nothing in a forked child, whose parent still uses it."""
        self._remove()


def reclaim_dead(parent: Path) -> list[Path]:
    """Remove the folders that dead runs left below ``parent``.

    Touches only real folders with our name pattern, a complete owner file and a free lock, and in them only the files
    that outcore makes. See [Note: is the owner alive].

    Returns:
        The folders that were removed.
    """
    return [path for path in sorted(parent.glob("outcore-*")) if _PATTERN.fullmatch(path.name) and _reclaim(path)]


def _reclaim(path: Path) -> bool:
    if path.is_symlink():
        return False
    try:
        fd = os.open(path / OWNER_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # no owner file, another user's, or another run reclaims it at this moment
    try:
        return _is_owner_file(fd) and _lock(fd) and _is_unchanged(fd, path) and _remove_files(path)
    finally:
        os.close(fd)


def _is_owner_file(fd: int) -> bool:
    try:
        owner = json.loads(os.pread(fd, 65536, 0))
    except (ValueError, RecursionError):
        return False
    if not isinstance(owner, dict) or owner.get("format") != _FORMAT:
        return False
    # A second check, since some filesystems (network mounts) grant every lock: the owning process may still run.
    return {k: owner.get(k) for k in ("boot_id", "start_time_ticks")} != {
        "boot_id": _boot_id(),
        "start_time_ticks": _start_time_ticks(owner.get("pid")),
    }


def _is_unchanged(fd: int, path: Path) -> bool:
    """Whether the locked file is still at ``path``: another run may have reclaimed it before we got the lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path / OWNER_NAME, follow_symlinks=False))
    except OSError:
        return False


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # a living run holds it, or the filesystem has no locks, so that no run is known to be dead
    return True


def _remove_own(path: Path, lock_fd: int, pid: int) -> None:
    if os.getpid() == pid:
        _remove_files(path)
        os.close(lock_fd)


def _remove_files(path: Path) -> bool:
    """Remove the files that outcore makes, then the folder if nothing else is in it. A person's files stay."""
    for name in (DATA_NAME, OWNER_NAME):
        with contextlib.suppress(OSError):  # absent, or the filesystem has failed: the next run tries again
            (path / name).unlink()
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def _owner(reserved_bytes: int) -> dict[str, Any]:
    pid = os.getpid()
    return {
        "format": _FORMAT,
        "about": "Scratch space of a running training. The space is in a file without a name (lsof +L1 lists it); "
        "it is freed when the process ends, and the next run removes this folder.",
        "pid": pid,
        "start_time_ticks": _start_time_ticks(pid),
        "boot_id": _boot_id(),
        "host": socket.gethostname(),
        "command": sys.argv[:1],
        "reserved_bytes": reserved_bytes,
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _start_time_ticks(pid: object) -> int | None:
    """Start time of a process, which tells it from a later process with the same id; None if it does not run.

    Reads fields 3 (state) and 22 (start time) of ``/proc/<pid>/stat``, see proc(5). A zombie counts as ended: it has
    released everything.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
