"""Sums of what the disk tier holds, kept in host memory: what is read is what was written last, or it is an error.

[Note: sums] The store is cut into segments: every 64 KiB, and at the borders of extents, so that none has two owners.
Each has one number, the sum of its 64-bit words times an odd weight for each place, modulo 2**64. A single flipped bit
always changes it. Old bytes, zeros, and bytes that belong elsewhere change it too, but for a chance of about one in
2**60, since the weights are random. (The chance is larger where nothing else changes than the highest bits of words: a
product keeps little of them.) What was never written counts as zeros, whose sum is 0, and the system gives zeros for
it. The numbers take 128 MiB per TiB. One multiplication and one addition for eight bytes are as fast as memory, and
NumPy gives up the GIL for them.

What is known is set before the bytes are sent. So a write that fails, or that the drive loses, is found when the
segment is read, and a write that is left out changes nothing.
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
class Sums:
    """The sums of a store. Who touches a segment has it to himself."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._sums: list[_Numbers] = []

    def cover(self, start: int, stop: int) -> None:
        """Begin with zeros in an extent's pages, behind those of all extents so far."""
        if start < stop:
            num_segments = (stop - 1) // SEGMENT_BYTES - start // SEGMENT_BYTES + 1
            self._sums.append(np.zeros(num_segments, np.uint64))
            self._stops.append(stop)
            self._starts.append(start)

    def segment(self, at: int) -> Segment:
        """The one that holds this byte."""
        extent = self._extent(at)
        start = at - at % SEGMENT_BYTES
        return Segment(max(start, self._starts[extent]), min(start + SEGMENT_BYTES, self._stops[extent]))

    def note(self, start: int, memory: memoryview) -> None:
        """Whole segments of one extent, from ``start`` on, are going to hold these bytes."""
        self._known(start, memory.nbytes)[:] = _sums_of(start, memory)

    def wrong(self, start: int, memory: memoryview) -> Segment | None:
        """The first of these segments that does not hold what was noted."""
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
    """A sum for each ``length`` words, which begin at word ``first`` of their segments."""
    if not len(words):
        return words
    result: _Numbers = np.einsum("ij,j->i", words.reshape(-1, length), _WEIGHTS[first : first + length])
    return result
