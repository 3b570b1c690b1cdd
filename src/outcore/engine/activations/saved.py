"""How tensors that autograd saves are packed: weights in slots as their place, everything else as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch

from outcore.core.errors import UnsupportedError
from outcore.engine.unit.absent import METADATA
from outcore.engine.unit.unit import Unit
from outcore.model.wrapped import Wrapping, is_wrapped, tensors_in
from outcore.torch_private import without_torch_function


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own (sparse, wrapped by a transform)."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count this."""
    return 0 if tensor.is_inference() else tensor._version


def as_saved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors as autograd can save them: not inference tensors, whose changes it does not see."""
    if not any(map(torch.Tensor.is_inference, tensors)):
        return tensors
    return [t.detach().clone().requires_grad_(t.requires_grad) if t.is_inference() else t for t in tensors]


class StoredForm:
    """How a saved tensor lies in memory, so that it can be laid over a copy of that memory."""

    __slots__ = ("dtype", "is_conj", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, offset: int) -> None:
        """Args: offset: Place of its first element, in bytes."""
        self.dtype, self.size, self.stride, self.offset = tensor.dtype, tensor.size(), tensor.stride(), offset
        self.is_conj = tensor.is_conj()

    def again(self, memory: torch.Tensor) -> torch.Tensor:
        """Make the tensor again. Args: memory: 1D uint8; the offset counts from its start."""
        start = (memory.storage_offset() + self.offset) // self.dtype.itemsize
        found = torch.empty(0, dtype=self.dtype, device=memory.device).set_(
            memory.untyped_storage(), start, self.size, self.stride
        )
        return found.conj() if self.is_conj else found


class OffloadedArgument(torch.Tensor):
    """An argument inside of a block, after its memory has left. Only its metadata can be read."""

    of_unit: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse all functions but those that read metadata."""
        if func not in METADATA:
            raise UnsupportedError(
                f"{cls.of_unit}: expected backward to find the block's arguments through autograd, but a hook or a "
                "function reads one that it has held since forward, and its memory has left the device; hold a clone, "
                "call ctx.save_for_backward(), or give this unit the policy recompute in the plan"
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


def offloaded_argument_class(where: str) -> type[OffloadedArgument]:
    """Return the class of gone arguments of one unit. Args: where: For errors."""
    return type("OffloadedArgument", (OffloadedArgument,), {"of_unit": where, "__module__": __name__})


def without_values(tensors: Sequence[torch.Tensor], gone: type[OffloadedArgument]) -> None:
    """Free the memory of leaves: what backward needs of them was saved."""
    for leaf in tensors:
        if leaf.requires_grad and leaf.grad_fn is None and leaf.layout is torch.strided:
            for tensor in (leaf, leaf._base):  # the base of a view holds the memory as well
                if tensor is not None:
                    free_values(tensor)
            leaf.__class__ = gone


def free_values(tensor: torch.Tensor) -> None:
    """Free a tensor's memory, which goes if nothing else holds it. Shape, node and version stay."""
    tensor.data = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


KEEP = ", or is asked for inside of forward, for which a unit needs the policy keep in the plan"


def drop_saved(where: str) -> Any:
    """Return hooks under which nothing is saved: the graph serves only to tell what needs a gradient."""

    def unpack(_: None) -> NoReturn:
        raise UnsupportedError(escaped(where, KEEP))

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, unpack)


def save_weights_by_place(unit: Unit, where: str) -> Any:
    """Return hooks under which a weight in a slot is saved as its place: the slot may hold another unit by then."""
    if unit.ledger.cut.is_resident or unit.device_buffer() is None:
        return nullcontext()
    return hooks_on_saved(unit, *by_place(unit, where))


def slot_of(unit: Unit) -> range:
    """Return the addresses of a unit's weights in a slot; none if they live on the device."""
    buffer = None if unit.ledger.cut.is_resident else unit.device_buffer()
    if buffer is None:
        return range(0)
    first = buffer.bytes.data_ptr()
    return range(first, first + unit.spec.weight_bytes)


Pack = Callable[[torch.Tensor], Any]


def hooks_on_saved(unit: Unit, pack: Pack, unpack: Callable[[Any], torch.Tensor]) -> Any:
    """Return hooks that pack the tensors that autograd saves. Of a wrapped weight the tensors inside are packed."""
    if not unit.spec.is_quantized:
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def take_apart(tensor: torch.Tensor) -> Any:
        if is_wrapped(tensor):
            return SavedWrapper(Wrapping(tensor), [pack(inner) for inner in tensors_in(tensor)])
        return pack(tensor)

    def put_together(packed: Any) -> torch.Tensor:
        return packed.again(unpack) if type(packed) is SavedWrapper else unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(take_apart, put_together)


class SavedWrapper(NamedTuple):
    """A saved tensor that wraps others (a tensor subclass), taken apart."""

    wrapping: Wrapping
    tensors: list[Any]
    """The tensors inside, packed."""

    def again(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Make the wrapper again."""
        made: torch.Tensor = self.wrapping.around(map(unpack, self.tensors))
        return made


def by_place(unit: Unit, where: str, *, keeps: bool = True) -> tuple[Pack, Callable[[Any], torch.Tensor]]:
    """Return the two hooks of ``save_weights_by_place``. Weights that live on the device are packed like other tensors.

    Args:
        unit: The unit of the weights.
        where: For errors.
        keeps: Whether other tensors are kept; else None is returned for them.
    """
    return partial(_pack, slot_of(unit), keeps), partial(_unpack, unit, where)  # closures would hold themselves


def _pack(slot: range, keeps: bool, tensor: torch.Tensor) -> Any:  # noqa: FBT001
    if tensor.is_neg():  # a pending negation, which cannot be laid over memory like size and strides
        tensor = tensor.resolve_neg()
    try:
        address = tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # it has no memory of its own, such as a sparse tensor
        address = 0
    if address in slot:
        return SavedWeight(tensor, address - slot.start)
    if not address and is_wrapped(tensor):  # the block may have put it around a view of its weight
        return SavedWrapper(Wrapping(tensor), [_pack(slot, True, inner) for inner in tensors_in(tensor)])  # noqa: FBT003
    if not keeps:
        return None
    return KeptTensor(tensor.detach(), tensor._version)  # detached: a result would keep its own node alive


def _unpack(unit: Unit, where: str, saved: KeptTensor | SavedWeight | SavedWrapper) -> torch.Tensor:
    if isinstance(saved, KeptTensor):
        return saved.unchanged(where)
    if isinstance(saved, SavedWrapper):
        return saved.again(partial(_unpack, unit, where))
    return saved.again(_present_bytes(unit, where))


def _present_bytes(unit: Unit, where: str) -> torch.Tensor:
    now = unit.device_buffer()
    if not unit.presence.num_calls:
        raise UnsupportedError(escaped(where))
    if now is None:
        raise UnsupportedError(
            f"{where}: expected its backward outside of outcore.gathered(), or its forward inside too, "
            "but only backward is; policy keep saved its weights by their place on the device"
        )
    return now.bytes


class KeptTensor(NamedTuple):
    """A saved tensor that is no weight. Autograd itself checks versions only of tensors that are not packed."""

    tensor: torch.Tensor
    version: int

    def unchanged(self, where: str) -> torch.Tensor:
        """Return the tensor. Raises: UnsupportedError: It was changed in place since."""
        if version_of(self.tensor) != self.version:
            raise UnsupportedError(changed(self.tensor.shape, where))
        return self.tensor


class SavedWeight(StoredForm):
    """A saved weight, or a view of one: where it is in the unit's bytes, wherever those are."""

    __slots__ = ()


class SavedCast:
    """A weight as autocast casts it, or a view of that: made again in backward, where the weight is present."""

    __slots__ = ("dtype", "instead", "offset", "size", "stride", "tensor", "version", "weight")

    def __init__(self, tensor: torch.Tensor, weight: torch.Tensor) -> None:
        self.weight, self.version = weight, weight._version
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset()
        self.size, self.stride = tensor.size(), tensor.stride()
        self.tensor: torch.Tensor | None = tensor.detach()
        """The cast itself, until the block has run: the block may still change the weight."""
        self.instead: Any = None
        """The cast as it was saved after all, because the weight was changed."""

    def again(self) -> torch.Tensor:
        """Make the cast from the weight as it is now."""
        return self.weight.detach().to(self.dtype).as_strided(self.size, self.stride, self.offset)


def changed(shape: Sequence[int], where: str) -> str:
    """Return the error for a saved tensor that was changed; autograd itself would say the same."""
    return (
        f"{where}: a tensor of shape {tuple(shape)} that its backward needs was changed in place after it was "
        "used; change a copy instead"
    )


def escaped(where: str, or_else: str = "") -> str:
    """Return the error for a gradient that comes by a way that is not followed. See [Note: ways in and out]."""
    return (
        f"{where}: expected gradients to come through its results, "
        f"but one came by a tensor that the block stored elsewhere (an attribute, a list, a hook){or_else}; "
        "return it from the block's forward"
    )
