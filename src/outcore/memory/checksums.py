"""Checksums of the disk tier, kept in host memory: a read returns the bytes written last, or it is an error.

[Note: sums] The store is cut into segments: every 64 KiB, and at the borders of extents, so that no segment has two
owners. Each segment has one number: the sum of its 64-bit words, each times an odd weight for its place, modulo 2**64.
A single flipped bit always changes the sum. Old bytes, zeros, and bytes that belong elsewhere also change it, except
with a probability of about one in 2**60, since the weights are random. (The probability is larger if only the highest
bits of words change, because a product keeps little of them.) Bytes never written count as zeros, whose sum is 0; the
system also reads them as zeros. The sums take 128 MiB per TiB. One multiplication and one addition per eight bytes are
as fast as memory, and NumPy releases the GIL for them.

The sum of a segment is set before its bytes are sent. So a write that fails, or that the drive loses, is found when the
segment is read. A write that is left out altogether changes nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

SEGMENT_BYTES = 64 * 2**10
_WORDS = SEGMENT_BYTES // 8
_Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
_WEIGHTS: _Numbers = np.frombuffer(hashlib.shake_128(b"outcore").digest(SEGMENT_BYTES), np.uint64) | np.uint64(1)


class Segment(NamedTuple):
    """The bytes [start, stop) of the store that have one sum."""

    start: int
    stop: int


@final
class Checksums:
    """The sums of a store. A caller that touches a segment must have it to itself."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._sums: list[_Numbers] = []

    def cover(self, start: int, stop: int) -> None:
        """Add the pages of an extent, which hold zeros and lie behind all extents so far."""
        if start < stop:
            num_segments = (stop - 1) // SEGMENT_BYTES - start // SEGMENT_BYTES + 1
            self._sums.append(np.zeros(num_segments, np.uint64))
            self._stops.append(stop)
            self._starts.append(start)

    def segment(self, at: int) -> Segment:
        """Return the segment that holds the byte ``at``."""
        extent = self._extent(at)
        start = at - at % SEGMENT_BYTES
        return Segment(max(start, self._starts[extent]), min(start + SEGMENT_BYTES, self._stops[extent]))

    def note(self, start: int, memory: memoryview) -> None:
        """Set the sums of whole segments of one extent, from ``start`` on, which are about to hold these bytes."""
        self._known(start, memory.nbytes)[:] = _sums_of(start, memory)

    def wrong(self, start: int, memory: memoryview) -> Segment | None:
        """Return the first of these segments whose sum differs from the one noted; None if there is none."""
        (where,) = np.nonzero(self._known(start, memory.nbytes) != _sums_of(start, memory))
        if not len(where):
            return None
        return self.segment(max(start, (start // SEGMENT_BYTES + int(where[0])) * SEGMENT_BYTES))

    def _known(self, start: int, nbytes: int) -> _Numbers:
        extent = self._extent(start)
        before = self._starts[extent] // SEGMENT_BYTES
        last = (start + nbytes - 1) // SEGMENT_BYTES
        return self._sums[extent][start // SEGMENT_BYTES - before : last - before + 1]

    def _extent(self, at: int) -> int:
        return bisect_right(self._starts, at) - 1


def _sums_of(start: int, memory: memoryview) -> _Numbers:
    words = np.frombuffer(memory, np.uint64)
    first = start % SEGMENT_BYTES // 8
    head, rest = words[: -first % _WORDS], words[-first % _WORDS :]
    whole = len(rest) - len(rest) % _WORDS
    found = [_weighted(head, first, len(head)), _weighted(rest[:whole], 0, _WORDS)]
    return np.concatenate([*found, _weighted(rest[whole:], 0, len(rest) - whole)])


def _weighted(words: _Numbers, first: int, length: int) -> _Numbers:
    """Return a sum for each run of ``length`` words; each run begins at word ``first`` of its segment."""
    if not len(words):
        return words
    result: _Numbers = np.einsum("ij,j->i", words.reshape(-1, length), _WEIGHTS[first : first + length])
    return result
