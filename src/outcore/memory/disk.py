"""The disk tier: extents on preallocated files. Several threads read and write them, straight into and from tensors.

[Note: stripes] The store is one range of bytes, cut into stripes of 4 MiB that go round the files in turn. A transfer
is cut at the borders of stripes into pieces of at most 4 MiB, large enough that a few pieces under way reach a drive's
full rate.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import torch

from outcore.core.closing import Closing
from outcore.core.errors import ConfigError, DiskError, MemoryBudgetError, UnsupportedError
from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes
from outcore.memory.arena import Region
from outcore.memory.checksums import Checksums, Segment
from outcore.memory.disk_file import DiskFile, DiskIO, OsDiskIO, disk_error
from outcore.memory.disk_pieces import DiskPiece, Mover
from outcore.memory.piece_pool import ClosedError, PiecePool, StalledError

STRIPE_BYTES = 4 * 2**20
DEFAULT_NUM_THREADS = 8
_THEN = ", then go on from the last checkpoint"
_CLOSE_TIMEOUT_S = 2.0  # for pieces under way; if a thread hangs in a file, the space is freed with the process


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of the disk store with one owner."""

    offset: int
    nbytes: int
    owner: str
    """Unit and kind of the bytes, for errors: ``"model.layers.3 states"``."""

    @property
    def region(self) -> Region:
        """The extent's region for the race checker."""
        return Region("disk", self.offset, self.offset + self.nbytes)

    def part(self, start: int, stop: int) -> Extent:
        """Return the bytes [start, stop) of this extent. They need not be aligned; unaligned parts move more slowly."""
        if not 0 <= start <= stop <= self.nbytes:
            raise AssertionError(f"part [{start}, {stop}) of an extent of {self.nbytes} bytes")
        return Extent(self.offset + start, stop - start, self.owner)


@final
class DiskStore(Closing):
    """Disk space of a fixed size, cut front to back into extents. Extents are not freed one by one.

    Several threads may call ``read`` and ``write`` at once; callers that touch the same bytes must order themselves. A
    read returns the bytes written last, or it is an error ([Note: sums]).
    """

    def __init__(
        self, files: Sequence[DiskFile], nbytes: int, pool: PiecePool[DiskPiece], stall_timeout_s: float
    ) -> None:
        """Only ``open`` calls this."""
        self.nbytes = nbytes
        self._files = tuple(files)
        self._pool = pool
        self._sums = Checksums()
        self._mover = Mover(self._sums)
        self._stall_timeout_s = stall_timeout_s
        self._taken_bytes = 0
        self._stalled: DiskError | None = None
        self._pid = os.getpid()
        self._close = weakref.finalize(self, _close, self._files, pool, self._pid)

    @classmethod
    def open(
        cls,
        paths: Sequence[Path],
        nbytes: int,
        *,
        num_threads: int = DEFAULT_NUM_THREADS,
        stall_timeout_s: float = 120.0,
        io: DiskIO | None = None,
    ) -> Self:
        """Reserve ``nbytes``, spread evenly over ``paths``.

        Args:
            paths: Folders, made if missing; with several, stripes go round them.
            nbytes: Total size in bytes.
            num_threads: Pieces under way at once.
            stall_timeout_s: A transfer fails if none of its pieces ends for between one and two times this long. Time
                for which it gives way to others that go on does not count.
            io: The system's calls; tests put faults here.

        Raises:
            DiskError: A path cannot be used; nothing is left behind.

        Memory: ``nbytes`` of disk, rounded up to 4 KiB, and about 1/8000 of that on the host, until ``close``.
        """
        if not paths:
            raise ConfigError("disk: expected at least one path, but got none")
        nbytes = align_up(nbytes, PAGE_BYTES)
        with ExitStack() as undo:
            files = []
            for i, path in enumerate(paths):
                files.append(DiskFile.open(Path(path), _file_bytes(i, len(paths), nbytes), io or OsDiskIO()))
                undo.callback(files[-1].close)
            store = cls(files, nbytes, PiecePool(num_threads, name="outcore-disk"), stall_timeout_s)
            undo.pop_all()
        return store

    @property
    def taken_bytes(self) -> int:
        """Bytes cut off so far."""
        return self._taken_bytes

    @property
    def buffered_paths(self) -> tuple[Path, ...]:
        """Files on filesystems without direct I/O. They are slower, and their bytes pass through the page cache."""
        return tuple(file.path for file in self._files if not file.is_direct)

    def take(self, nbytes: int, *, owner: str) -> Extent:
        """Cut off the next ``nbytes``, rounded up to 4 KiB.

        Raises:
            MemoryBudgetError: The store has too few bytes left.
        """
        start = self._taken_bytes
        if start + align_up(nbytes, PAGE_BYTES) > self.nbytes:
            raise MemoryBudgetError(
                f"disk store, '{owner}': expected at most {format_bytes(self.nbytes - start)} more, "
                f"but {format_bytes(nbytes)} were asked for"
            )
        self._taken_bytes = start + align_up(nbytes, PAGE_BYTES)
        self._sums.cover(start, self._taken_bytes)
        return Extent(start, nbytes, owner)

    def read(self, extent: Extent, memory: torch.Tensor, *, gives_way: bool = False) -> None:
        """Fill ``memory`` with the extent's bytes.

        Args:
            extent: The bytes to read.
            memory: 1D uint8 in host memory, as long as the extent. Fast if address, offset and length are multiples of
                4 KiB.
            gives_way: Whether it starts no piece while other reads have pieces to start.

        Raises:
            DiskError: The read failed, or returned other bytes than were written. The error names file, owner and
                offset. After a stall the store is unusable, and the drive may still write into ``memory``. After any
                other error nothing is under way.
        """
        self._transfer("read", extent, memory, gives_way=gives_way)

    def write(self, extent: Extent, memory: torch.Tensor, *, gives_way: bool = False) -> None:
        """Write ``memory`` into the extent; see ``read``.

        A write to a part of an extent also reads the neighbouring bytes in the 64 KiB segments at its ends. If the part
        is unaligned, it also rewrites the neighbouring bytes in the 4 KiB pages there.
        """
        self._transfer("write", extent, memory, gives_way=gives_way)

    def stop(self) -> None:
        """Fail transfers that have pieces still to start; pieces already under way end. Idempotent."""
        if os.getpid() == self._pid:
            self._pool.stop()

    def close(self) -> None:
        """Free the space and remove the run directories. Transfers that still wait fail. Idempotent.

        Garbage collection of the store and the end of the process also do this. A forked child never does.
        """
        self._close()

    def _transfer(self, verb: str, extent: Extent, memory: torch.Tensor, *, gives_way: bool) -> None:
        self._check(extent, memory)
        action = self._mover.read if verb == "read" else self._mover.write

        def move(piece: DiskPiece) -> None:
            try:
                action(piece)
            except OSError as error:
                raise disk_error(_what(verb, extent, piece), error, then=_THEN) from error

        try:
            pieces, timeout_s = self._pieces(extent, memory), self._stall_timeout_s
            self._pool.run(move, pieces, stall_timeout_s=timeout_s, kind=verb, gives_way=gives_way)
        except StalledError as stall:
            timeout = OSError(errno.ETIMEDOUT, f"no progress for {self._stall_timeout_s:g} s")
            where = stall.piece if isinstance(stall.piece, DiskPiece) else None
            self._stalled = disk_error(_what(verb, extent, where), timeout, then=_THEN)
            raise self._stalled from stall
        except ClosedError as closed:
            raise DiskError(f"{_what(verb, extent, None)}, but the disk store is closed") from closed

    def _check(self, extent: Extent, memory: torch.Tensor) -> None:
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"disk store, '{extent.owner}': expected the process that opened it, but this is a forked child; "
                "use the model in the process that prepared it"
            )
        if self._stalled is not None:
            raise DiskError(f"the disk store is unusable since an earlier stall: {self._stalled}") from self._stalled
        is_bytes = memory.dtype == torch.uint8 and memory.is_cpu and memory.dim() == 1
        if not is_bytes or not memory.is_contiguous() or memory.numel() != extent.nbytes:
            raise AssertionError(
                f"expected {extent.nbytes} contiguous bytes for '{extent.owner}', "
                f"but got {memory.dtype} {tuple(memory.shape)}"
            )
        if extent.region.stop > self._taken_bytes:
            raise AssertionError(f"{extent} is not of this store")

    def _pieces(self, extent: Extent, memory: torch.Tensor) -> Iterator[DiskPiece]:
        """Cut a transfer into pieces at the borders of stripes, and of segments that it touches in part."""
        view, address = memory.numpy().data, memory.data_ptr()
        start, end = extent.region.start, extent.region.stop
        while start < end:
            span = self._span(start, end)
            stop = min(span.stop, end)
            stripe, within = divmod(start, STRIPE_BYTES)
            row, column = divmod(stripe, len(self._files))
            first = start - extent.offset
            yield DiskPiece(
                file=self._files[column],
                offset=row * STRIPE_BYTES + within,
                span=span,
                within=start - span.start,
                memory=view[first : stop - extent.offset],
                is_aligned=(address + first) % PAGE_BYTES == 0,
            )
            start = stop

    def _span(self, start: int, end: int) -> Segment:
        """Return the span of the next piece of [start, end).

        The span is all whole segments up to the stripe's end, or a single segment of which the piece is a part.
        """
        first = self._sums.segment(start)
        if first.start < start or end < first.stop:
            return first
        stop = min(end, (start // STRIPE_BYTES + 1) * STRIPE_BYTES)
        last = self._sums.segment(stop - 1)
        return Segment(start, stop if last.stop == stop else last.start)


def _close(files: Sequence[DiskFile], pool: PiecePool[DiskPiece], pid: int) -> None:
    if os.getpid() != pid:
        return
    is_idle = False
    try:
        is_idle = pool.close(timeout_s=_CLOSE_TIMEOUT_S)
    finally:  # also if a Ctrl-C ends the wait
        for file in files:
            file.close(is_idle=is_idle)


def _file_bytes(index: int, num_files: int, nbytes: int) -> int:
    """Size of one of the files: its whole stripes and its share of the last round."""
    rows, rest = divmod(nbytes, STRIPE_BYTES * num_files)
    return rows * STRIPE_BYTES + min(max(rest - index * STRIPE_BYTES, 0), STRIPE_BYTES)


def _what(verb: str, extent: Extent, piece: DiskPiece | None) -> str:
    owner = extent.owner or "root"
    task = f"disk store, '{owner}': expected to {verb} "
    if piece is None:
        return f"{task}{format_bytes(extent.nbytes)} at byte {extent.offset} of the store"
    return f"{task}{format_bytes(piece.memory.nbytes)} at byte {piece.offset} of '{piece.file.path}'"
