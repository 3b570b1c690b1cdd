"""Absent parameters: between calls of its unit a parameter answers questions about itself and refuses to be read.

The Python class is switched, not the object: module, optimizer and user keep the very same ``Parameter``. Its memory is
a zero-stride view of one NaN. So a read that bypasses the class, for example in C++ through a pointer, cannot look
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, Protocol, cast

import torch
from torch.nn import Parameter

from outcore.core.errors import AbsentParameterError, UnsupportedError
from outcore.ranks.world import refuse_process_group
from outcore.torch_private import as_it_is, plain_torch_function, without_torch_function


class AbsenceOwner(Protocol):
    """The object that knows where the bytes of an absent parameter are."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that train the model together."""

    def name_of(self, param: torch.Tensor) -> str:
        """Return the fully qualified name of a parameter."""

    def make_present(self) -> bool:
        """Give the parameters their values back if that needs no fetch, and return whether it did.

        No fetch is needed if the home is on the device and is only being written by an update.
        """

    def absence(self) -> str:
        """Return where the bytes are, for the error."""


def _getter(name: str) -> Callable[..., Any]:
    return cast("Callable[..., Any]", getattr(torch.Tensor, name).__get__)


_TENSOR: Any = torch.Tensor
_QUESTIONS = "shape dtype grad_dtype device requires_grad grad grad_fn ndim is_leaf layout is_sparse is_cuda is_cpu"
_QUESTIONS += " is_meta is_quantized is_nested itemsize nbytes _version is_mkldnn is_xpu is_mps _backward_hooks"
_QUESTIONS += " retains_grad output_nr _post_accumulate_grad_hooks"
METADATA: frozenset[Callable[..., Any]] = frozenset(
    [_getter(name) for name in _QUESTIONS.split()]
    + [_TENSOR.size, _TENSOR.numel, _TENSOR.nelement, _TENSOR.dim, _TENSOR.ndimension, _TENSOR.element_size]
    + [_TENSOR.is_floating_point, _TENSOR.is_complex, _TENSOR.__hash__, _TENSOR.__len__, _TENSOR.get_device]
    + [_TENSOR.grad.__set__, _TENSOR.grad.__delete__, _TENSOR.register_hook]
    + [_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__]  # units check requires_grad when it matters
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
_ASKED_OFTEN = "grad requires_grad shape dtype device _post_accumulate_grad_hooks"  # by loops, optimizers and outcore
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, _TENSOR.backward)
_DATA = _getter("data")


class AbsentParameter(Parameter):
    """A parameter whose bytes are not on the device.

    Never constructed; ``absent_class`` makes one subclass per owner.
    """

    owner: ClassVar[AbsenceOwner]

    @classmethod
    @as_it_is
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about metadata; otherwise become present or refuse."""
        kwargs = kwargs or {}
        if func in METADATA or _is_question(func, args, kwargs):
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _BACKWARDS:
            return _name_for_gradients(func, args, kwargs)
        if cls.owner.make_present():
            # Not func itself: the class that the parameter has now may watch reads of ``data``.
            return args[0].data if func == _DATA else func(*args, **kwargs)
        if func is _TENSOR.register_post_accumulate_grad_hook:
            raise UnsupportedError(
                f"expected no post-accumulate-grad hook on '{cls.owner.name_of(args[0])}', "
                "whose gradient leaves the device as soon as it is there; use register_hook, "
                "or act on p.grad between backward() and step()"
            )
        return _refuse(cls.owner, getattr(func, "__name__", str(func)), (*args, *kwargs.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy if the bytes are available, else refuse, since the copy would hold no values."""
        if self.owner.make_present():
            return Parameter.__deepcopy__(self, memo)
        return _refuse(self.owner, "copy.deepcopy", (self,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle if the bytes are available, else refuse."""
        if self.owner.make_present():
            return Parameter.__reduce_ex__(self, protocol)
        return _refuse(self.owner, "pickling", (self,))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return name and metadata in place of values."""
        return f"AbsentParameter('{self.owner.name_of(self)}', shape={tuple(self.shape)}, dtype={self.dtype})"


def _answered(name: str) -> property:
    """Return a property that answers a question directly, since ``__torch_function__`` takes seven times as long."""
    known = getattr(torch.Tensor, name)

    def ask(self: AbsentParameter) -> Any:
        with without_torch_function():
            return known.__get__(self)

    def change(self: AbsentParameter, value: Any) -> None:
        with without_torch_function():
            known.__set__(self, value)

    return property(ask, change if known.__set__ in METADATA else known.__set__, known.__delete__)


for _name in _ASKED_OFTEN.split():
    setattr(AbsentParameter, _name, _answered(_name))


class WatchedParameter(Parameter):
    """A parameter on the device whose master or home is elsewhere. It remembers if ``data`` was read or replaced.

    Through ``data`` it can be changed without a change of its version counter. All units share one class, since a
    compiled block checks the classes of its parameters.
    """

    touched: set[int]
    place: int
    __torch_function__ = plain_torch_function  # as torch's own Parameter

    @property
    def data(self) -> torch.Tensor:
        """The value without autograd history."""
        self.touched.add(self.place)
        return cast("torch.Tensor", _TENSOR.data.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.touched.add(self.place)
        _TENSOR.data.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Return an ordinary parameter with the same value."""
        copied = Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = copied
        return copied


def _is_question(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``type`` only asks: ``p.type()`` asks, ``p.type(dtype)`` converts."""
    return func is _TENSOR.type and len(args) == 1 and not kwargs


def absent_class(owner: AbsenceOwner) -> type[AbsentParameter]:
    """Return the class that parameters of ``owner`` have while they are absent."""
    return type("AbsentParameter", (AbsentParameter,), {"owner": owner, "__module__": __name__})


def of_kind(absent: type[AbsentParameter], kind: type[Parameter]) -> type[AbsentParameter]:
    """Return the class of absent parameters that have a library's own class, by which the library recognises them."""
    return absent if kind is Parameter else type(absent.__name__, (absent, kind), {"__module__": __name__})


def unfreezing_refusal(name: str) -> str:
    """Return the error for a parameter that is to be trained although no memory was taken for that."""
    return (
        f"expected '{name}' to stay frozen, as it was at outcore.prepare(), which took no memory for its gradient and "
        "states, but requires_grad was set to True; set requires_grad=True and add adapters before prepare, and freeze "
        "afterwards what is to begin frozen"
    )


def called_inside(where: str) -> str:
    """Return the error for a unit that another unit's forward calls."""
    return (
        f"{where}: expected to be called from outside of other units, but another unit's forward calls it, and a "
        "unit's own graph cannot hold another unit; give outcore.prepare(units=...) the modules that contain both"
    )


def _name_for_gradients(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a backward that computes gradients of absent parameters. It names the parameters but does not read them."""
    named = [
        p for p in _flat((*args, *kwargs.values())) if isinstance(p, AbsentParameter) and not p.owner.make_present()
    ]
    classes: list[type[Parameter]] = [type(p) for p in named]
    try:
        for param in named:
            param.__class__ = Parameter  # type: ignore[assignment]
        return func(*args, **kwargs)
    finally:
        for param, kind in zip(named, classes, strict=True):
            param.__class__ = kind  # type: ignore[assignment]


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _refuse(owner: AbsenceOwner, action: str, args: Any) -> NoReturn:
    param = next((a for a in _flat(args) if isinstance(a, AbsentParameter)), None)
    name = "?" if param is None else owner.name_of(param)
    refuse_process_group(f"'{name}'", owner.num_ranks)  # code that wraps or shards the model reads its parameters
    raise AbsentParameterError(
        f"expected a parameter on the device, but '{name}' is {owner.absence()} (asked for: {action}). "
        "Read or change it inside 'with outcore.gathered(model, write=...)', or stream all with "
        "outcore.named_tensors(model)"
    )
