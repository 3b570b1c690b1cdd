"""Frozen weights that only wrap other tensors, in a class of another library, such as torchao's quantised weights.

[Note: wrapped] A wrapper has no memory of its own. torch asks its class what it is made of (``__tensor_flatten__``) and
how it is put together again (``__tensor_unflatten__``). Tensors inside are attributes, so bytes of a unit can take
their places, and the operations of the class read them where they are at the time.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from outcore.core.errors import UnsupportedError
from outcore.core.strides import is_dense
from outcore.spec.model import DTYPE_BYTES
from outcore.torch_private import is_wrapper, parts_of_coo

_OWN = (torch.Tensor, Parameter)
_PLACES = re.compile(r"device\(type='\w+'(, index=\d+)?\)| at 0x[0-9a-f]+")
"""Parts of a wrapper's ``repr`` that differ between processes and machines."""


def is_wrapped(tensor: Any) -> bool:
    """Return whether a tensor is a wrapper of another library. Torch's own wrappers shard, nest or trace."""
    kind = type(tensor)
    return kind not in _OWN and is_wrapper(tensor) and not kind.__module__.startswith("torch.")


class Inner(NamedTuple):
    """The place of a tensor inside a wrapper, or inside a wrapper in that."""

    name: str
    holder: Any
    attribute: str


def inner_of(wrapper: Any, prefix: str = "") -> Iterator[Inner]:
    """Yield all tensors inside, in the order in which ``Wrapping.around`` takes them."""
    for attribute in wrapper.__tensor_flatten__()[0]:
        found = getattr(wrapper, attribute)
        if is_wrapped(found):
            yield from inner_of(found, f"{prefix}{attribute}_")
        else:
            yield Inner(prefix + attribute, wrapper, attribute)


def tensors_in(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors inside a wrapper; for any other tensor, the tensor itself."""
    if not is_wrapped(tensor):
        return [tensor]
    return [getattr(inner.holder, inner.attribute) for inner in inner_of(tensor)]


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, also of one with sparse coordinates, for which torch has no ``nbytes``."""
    if tensor.layout is torch.sparse_coo:
        return sum(part.nbytes for part in parts_of_coo(tensor))
    return tensor.nbytes


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same elements in memory in the same order, and for no others."""
    if tensor.is_meta or not tensor.nbytes:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Wrapping:
    """A wrapper without the tensors inside."""

    def __init__(self, wrapper: Any) -> None:
        names, self._context = wrapper.__tensor_flatten__()
        self._kind, self._size, self._stride = type(wrapper), wrapper.size(), wrapper.stride()
        inside = ((name, getattr(wrapper, name)) for name in names)
        self._names = [(name, Wrapping(found) if is_wrapped(found) else None) for name, found in inside]

    def __str__(self) -> str:
        """Describe how the bytes inside are read. The text is the same wherever they are."""
        inside = ", ".join(f"{name}: {'a tensor' if within is None else within}" for name, within in self._names)
        said = _PLACES.sub("", repr(_plain(self._context)))
        return f"{self._kind.__module__}.{self._kind.__qualname__} around {inside}; {said}"

    def around(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Make the same wrapper around other tensors, on their device. Args: tensors: In the order of ``inner_of``."""
        left = iter(tensors)
        inner = {name: next(left) if within is None else within.around(left) for name, within in self._names}
        made = self._kind.__tensor_unflatten__(inner, self._context, self._size, self._stride)
        device = next(iter(inner.values())).device
        return made if made.device == device else made.to(device)  # some remember where they were


def _plain(context: Any) -> Any:
    """Replace tuples by lists, since files and libraries mix the two."""
    if isinstance(context, dict):
        return {key: _plain(value) for key, value in context.items()}
    return [_plain(each) for each in context] if isinstance(context, list | tuple) else context


def replace(wrapper: Parameter, tensors: Iterable[torch.Tensor]) -> None:
    """Put other tensors inside a wrapper, also on another device. It stays the same object."""
    made = Parameter(Wrapping(wrapper).around(tensors), requires_grad=False)
    made.__dict__.update({key: value for key, value in wrapper.__dict__.items() if key not in made.__dict__})
    torch.utils.swap_tensors(wrapper, made)


def refuse_unusable(name: str, wrapper: Parameter) -> None:
    """Refuse wrappers whose inside cannot be bytes of a unit.

    Raises:
        UnsupportedError: The wrapper cannot be used; the message names the weight, and what is not as expected.
    """
    kind = f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
    if wrapper.requires_grad:
        raise UnsupportedError(
            f"expected a frozen weight, since what is inside of a {kind} gets no gradient, but '{name}' is to be "
            "trained; call requires_grad_(False) and train adapters, or hand over the model before it is quantised"
        )
    for (part, *_), tensor in zip(inner_of(wrapper), tensors_in(wrapper), strict=True):
        if type(tensor) not in _OWN or tensor.layout is not torch.strided or tensor.requires_grad:
            problem = f"is {type(tensor).__qualname__} of layout {tensor.layout}, requires_grad={tensor.requires_grad}"
        elif str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            problem = f"is {tensor.dtype}"
        elif not is_dense(tensor.shape, tensor.stride()):
            problem = f"of shape {tuple(tensor.shape)} has gaps, or repeats itself (strides {tensor.stride()})"
        else:
            continue
        raise UnsupportedError(
            f"expected a {kind} around ordinary tensors that lie in memory once, of dtypes {', '.join(DTYPE_BYTES)}, "
            f"but '{part}' of '{name}' {problem}; quantise the model in another way, or hand it over unquantised"
        )
