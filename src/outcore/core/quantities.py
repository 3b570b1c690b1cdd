"""Sizes in bytes as people write and read them. Only this module parses or formats them.

1 GiB is 2**30 bytes; 1 GB is 1e9 bytes.

[Note: aliases] States lie one behind another, and an update walks through all of them side by side. AMD's processors
(Zen) find lines of the first-level cache by a hash of address bits 12 to 27. At a distance of 256 MiB, or twice 128,
the lines of two states evict each other, and the update takes two to five times as long. Two more pages avoid this;
one more page does not, since bits 12 and 27 cancel.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from outcore.core.errors import ConfigError

ALIAS_BYTES = 2**27  # no size is a multiple of it, see [Note: aliases]
PAGE_BYTES = 4096  # extents, host buffers and O_DIRECT transfers are its multiples: drives of 4 KiB sectors reject less
SMALL_BYTES = 4096  # storages up to this size stay on the device
# Allocators place storages at its multiples. Kernels are chosen by the alignment of arguments.
ALIGN_BYTES = 512
PARAM_ALIGN_BYTES = 256  # tensors begin at multiples of it, so that kernels find them aligned as in a plain model

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*")


def align_up(value: int, alignment: int) -> int:
    """Round ``value`` up to a multiple of ``alignment``."""
    return -(-value // alignment) * alignment


def parse_bytes(value: int | str, *, what: str) -> int:
    """Read a size such as ``20 * 2**30``, ``"20GiB"`` or ``"1.5 GB"``.

    Args:
        value: Bytes, or a number with one of B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).
        what: Purpose of the size, for the error.

    Raises:
        ConfigError: The value is not a size, is negative, or has an unknown unit.
    """
    expected = f"{what}: expected bytes as a non-negative integer or a string such as '20GiB'"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{expected}, but got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{expected}, but got {value}")
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match.group(2).lower() not in _UNITS:
        raise ConfigError(f"{expected}, but got {value!r}; units are B, KB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return int(Fraction(match.group(1)) * _UNITS[match.group(2).lower()])


def format_bytes(nbytes: int, *, is_need: bool = False) -> str:
    """Format bytes for people, in powers of 1024: ``'1.50 GiB'``. Args: is_need: Round up, so that it suffices."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    size = math.ceil(100 * size) / 100 if is_need else size
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def format_rate(per_s: float) -> str:
    """Format a number per second for people: ``'1,234'``, or two digits of a small one: ``'0.3'``."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def unaliased(nbytes: int) -> int:
    """Return a size, or a little more, so that what lies side by side in pieces of this size has no aliases.

    See [Note: aliases].
    """
    return nbytes + 2 * PAGE_BYTES if nbytes and nbytes % ALIAS_BYTES == 0 else nbytes
