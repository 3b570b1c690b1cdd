"""Pieces of a transfer: bytes that are contiguous in one file. A write notes their sums, a read checks them.

[Note: parts of segments] A piece consists of whole segments of one extent, or lies within one segment ([Note: sums]).
Transfers that run at once touch different bytes. So two of their pieces can share a segment only if each is a part of
it; such pieces take turns by a lock. Pieces of whole segments need no lock.
"""

from __future__ import annotations

import errno
import mmap
import threading
from dataclasses import dataclass
from typing import final

from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes
from outcore.memory.checksums import SEGMENT_BYTES, Checksums, Segment
from outcore.memory.disk_file import DiskFile

_NUM_LOCKS = 64  # segments that happen to share a lock wait for each other, which only costs time


@dataclass(frozen=True, slots=True, eq=False)
class DiskPiece:
    """Bytes to move between a file and memory."""

    file: DiskFile
    offset: int
    """Where the bytes begin in the file."""
    span: Segment
    """The range of the store that the segments of these bytes cover."""
    within: int
    """Where the bytes begin in the span."""
    memory: memoryview
    is_aligned: bool
    """Whether the memory begins at a page."""

    @property
    def is_whole(self) -> bool:
        """Whether these are all bytes of their segments."""
        return self.memory.nbytes == self.span.stop - self.span.start

    @property
    def is_straight(self) -> bool:
        """Whether the bytes can move between file and memory directly, without a staging buffer."""
        return self.is_whole and (self.is_aligned or not self.file.is_direct)


@final
class Mover:
    """Reads and writes pieces, and keeps the sums. Several threads may call it."""

    def __init__(self, sums: Checksums) -> None:
        """Args: sums: Sums of the store that the pieces belong to."""
        self._sums = sums
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]

    def read(self, piece: DiskPiece) -> None:
        """Fill the piece's memory.

        Raises:
            OSError: The system's error, or EBADMSG if a segment does not hold the bytes that were written.
        """
        if piece.is_straight:
            self._read(piece, piece.memory)
            return
        with self._lock(piece):
            staging = self._segments(piece)
        piece.memory[:] = staging[piece.within : piece.within + piece.memory.nbytes]

    def write(self, piece: DiskPiece) -> None:
        """Write the piece's memory. If the piece is a part of a segment, the segment is read and checked first."""
        if piece.is_straight:
            self._sums.note(piece.span.start, piece.memory)
            piece.file.write(piece.offset, piece.memory)
            return
        with self._lock(piece):
            staging = _pages(piece) if piece.is_whole else self._segments(piece)
            stop = piece.within + piece.memory.nbytes
            staging[piece.within : stop] = piece.memory
            self._sums.note(piece.span.start, staging)
            first = piece.within - piece.within % PAGE_BYTES
            piece.file.write(piece.offset - piece.within + first, staging[first : align_up(stop, PAGE_BYTES)])

    def _lock(self, piece: DiskPiece) -> threading.Lock:
        return self._locks[piece.span.start // SEGMENT_BYTES % _NUM_LOCKS]

    def _segments(self, piece: DiskPiece) -> memoryview:
        staging = _pages(piece)
        self._read(piece, staging)
        return staging

    def _read(self, piece: DiskPiece, memory: memoryview) -> None:
        """Read all of a piece's segments."""
        offset = piece.offset - piece.within
        piece.file.read(offset, memory)
        wrong = self._sums.wrong(piece.span.start, memory)
        if wrong is not None:
            size, at = format_bytes(wrong.stop - wrong.start), offset + wrong.start - piece.span.start
            raise OSError(errno.EBADMSG, f"the {size} at byte {at} are not what was written there")


def _pages(piece: DiskPiece) -> memoryview:
    return memoryview(mmap.mmap(-1, piece.span.stop - piece.span.start))
