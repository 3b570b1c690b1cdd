"""One preallocated file of the disk store: opens it safely, and checks the result of every read and write."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Protocol, Self, final

from outcore.core.errors import DiskError
from outcore.core.quantities import PAGE_BYTES, format_bytes
from outcore.memory.machine import disk_free_bytes
from outcore.memory.run_directory import DATA_NAME, RunDirectory, reclaim_dead

_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}  # statfs(2), linux/magic.h

_WHAT_TO_DO = {
    errno.EIO: "the drive or its connection fails: look at dmesg and at the drive's health (smartctl)",
    errno.EBADMSG: "the drive, its connection or memory is bad: look at dmesg and at the drive's health (smartctl)",
    errno.ENOSPC: "free space there or give another path",
    errno.EDQUOT: "the quota is used up: free space there or give another path",
    errno.EROFS: "it is mounted read-only: give a path that can be written",
    errno.EACCES: "give a folder that this user may write to",
    errno.EPERM: "give a folder that this user may write to",
    errno.ENOTDIR: "give a folder, not a file",
    errno.EEXIST: "give a folder, not a file",
}


class DiskIO(Protocol):
    """The system calls of the disk store; tests put faults here. All may raise ``OSError``."""

    def filesystem_type(self, path: Path) -> int:
        """Return the magic number of the filesystem of an existing path."""

    def free_bytes(self, path: Path) -> int:
        """Space in bytes that this user may take on the filesystem of a path."""

    def open(self, path: Path, flags: int) -> int:
        """Open or create a file."""

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve space from byte 0 on."""

    def pread(self, fd: int, memory: memoryview, offset: int) -> int:
        """Read into memory; return the number of bytes read."""

    def pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
        """Write from memory; return the number of bytes written."""


@final
class OsDiskIO:
    """The real system calls. Those that move bytes release the GIL."""

    def filesystem_type(self, path: Path) -> int:
        """Return the first field of statfs(2), which Python's ``statvfs`` leaves out."""
        buffer = ctypes.create_string_buffer(256)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.statfs(os.fsencode(path), buffer):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        return int(ctypes.c_long.from_buffer(buffer).value) & 0xFFFFFFFF

    def free_bytes(self, path: Path) -> int:
        """See ``limits.disk_free_bytes``."""
        return disk_free_bytes(path)

    def open(self, path: Path, flags: int) -> int:
        """Open or create a file that only this user may access."""
        return os.open(path, flags, 0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve with fallocate. If the filesystem cannot, only set the size: then a full disk shows at a write."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(fd, nbytes)

    def pread(self, fd: int, memory: memoryview, offset: int) -> int:
        """preadv(2)."""
        return os.preadv(fd, [memory], offset)

    def pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
        """pwritev(2)."""
        return os.pwritev(fd, [memory], offset)


@final
class DiskFile:
    """A file without a name (see [Note: nothing stays behind]) in its own run directory. Other runs do not see it.

    With direct I/O (O_DIRECT), transfers go straight between the drive and the caller's memory. This is faster than the
    page cache, and cached copies of bytes that were just moved away do not use up the host's budget.
    """

    def __init__(self, fd: int, directory: RunDirectory, io: DiskIO, *, is_direct: bool) -> None:
        """Only ``open`` calls this."""
        self.path = directory.path / DATA_NAME
        self.is_direct = is_direct
        self._fd = fd
        self._directory = directory
        self._io = io

    @classmethod
    def open(cls, folder: Path, nbytes: int, io: DiskIO) -> Self:
        """Check ``folder`` (made if missing), remove the folders of dead runs there, and reserve ``nbytes``.

        Raises:
            DiskError: The folder is in host memory, is read-only, is too full or is not a folder; or the drive fails.
        """
        what = f"disk path '{folder}': expected a writable folder with {format_bytes(nbytes)} of free space"
        try:
            _refuse_memory(folder, io)
            folder.mkdir(parents=True, exist_ok=True)
            reclaim_dead(folder)
            free_bytes = io.free_bytes(folder)
            if free_bytes < nbytes:
                short = OSError(errno.ENOSPC, f"needs {format_bytes(nbytes)}, {format_bytes(free_bytes)} free")
                raise disk_error(what, short)
            directory = RunDirectory.create(folder, reserved_bytes=nbytes)
        except DiskError:
            raise
        except OSError as error:
            raise disk_error(what, error) from error
        try:
            return cls._open_in(directory, nbytes, io)
        except OSError as error:
            directory.close()
            raise disk_error(what, error) from error
        except BaseException:
            directory.close()
            raise

    @classmethod
    def _open_in(cls, directory: RunDirectory, nbytes: int, io: DiskIO) -> Self:
        path = directory.path / DATA_NAME
        fd, is_direct = _open_data(path, io)
        try:
            path.unlink()
            if nbytes:
                io.allocate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, directory, io, is_direct=is_direct)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from byte ``offset`` on.

        Args:
            offset: Offset in the file.
            memory: Writable bytes. With direct I/O, offset, size and address must be multiples of 4 KiB.

        Raises:
            OSError: The system's error, or EIO with an explanation if the file became shorter than it was made.
        """
        done = 0
        while done < memory.nbytes:
            moved = self._whole(self._io.pread(self._fd, memory[done:], offset + done))
            if moved <= 0:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done}: it was truncated")
            done += moved

    def write(self, offset: int, memory: memoryview) -> None:
        """Write ``memory`` at byte ``offset``; see ``read``."""
        done = 0
        while done < memory.nbytes:
            moved = self._whole(self._io.pwrite(self._fd, memory[done:], offset + done))
            if moved <= 0:
                raise OSError(errno.EIO, f"the drive takes no bytes at {offset + done}")
            done += moved

    def close(self, *, is_idle: bool = True) -> None:
        """Free the space and remove the run directory. Idempotent.

        Args:
            is_idle: False if a thread hangs in a call. Its descriptor must not be reused for another file, so it stays
                open, and the space is freed only when the process ends.
        """
        if is_idle and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._directory.close()

    def _whole(self, moved_bytes: int) -> int:
        """Round down to whole pages: direct I/O must continue at a page, so a part of a page is moved again."""
        return moved_bytes - moved_bytes % PAGE_BYTES if self.is_direct else moved_bytes


def disk_error(what: str, error: OSError, *, then: str = "") -> DiskError:
    """Return the error for the user that reports an error of the system.

    Args:
        what: What was expected, and where.
        error: The system's error.
        then: How to continue once the cause is repaired.
    """
    code = error.errno or errno.EIO
    todo = _WHAT_TO_DO.get(code, "check the drive or give another path")
    result = DiskError(
        f"{what}, but got {errno.errorcode.get(code, str(code))}: {error.strerror or error}; {todo}{then}"
    )
    result.errno = code
    return result


def _refuse_memory(folder: Path, io: DiskIO) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    name = _MEMORY_FILESYSTEMS.get(io.filesystem_type(existing))
    if name is not None:
        raise DiskError(
            f"disk path '{folder}': expected a drive, but it is on {name}, which is host memory; "
            "give a folder on a drive, or a larger host budget"
        )


def _open_data(path: Path, io: DiskIO) -> tuple[int, bool]:
    """Create the file. Use direct I/O if it moves a page in a trial: some filesystems only accept the flag."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = io.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return io.open(path, flags), False
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    try:
        if io.pwrite(fd, page, 0) == PAGE_BYTES == io.pread(fd, page, 0):
            return fd, True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            os.close(fd)
            raise
    os.close(fd)
    return io.open(path, flags), False
