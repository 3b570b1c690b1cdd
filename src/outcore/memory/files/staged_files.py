"""Files that other code writes, put into a folder only when they are complete."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from outcore.memory.disk_file import disk_error


@contextmanager
def staged_files(directory: str | Path, *, edited: Sequence[str] = ()) -> Iterator[Path]:
    """Give a temporary folder; at the end, move every file in it to the same place under ``directory``.

    After an exception nothing is moved. Files of the same name are replaced, others stay.

    Args:
        directory: Created if missing.
        edited: Names of files that are changed rather than written anew. If there, they are copied in first.

    Raises:
        DiskError: The directory cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staged-", dir=folder) as name:
            staged = Path(name)
            for file in edited:
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, staged / file)
            yield staged
            for path in sorted(p for p in staged.rglob("*") if p.is_file()):
                sync(path)
                target = folder / path.relative_to(staged)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        sync(folder)
    except OSError as error:
        raise disk_error(f"'{folder}': expected a folder that can be written", error) from error


def copy_files(source: Path, directory: Path, wanted: Callable[[str], bool] = bool) -> None:
    """Copy what a folder holds into another folder. Hidden files are left out.

    Args:
        source: The folder.
        directory: Created if missing.
        wanted: Whether to copy a file or folder of this name.

    Raises:
        DiskError: The directory cannot be written.
    """
    with staged_files(directory) as staged:
        for path in source.iterdir():
            if path.name.startswith(".") or not wanted(path.name):
                continue
            if path.is_dir():
                shutil.copytree(path, staged / path.name)
            else:
                shutil.copyfile(path, staged / path.name)


def is_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name of a file matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable. Skips folders that a drive cannot sync. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve room for a file of this size, so that threads can write to it at once. Does nothing if a system cannot.

    Raises:
        OSError: There is no room.
    """
    call = ctypes.CDLL(None, use_errno=True).fallocate  # the C library's own way writes zeros where a system cannot
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, 0, 0, nbytes) and (code := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))
