"""Files of a checkpoint: written front to back in blocks, with a checksum of each block."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch

from outcore.core.errors import OutcoreError
from outcore.core.quantities import PAGE_BYTES
from outcore.memory.disk_file import disk_error
from outcore.memory.files.staged_files import reserve, sync
from outcore.memory.piece_pool import ClosedError, PiecePool, StalledError
from outcore.spec.manifest import BLOCK_BYTES, ChecksummedBlock

_NUM_THREADS = 4
STALL_TIMEOUT_S = 600.0
_EMPTY = ChecksummedBlock(0, 0)

Fill = Callable[[int, int, torch.Tensor], None]
"""Puts the bytes [start, stop) of a source into host memory (1D uint8). Called on several threads at once."""


class FilePiece(NamedTuple):
    """Bytes of a file that lie in one block."""

    start: int
    stop: int
    fill: Fill
    sums: list[ChecksummedBlock]
    place: int
    """Index of the block in ``sums``."""


Files = Mapping[str, tuple[ChecksummedBlock, ...]]
"""Checksums of the blocks of files, by the files' names."""


@final
class CheckpointFile:
    """A file that is written front to back, in blocks whose checksums are kept. Uses direct I/O where possible.

    The file is closed between two writes: a model may have more units than a process may have open files.
    """

    def __init__(self, path: Path, nbytes: int, pool: BlockPool) -> None:
        """Write nothing yet. Args: nbytes: Final size of the file."""
        self.path, self.nbytes = path, nbytes
        self._pool = pool
        self._sums: list[ChecksummedBlock] = []
        self._written = 0
        self._rest = b""
        """Bytes of the last, unfinished page. They are written with the next bytes, or at the end of the file."""

    @property
    def blocks(self) -> tuple[ChecksummedBlock, ...]:
        """Checksums of the blocks that were written."""
        return tuple(self._sums)

    def write(self, nbytes: int, fill: Fill) -> None:
        """Append bytes. Fast if the file's length before is a multiple of 4 KiB.

        Raises:
            OSError: The system reported an error.
        """
        begin, end = self._written, self._written + nbytes
        self._written = end
        self._sums += [_EMPTY] * (-(-end // BLOCK_BYTES) - len(self._sums))
        starts = [begin, *range(begin // BLOCK_BYTES * BLOCK_BYTES + BLOCK_BYTES, end, BLOCK_BYTES)] if nbytes else []
        pieces = [
            FilePiece(a, b, lambda start, stop, to: fill(start - begin, stop - begin, to), self._sums, a // BLOCK_BYTES)
            for a, b in zip(starts, [*starts[1:], end], strict=False)  # no bytes, no pieces
        ]
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self._pool.is_direct else 0)
        fd, is_idle = os.open(self.path, flags, 0o666), True
        try:
            if not begin:
                reserve(fd, self.nbytes)
            self._pool.run(partial(self._write, fd, self._rest), pieces)
        except BaseException as error:
            # After these, and after a second Ctrl-C, a thread may still write: the descriptor must not become that of
            # another file.
            is_idle = isinstance(error, Exception) and not isinstance(error, TimeoutError | ClosedError)
            raise
        finally:
            if is_idle:
                os.close(fd)
        if end == self.nbytes and self._rest:  # direct I/O does not take less than a page
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_at(fd, memoryview(self._rest), end - len(self._rest), 1)
            finally:
                os.close(fd)

    def _write(self, fd: int, rest: bytes, piece: FilePiece, memory: torch.Tensor) -> None:
        head, nbytes, view = piece.start % PAGE_BYTES, piece.stop - piece.start, memory.numpy().data
        view[:head] = rest[:head]
        piece.fill(piece.start, piece.stop, memory[head : head + nbytes])
        before, new = piece.sums[piece.place], view[head : head + nbytes]
        piece.sums[piece.place] = ChecksummedBlock(before.nbytes + nbytes, zlib.crc32(new, before.crc32))
        whole = (head + nbytes) // PAGE_BYTES * PAGE_BYTES
        _write_at(fd, view[:whole], piece.start - head, PAGE_BYTES if self._pool.is_direct else 1)
        if piece.stop == self._written:
            self._rest = bytes(view[whole : head + nbytes])


def takes_direct_io(folder: Path) -> bool:
    """Whether a page can really be written past the page cache: some filesystems accept the flag, but no write."""
    path = folder / ".direct"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            return os.pwrite(fd, mmap.mmap(-1, PAGE_BYTES), 0) == PAGE_BYTES
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)


def _write_at(fd: int, view: memoryview, offset: int, unit: int) -> None:
    """Write all bytes. Args: unit: A write that stops short is continued at a multiple of it."""
    done = 0
    while done < len(view):
        moved = os.pwrite(fd, view[done:], offset + done)
        moved -= moved % unit
        if moved <= 0:
            raise OSError(errno.EIO, f"the drive takes no bytes at {offset + done}")
        done += moved


@final
class BlockPool:
    """A few threads with a block of host memory each: 16 MiB in all, until ``close``."""

    def __init__(self, *, is_direct: bool = True) -> None:
        """Start the threads. Args: is_direct: Whether files are written past the page cache."""
        self.is_direct = is_direct
        self._pool: PiecePool[Callable[[], None]] = PiecePool(_NUM_THREADS, name="outcore-checkpoint")
        self._local = threading.local()

    def run(self, work: Callable[[FilePiece, torch.Tensor], None], pieces: Iterable[FilePiece]) -> None:
        """Do ``work`` on every piece. Returns when all are done, and raises if one has failed."""
        tasks = [partial(self._do, work, piece) for piece in pieces]
        try:
            self._pool.run(lambda task: task(), tasks, stall_timeout_s=STALL_TIMEOUT_S)
        except StalledError as stall:
            raise OSError(errno.ETIMEDOUT, f"no progress for {STALL_TIMEOUT_S:g} s") from stall

    def _do(self, work: Callable[[FilePiece, torch.Tensor], None], piece: FilePiece) -> None:
        memory = getattr(self._local, "memory", None)
        if memory is None:  # a mapping begins at a page
            memory = self._local.memory = torch.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=torch.uint8)
        work(piece, memory)

    def close(self) -> None:
        """End the threads."""
        self._pool.close(timeout_s=1.0)


class PartOfCheckpoint:
    """Files of this process in a checkpoint that another process has begun, and commits."""

    def __init__(self, path: Path, target: Path, *, is_direct: bool) -> None:
        """Args: path: The hidden folder. target: The final folder. is_direct: Whether it takes direct I/O.

        Raises:
            DiskError: The hidden folder is not there.
        """
        self.path, self.target = path, target
        if not path.is_dir():
            missing = FileNotFoundError(errno.ENOENT, f"'{path}' of rank 0 is not there; name one that all ranks see")
            raise disk_error(self._expected, missing)
        self._pool = BlockPool(is_direct=is_direct)
        self._files: dict[str, CheckpointFile] = {}

    @property
    def _expected(self) -> str:
        return f"checkpoint '{self.target}': expected a folder that can be written"

    def error(self, error: OSError) -> OutcoreError:
        """Turn an error of the system into one for the user."""
        if error.errno == errno.ENOENT and not self.path.is_dir():
            gone = "it was removed meanwhile; if other ranks gave the checkpoint up, their errors say why"
            error = FileNotFoundError(errno.ENOENT, gone)
        return disk_error(self._expected, error)

    def create(self, name: str, nbytes: int) -> CheckpointFile:
        """Begin a file that will have this size. Raises: OutcoreError: A file of this name is being written already."""
        if name in self._files:
            raise OutcoreError(
                f"checkpoint '{self.target}': expected to save each file once, but '{name}' is being written already; "
                "save into another folder, or leave the second save out"
            )
        self._files[name] = CheckpointFile(self.path / name, nbytes, self._pool)
        return self._files[name]

    def finish(self) -> Files:
        """Make the files durable. Raises: OSError."""
        files = durable(self._files.values(), self.path)
        self.stop()
        return files

    def stop(self) -> None:
        """Write nothing more. Idempotent."""
        self._pool.close()

    def remove(self) -> None:
        """Write nothing more; the process that began the checkpoint removes it. Idempotent."""
        self.stop()

    def clear(self) -> None:
        """Write nothing more, and remove the whole folder, since it will not be committed. Idempotent.

        Every rank calls this: the last call also removes files that a rank still wrote during an earlier one.
        """
        self.stop()
        shutil.rmtree(self.path, ignore_errors=True)


def durable(files: Collection[CheckpointFile], folder: Path) -> dict[str, tuple[ChecksummedBlock, ...]]:
    """Sync files. Returns their checksums, by their names in a folder. Raises: OSError."""
    for file in files:
        sync(file.path)
    return {str(file.path.relative_to(folder)): file.blocks for file in files}
