"""What autograd saves, packed: weights in slots by their place, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch

from outcore.core.errors import UnsupportedError
from outcore.runtime.unit.unit import Unit


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory; 0 where it has none of its own (sparse, wrapped by a transform)."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def without_values(tensors: Sequence[torch.Tensor]) -> None:
    """Let go of the memory of leaves: what backward needs of them was saved."""
    for leaf in tensors:
        if leaf.requires_grad and leaf.grad_fn is None:
            for tensor in (leaf, leaf._base):  # what it is a view of has the memory as well
                if tensor is not None:
                    let_go_of_values(tensor)


def let_go_of_values(tensor: torch.Tensor) -> None:
    """Its memory goes if nobody else has it. Shape, node and version stay."""
    tensor.data = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def drop_saved(where: str) -> Any:
    """Hooks under which nothing is saved: the graph serves only to tell what needs a gradient."""

    def unpack(_: None) -> NoReturn:
        raise UnsupportedError(escaped(where))

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack)


def save_weights_by_place(unit: Unit, where: str) -> Any:
    """Hooks under which a weight in a slot is saved as its place: the slot will hold another unit by then."""
    if unit.ledger.cut.is_resident or unit.device_buffer() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(*by_place(unit, where))


Pack = Callable[[torch.Tensor], Any]


def by_place(unit: Unit, where: str, *, keeps: bool = True) -> tuple[Pack, Callable[[Any], torch.Tensor]]:
    """The two hooks of ``save_weights_by_place``. Weights that live on the device are packed as other tensors are.

    Args:
        unit: Whose weights they are.
        where: For errors.
        keeps: Other tensors are kept; else nothing is given for them.
    """
    buffer = None if unit.ledger.cut.is_resident else unit.device_buffer()
    first = 0 if buffer is None else buffer.bytes.data_ptr()
    stop = 0 if buffer is None else first + unit.spec.weight_bytes

    def pack(tensor: torch.Tensor) -> Any:
        try:
            address = tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # it has no memory of its own, such as a sparse one
            address = 0
        if first <= address < stop:
            return Placed(address - first, tensor.dtype, tensor.size(), tensor.stride())
        if not keeps:
            return None
        return Kept(tensor.detach(), tensor._version)  # detached: a result would keep its own node alive

    def unpack(saved: Kept | Placed) -> torch.Tensor:
        if isinstance(saved, Kept):
            return saved.unchanged(where)
        now = unit.device_buffer()
        if not unit.presence.num_calls:
            raise UnsupportedError(escaped(where))
        if now is None:
            raise UnsupportedError(
                f"{where}: expected its backward outside of outcore.gathered(), or its forward inside too, "
                "but only backward is; policy keep saved its weights by their place on the device"
            )
        return saved.at(now.bytes)

    return pack, unpack


class Kept(NamedTuple):
    """A saved tensor that is no weight. Autograd itself checks versions only where nobody packs."""

    tensor: torch.Tensor
    version: int

    def unchanged(self, where: str) -> torch.Tensor:
        """The tensor. Raises: UnsupportedError: It was changed in place since."""
        if version_of(self.tensor) != self.version:
            raise UnsupportedError(changed(self.tensor.shape, where))
        return self.tensor


class Placed(NamedTuple):
    """A saved weight, or a view of one: where it is in the unit."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def at(self, memory: torch.Tensor) -> torch.Tensor:
        """Over the unit's bytes, wherever they are now."""
        start = (memory.storage_offset() + self.offset) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(
            memory.untyped_storage(), start, self.size, self.stride
        )


class Cast:
    """A weight as autocast casts it, or a view of that: made again in backward, where the weight is present."""

    __slots__ = ("dtype", "instead", "offset", "size", "stride", "tensor", "version", "weight")

    def __init__(self, tensor: torch.Tensor, weight: torch.Tensor) -> None:
        self.weight, self.version = weight, weight._version
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.tensor: torch.Tensor | None = tensor.detach()
        """Until the block has run, which may change the weight."""
        self.instead: Any = None
        """As what it was saved after all."""

    def again(self) -> torch.Tensor:
        """From the weight as it is now."""
        return self.weight.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


def changed(shape: Sequence[int], where: str) -> str:
    """The error where autograd would say the same of a saved tensor."""
    return (
        f"{where}: a tensor of shape {tuple(shape)} that its backward needs was changed in place after it was "
        "used; change a copy instead"
    )


def escaped(where: str) -> str:
    """The error where a gradient comes by a way that nobody follows. See [Note: ways in and out]."""
    return (
        f"{where}: expected gradients to come through its results, "
        "but one came by a tensor that the block stored elsewhere (an attribute, a list, a hook); "
        "return it from the block's forward"
    )
