"""Arenas, their pieces (buffers), and the regions by which the race checker names pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from outcore.core.errors import MemoryBudgetError
from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes

TEMPORARY = "temporary"
"""Arena name of buffers that one operation makes for itself; the race checker does not look at them."""


class Region(NamedTuple):
    """The bytes [start, stop) of an arena, for the race checker."""

    arena: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of an arena in host or device memory.

    ``bytes`` is a 1D uint8 tensor over the memory; ``region`` gives its arena and its place there. Buffers are cut once
    and live as long as the arena.
    """

    bytes: torch.Tensor  # 1D uint8
    region: Region
    _fronts: dict[int, Buffer] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.stop - self.region.start

    def part(self, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of this buffer. A part from 0 on, as of a slot, is made once and kept."""
        part = self._fronts.get(stop) if start == 0 else None
        if part is None:
            if not 0 <= start <= stop <= self.nbytes:
                raise AssertionError(f"part [{start}, {stop}) of a buffer of {self.nbytes} bytes")
            base = self.region.start
            part = Buffer(self.bytes[start:stop], Region(self.region.arena, base + start, base + stop))
            if start == 0:
                self._fronts[stop] = part
        return part

    def tensor(
        self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Return a tensor over the bytes from ``offset`` on, with its own version counter.

        Its elements have no gaps between them; ``strides`` gives their order (None: row-major).

        Why its own counter: views made by slicing share one counter with the whole arena. Any write to the arena would
        then look to autograd like a write to every saved tensor.
        """
        itemsize = dtype.itemsize
        start = self.bytes.storage_offset() + offset
        numel = 1
        for n in shape:
            numel *= n
        if start % itemsize or offset + numel * itemsize > self.nbytes:
            raise AssertionError(f"tensor {shape} {dtype} at byte {offset} of a buffer of {self.nbytes} bytes")
        if strides is None:
            steps, step = [], 1
            for n in reversed(shape):
                steps.append(step)
                step *= max(n, 1)
            strides = tuple(reversed(steps))
        empty = torch.empty(0, dtype=dtype, device=self.bytes.device)
        return empty.set_(self.bytes.untyped_storage(), start // itemsize, shape, strides)


class Arena:
    """Memory of a fixed size, cut front to back into buffers. Buffers are not freed one by one."""

    def __init__(self, name: str, memory: torch.Tensor) -> None:
        """Args: name: Name for regions and errors. memory: 1D uint8, 4 KiB-aligned."""
        self.name = name
        self._memory = memory
        self._taken_bytes = 0

    @property
    def nbytes(self) -> int:
        """Size of the whole arena."""
        return self._memory.numel()

    @property
    def taken_bytes(self) -> int:
        """Bytes cut off so far."""
        return self._taken_bytes

    def take(self, nbytes: int) -> Buffer:
        """Cut off the next ``nbytes``, rounded up to 4 KiB.

        Raises:
            MemoryBudgetError: The arena has too few bytes left.
        """
        start = self._taken_bytes
        stop = start + align_up(nbytes, PAGE_BYTES)
        if stop > self.nbytes:
            raise MemoryBudgetError(
                f"{self.name} arena: expected at most {format_bytes(self.nbytes - start)} more, but "
                f"{format_bytes(nbytes)} were asked for"
            )
        self._taken_bytes = stop
        return Buffer(self._memory[start : start + nbytes], Region(self.name, start, start + nbytes))
