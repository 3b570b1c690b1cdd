"""Rows of a batch: tensors cut along their first dimension, as if each piece had come alone, and joined again.

[Note: as if alone] Kernels are chosen by the strides and the alignment of their arguments, and round differently. So a
piece has the strides that a batch of its rows would have, and begins where an allocator would let it, or else gets
memory of its own. The same holds for gradients on their way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from outcore.core.quantities import ALIGN_BYTES


def sizes_of(rows: int, count: int) -> list[int]:
    """Return the rows of each piece, as ``torch.chunk`` cuts: equal but for the last. Args: count: Pieces at most."""
    size = max(1, -(-rows // count))
    return [min(size, rows - start) for start in range(0, rows, size)]


def rows_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many rows a call's arguments have: those of the first with rows, preferably one with a gradient."""
    with_rows = [t for t in tensors if t.dim()]
    return next((len(t) for t in sorted(with_rows, key=lambda t: not t.requires_grad)), 1)


def has_rows(tensor: torch.Tensor, rows: int) -> bool:
    """Return whether an argument has a row for each row of the batch."""
    return tensor.dim() > 0 and len(tensor) == rows


def cut_rows(tensor: torch.Tensor, sizes: Sequence[int], *, are_own: bool) -> Sequence[torch.Tensor]:
    """Cut a tensor along its rows.

    Args:
        tensor: A tensor with a row for each row of the batch.
        sizes: Rows of each piece; together all rows.
        are_own: Whether each piece gets memory of its own, unless the tensor is expanded.
    """
    found: Sequence[torch.Tensor] = _Cut.apply(tensor, sizes, are_own)
    return found


class Whole:
    """Puts pieces of a result one after another, in memory laid out as the result of the whole batch would be."""

    def __init__(self, first: torch.Tensor, sizes: Sequence[int]) -> None:
        """Args: first: A piece; it may have several rows for each row of the batch. sizes: Rows of every piece."""
        self._per_row = len(first) // sizes[0]
        self._sizes = [n * self._per_row for n in sizes]
        self._shape, self._end = first.shape[1:], 0
        order = sorted(range(first.dim()), key=first.stride, reverse=True)  # equal ones stay in order
        shape = (sum(self._sizes), *self._shape)
        memory = first.new_empty([shape[i] for i in order])
        self._memory = memory.permute([order.index(i) for i in range(first.dim())])
        self._parts: list[torch.Tensor] = []

    def put(self, part: torch.Tensor) -> torch.Tensor | None:
        """Copy the next piece. Its own memory is not needed any more.

        Returns:
            The tensor that stands for it in the graph; None if the piece does not have the expected shape.
        """
        size = self._sizes[len(self._parts)]
        if part.shape != (size, *self._shape):
            return None
        place = self._memory[self._end : self._end + size]
        self._parts.append(_Put.apply(part, [place]))
        self._end += size
        return self._parts[-1]

    def joined(self) -> torch.Tensor:
        """Return the whole, once all pieces have been put."""
        found: torch.Tensor = _Join.apply([self._memory], self._sizes, *self._parts)
        return found


def _pieces(tensor: torch.Tensor, sizes: Sequence[int], *, are_own: bool) -> tuple[torch.Tensor, ...]:
    parts = [part.detach() for part in tensor.split(sizes)]  # shares its version, so changes in place are noticed
    if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return tuple(parts)
    first = tensor.storage_offset()
    at = [(part.storage_offset() - first) * part.element_size() % ALIGN_BYTES for part in parts]
    return tuple(part.clone() if are_own or offset else part for part, offset in zip(parts, at, strict=True))


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sizes: Sequence[int], are_own: bool) -> Any:  # noqa: FBT001
        ctx.sizes, ctx.shape = sizes, tensor.shape[1:]
        ctx.set_materialize_grads(False)
        return _pieces(tensor, sizes, are_own=are_own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        some = next((grad for grad in grads if grad is not None), None)
        if some is None:
            return None, None, None
        pairs = zip(grads, ctx.sizes, strict=True)
        parts = [some.new_zeros((n, *ctx.shape)) if grad is None else grad for grad, n in pairs]
        whole = Whole(parts[0], ctx.sizes)
        for part in parts:
            whole.put(part)
        return whole.joined(), None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, place: Sequence[torch.Tensor]) -> torch.Tensor:
        place[0].copy_(part)
        return part.new_empty(()).expand(part.shape)  # stands for the piece in the graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: Sequence[torch.Tensor], sizes: Sequence[int], *parts: torch.Tensor) -> torch.Tensor:
        ctx.sizes = sizes
        ctx.set_materialize_grads(False)
        return memory[0].data  # not a view, which could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return (None,) * (2 + len(ctx.sizes))
        return (None, None, *_pieces(grad, ctx.sizes, are_own=False))
