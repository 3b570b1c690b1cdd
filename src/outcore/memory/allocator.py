"""Freed memory that the C library's allocator holds back from the system.

[Note: held back] glibc keeps freed memory that lies below memory in use. Activations and gradients come and go in a
different order every step, so the memory that it keeps grows to a multiple of what a step uses: 180 MiB beside a plan
of 366 MiB. ``malloc_trim`` gives whole pages back wherever they lie. The call takes time, and the next step takes even
more to touch the pages again: ten times as much if activations are large. So it is called when memory has grown, and
seldom enough that both together cost about a hundredth of the time.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import final

from outcore.core.quantities import PAGE_BYTES

WORTH_BYTES = 32 * 2**20
"""Growth that is worth a call."""
_REST = 100  # least time between calls, as a multiple of the last call's time and that to touch the pages again
_TOUCHED_PER_S = 2.0 * 2**30
"""Bytes of fresh memory touched per second. A core of an EPYC finds and clears 82,000 pages in 0.14 s
(benchmarks/step.py)."""
_LEAST_REST_S = 1.0
_STATM = Path("/proc/self/statm")


def give_back() -> None:
    """Give freed memory back to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(ctypes.c_size_t(0))


def resident_bytes() -> int:
    """Resident memory of this process in bytes, without pages of files and shared memory."""
    pages = _STATM.read_text().split()
    return (int(pages[1]) - int(pages[2])) * PAGE_BYTES


@final
class HeldBack:
    """Gives memory back now and then. See [Note: held back]."""

    def __init__(self) -> None:
        self._known_bytes = 0
        self._due_s = 0.0

    def give_back_if_due(self) -> None:
        """Give memory back if it has grown enough and the last call is long ago. Cheap: call it after each step."""
        now = time.monotonic()
        if now < self._due_s:
            return
        if resident_bytes() - self._known_bytes < WORTH_BYTES:
            self._due_s = now + _LEAST_REST_S
            return
        grown_bytes = resident_bytes()
        self.give_back()
        taken_s = time.monotonic() - now + max(0, grown_bytes - self._known_bytes) / _TOUCHED_PER_S
        self._due_s = now + max(_REST * taken_s, _LEAST_REST_S)

    def give_back(self) -> None:
        """Give memory back at once."""
        give_back()
        self._known_bytes = resident_bytes()
