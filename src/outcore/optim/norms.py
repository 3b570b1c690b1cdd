"""Norms that do not depend on how a parameter is cut among ranks.

[Note: one tree] torch's norm of a parameter cannot be put together from norms of its pieces: the bits would differ. So
with several ranks the sum of squares is defined here, in float64. First the squares of each block of ``CUT_NUMEL``
elements are added up, by repeatedly adding one half of the block to the other. The blocks are the leaves of a binary
tree in memory order, filled up with zeros; a node is the sum of its two children. Cuts between ranks lie between
blocks, so each rank has whole subtrees and sends their sums: a few numbers per parameter. Every sum is an addition of
two float64 numbers, which has the same result on every machine. The norm is the square root, rounded to float32 once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outcore.optim.piece import CUT_NUMEL

Node = tuple[int, int]
"""A node of the tree: its level, from 0 for blocks, and its index in that level."""


def block_sums(values: Tensor, factors: Sequence[Tensor] = ()) -> Tensor:
    """Return the sum of squares of each block, in float64.

    Args:
        values: 1D; begins at the start of a block.
        factors: 0-dim tensors; the values are first multiplied by them, in the values' own dtype.
    """
    for factor in factors:
        values = values * factor
    squares = values.double()
    squares = torch.nn.functional.pad(squares, (0, -squares.numel() % CUT_NUMEL)).square_().view(-1, CUT_NUMEL)
    while (half := squares.shape[1] // 2) > 0:
        squares = squares[:, :half] + squares[:, half:]
    return squares[:, 0]


def num_blocks(numel: int) -> int:
    """Number of blocks of a parameter."""
    return -(-numel // CUT_NUMEL)


def whole_nodes(first: int, stop: int, count: int) -> list[Node]:
    """Return the roots of the largest subtrees that make up blocks [first, stop) of ``count``."""
    return list(_walk(first, stop, count))


def node_sums(sums: Tensor, first: int, stop: int, count: int) -> Tensor:
    """Return the sums of ``whole_nodes``, in the same order. Args: sums: Sums of the blocks."""
    found, level = [], 0
    for at, place in _walk(first, stop, count):
        while level < at:
            sums, level = _halved(sums, first), level + 1
            first //= 2
        found.append(sums[place - first])
    return torch.stack(found) if found else sums[:0]


def _walk(first: int, stop: int, count: int) -> Iterator[Node]:
    level = 0
    while first < stop:
        if count == 1:
            yield level, 0
            return
        if first % 2:
            yield level, first
            first += 1
        if stop % 2 and stop != count and first < stop:
            yield level, stop - 1
            stop -= 1
        first, stop, count, level = first // 2, -(-stop // 2), -(-count // 2), level + 1


def _halved(sums: Tensor, first: int) -> Tensor:
    """Return the sums of the next level.

    A node without a sibling in ``sums`` is paired with zero: it has none in the tree, or the result is not used.
    """
    sums = torch.nn.functional.pad(sums, (first % 2, 0))
    sums = torch.nn.functional.pad(sums, (0, sums.numel() % 2))
    return sums[0::2] + sums[1::2]


def norm_of(nodes: Mapping[Node, float], count: int) -> float:
    """Return the norm of a parameter. Args: nodes: Sums of subtrees that cover all blocks. count: Number of blocks."""
    if not count:
        return 0.0
    known, level = dict(nodes), 0
    while count > 1:
        for index in range(0, count, 2):
            if (level, index) in known:
                right = known.get((level, index + 1), 0.0)
                known[level + 1, index // 2] = known[level, index] + right
        count, level = -(-count // 2), level + 1
    return math.sqrt(known[level, 0])
