"""Strides: the order in which the elements of a tensor lie in memory.

[Note: strides] PyTorch chooses kernels by strides, and different kernels round differently. So a parameter that is not
row-major (``channels_last``, transposed) keeps its strides. In every layout its bytes lie in the same order as in the
parameter's own memory, without gaps; torch's fused optimizers walk through them in this order, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor."""
    sizes = [max(n, 1) for n in shape]
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether every element has a place of its own and no gaps lie between them."""
    step = 1
    for i in reversed(outermost_first(strides)):
        if shape[i] != 1:
            if strides[i] != step:
                return 0 in shape
            step *= shape[i]
    return True


def outermost_first(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions in memory order."""
    return tuple(sorted(range(len(strides)), key=lambda i: -strides[i]))
