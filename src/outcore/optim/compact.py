"""Compact masters: an fp32 number stored as its rounding to bf16, which is the weight itself, and its lower half.

[Note: compact masters] The weight is the upper half of the master, or one more if the lower half rounds up. So the
lower half, read as a signed number and added to the weight's bits, gives the master back. Only ties need more: an even
weight is the rounding of 65,537 numbers. The one rounded down at a tie (lower half 0x8000) would read like the one
rounded up at a tie. It therefore gets a special lower half, which its row of 128 does not contain otherwise. There
always is one, since there are more candidates than elements in a row, so nothing can overflow. The row's *code* says
which number it is.

The weight of a NaN is the upper half of its master; the row's code says that the row may have NaNs, which are read this
way. For 131,070 bit patterns of fp32 the upper half would be an infinity. These are signalling NaNs, which no
arithmetic returns; they become quiet, as in any arithmetic. All other patterns come back as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outcore.spec.layout import ROW_NUMEL

PLAIN, HAS_NAN = 255, 254
"""Codes of rows without a tie that was rounded down: of rows without NaNs, and of rows with NaNs."""
_TIE = -32768
_DEVICE_ROWS = 2**11
"""Rows corrected at a time on a device. All rows are: the host would have to wait to learn which of them need it."""


def open_masters(weights: Tensor, lower: Tensor, codes: Tensor, room: Tensor, spare: Tensor | None = None) -> Tensor:
    """Restore masters as fp32, at the beginning of ``room``; return that part. See [Note: compact masters].

    Args:
        weights: bf16 weights (1D), from the beginning of a row on.
        lower: int16 lower halves, as many as weights.
        codes: uint8 codes, one for each row.
        room: fp32, with at least as many elements.
        spare: fp32, with at least as many elements; overwritten. None: a temporary tensor is made.
    """
    values = room[: weights.numel()].copy_(weights)
    signed = lower if spare is None else spare[: weights.numel()].view(torch.int32).copy_(lower)
    for bits, low_rows, code_rows in _rows(values.view(torch.int32).add_(signed), lower, codes):
        for rows in _chosen(code_rows != PLAIN):
            low = low_rows.index_select(0, rows).int()
            x, code = bits.index_select(0, rows), code_rows.index_select(0, rows).int()[:, None]
            upper = (x - low) & 0x7FFF0000  # of the weight
            is_nan = (upper > 0x7F800000) & (low < 0) & (code != PLAIN)
            x += torch.where((low == code) & (code < HAS_NAN), 32768 - low, is_nan.int() << 16)
            bits.index_copy_(0, rows, x)
    return values


def masters_of(weights: Tensor, lower: Tensor, codes: Tensor) -> Tensor:
    """``open_masters`` on the CPU, in a new tensor."""
    return open_masters(weights, lower, codes, torch.empty(weights.numel(), dtype=torch.float32, device="cpu"))


def close_masters(room: Tensor, weights: Tensor, lower: Tensor, codes: Tensor) -> None:
    """Store the masters at the beginning of ``room``. Args: weights, lower, codes: As in ``open_masters``; written."""
    values = room[: weights.numel()]
    weights.copy_(values)
    lower.copy_(values.view(torch.int32))
    codes.fill_(PLAIN)
    may_be_nan = not (room.is_cpu and _rounds_bits()) or (values.numel() > 0 and bool(values.amax().isnan()))
    parts = _rows(values.view(torch.int32), lower, codes, weights.view(torch.int16))
    for bits, low_rows, code_rows, weight_rows in parts:
        suspects = low_rows.amin(1) == _TIE
        if may_be_nan:
            suspects |= (bits.view(torch.float32).isnan()).any(1) | (not _rounds_bits())
        for rows in _chosen(suspects):
            x = bits.index_select(0, rows)
            is_down = (x & 0x1FFFF) == 0x8000
            if may_be_nan:
                is_nan = (x & 0x7FFFFFFF) > 0x7F800000
                is_down &= ~is_nan
                upper = x >> 16
                quiet = upper | ((upper & 0x7F) == 0).int() << 6
                rounded = (x + 0x7FFF + (upper & 1)) >> 16
                weight_rows.index_copy_(0, rows, torch.where(is_nan, quiet, rounded).to(torch.int16))
            used = torch.zeros(len(x), 256, dtype=torch.uint8, device=x.device).scatter_(1, (x & 255).long(), 1)
            free = used[:, :HAS_NAN].argmin(1)
            low_rows.index_copy_(0, rows, torch.where(is_down, free[:, None], x).to(torch.int16))
            other = torch.where(is_nan.any(1), HAS_NAN, PLAIN) if may_be_nan else PLAIN
            code_rows.index_copy_(0, rows, torch.where(is_down.any(1), free, other).to(torch.uint8))


def closed_masters(values: torch.Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``close_masters`` on the CPU, into new tensors: weights, lower halves and codes."""
    lower = torch.empty(values.numel(), dtype=torch.int16, device="cpu")
    weights = torch.empty(values.numel(), dtype=torch.bfloat16, device="cpu")
    codes = torch.empty(-(-values.numel() // ROW_NUMEL), dtype=torch.uint8, device="cpu")
    close_masters(values, weights, lower, codes)
    return weights, lower, codes


@lru_cache(maxsize=1)
def _rounds_bits() -> bool:
    """Whether the CPU rounds subnormal numbers like all others. Some instructions turn them into zeros."""
    bits = torch.arange(0, 2**23, 2**23 // 999, dtype=torch.int32, device="cpu")
    return torch.equal(
        bits.view(torch.float32).bfloat16().view(torch.int16).int(), (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    )


def _rows(elements: Tensor, lower: Tensor, codes: Tensor, *more: Tensor) -> Iterator[Sequence[Tensor]]:
    """Yield tensors of elements as rows, with their codes: first all whole rows, then the rest as a shorter row."""
    numel, whole = elements.numel(), elements.numel() // ROW_NUMEL
    for start, stop, width in ((0, whole * ROW_NUMEL, ROW_NUMEL), (whole * ROW_NUMEL, numel, numel % ROW_NUMEL)):
        if start < stop:
            first, *others = (tensor[start:stop].view(-1, width) for tensor in (elements, lower, *more))
            yield first, others[0], codes[whole:] if start == whole * ROW_NUMEL else codes[:whole], *others[1:]


def _chosen(wanted: Tensor) -> Iterator[Tensor]:
    """Yield the indices of wanted rows. On a device yield all indices, in parts, instead of waiting for ``wanted``."""
    if wanted.is_cpu:
        rows = wanted.nonzero().squeeze(1)
        if rows.numel():
            yield rows
        return
    for start in range(0, len(wanted), _DEVICE_ROWS):
        yield torch.arange(start, min(start + _DEVICE_ROWS, len(wanted)), device=wanted.device)
