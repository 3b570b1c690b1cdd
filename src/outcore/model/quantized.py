"""Quantised weights of other libraries: parameters whose bytes only these libraries read, and what belongs to them.

[Note: quantised] With bitsandbytes a quantised weight is a frozen parameter of packed bytes, and further tensors that
say what the bytes mean (largest values of blocks, code books). With other libraries it is a wrapper around all of them
([Note: wrapped]). To outcore they are bytes of the unit: the packed parameter as it is, and each further tensor as a
frozen parameter in the place where the library looks for it. So they move, rest and come back as other weights do, and
the library's own kernels read them where they are at the time.

In bitsandbytes, autograd functions save for backward the packed parameter itself, or a view of all of it. For the view,
``view`` returns the parameter, so a graph that is kept finds the bytes wherever the unit's slot is by then.
"""

from __future__ import annotations

import copy
import functools
import sys
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import Parameter

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.model import wrapped
from outcore.model.wrapped import Wrapping, is_wrapped, memory_of

_KINDS = ("Params4bit", "Int8Params")
_STATES = {"absmax": "absmax", "quant_map": "code"}
_REPACKS = "support_avx512bf16_for_cpu"
"""Attribute of a layer that repacks its weight in evaluation."""
_CHANGED = ("state", "compute_dtype", "compute_type_is_set", _REPACKS)
"""Attributes of a layer that a forward changes, or is kept from changing."""
_PIECE = 2**20
"""Elements that are quantised at a time: whole blocks, of any block size."""
FULL_CHECKSUM = "_outcore_full_checksum"
"""Attribute of a quantised weight: the ``full_checksum`` of the weight that it was made from."""
_SAMPLED = 2048
FULL_DTYPE = "_outcore_full_dtype"
"""Attribute of a module on the meta device: the dtype of the weight that will be quantised."""
WRAPPER = "wrapper"
"""Name under which ``Quantized.unpack`` gets a wrapper from a checkpoint, with all that is inside."""
QUANTIZER = "_outcore_quantizer"
"""Attribute of a wrapper on the meta device: a function that makes such a wrapper of a weight in full precision."""


class TensorLocation(NamedTuple):
    """Where the library looks for a further tensor."""

    name: str
    """What follows the name of the weight in the library's ``state_dict``."""
    holder: Any
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        found: torch.Tensor = getattr(self.holder, self.attribute)
        return found

    def put(self, tensor: torch.Tensor | None) -> None:
        """Put another tensor there."""
        setattr(self.holder, self.attribute, tensor)


@dataclass(frozen=True, eq=False)
class Quantized:
    """One quantised weight."""

    name: str
    """The fully qualified name of the weight."""
    module: nn.Module
    param: Any
    places: tuple[TensorLocation, ...]
    parts: tuple[Parameter, ...]
    """The tensors of the places, as frozen parameters."""

    @property
    def named(self) -> list[tuple[str, Parameter]]:
        """All that has bytes, with names: the weight, unless it only wraps its parts, and the parts."""
        parts = [(f"{self.name}.{place.name}", part) for place, part in zip(self.places, self.parts, strict=True)]
        return parts if is_wrapped(self.param) else [(self.name, self.param), *parts]

    def take_over(self, device: torch.device) -> None:
        """Put the parts in their places, and keep the library from repacking them.

        Args:
            device: The device that will compute. A wrapper then says that it is there.
        """
        if is_wrapped(self.param):
            if self.param.device != device:
                like = (torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=device) for p in self.parts)
                wrapped.replace(self.param, like)
        elif kind_of(self.param) == "Int8Params":
            if self.param.CB is not None:
                self.module.init_8bit_state()  # type: ignore[operator]  # as the first forward does
            self.module.state.CB = self.param  # type: ignore[union-attr]
        else:
            _refuse_other_backward()
            self.module.__dict__[_REPACKS] = False  # in evaluation, permanently
        for place, part in zip(places_of(self.module, self.param), self.parts, strict=True):
            place.put(part)

    def follow(self, own: dict[str, torch.Tensor], undo: ExitStack) -> dict[str, torch.Tensor]:
        """Give a fake tensor that stands for the weight all that the library looks for.

        Args:
            own: Fake tensors of parameters, by name. That of a wrapper is replaced.
            undo: Gets callbacks that restore the layer.

        Returns:
            Fake tensors of the parts, by name.
        """
        module, weight = self.module.__dict__, cast("Any", own[self.name])
        where = weight.device
        fakes = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=where) for p in self.parts]
        names = [f"{self.name}.{place.name}" for place in self.places]
        if is_wrapped(self.param):
            own[self.name] = Wrapping(self.param).around(fakes)
            return dict(zip(names, fakes, strict=True))
        undo.callback(module.update, {key: module[key] for key in _CHANGED if key in module})
        if kind_of(self.param) == "Int8Params":
            module["state"] = copy.copy(module["state"])
            module["state"].CB, module["state"].SCB = weight, fakes[0]
            weight.CB = weight.SCB = None
        else:
            module[_REPACKS] = False
            weight.quant_state = state = copy.copy(self.param.quant_state)
            if state.nested:
                state.state2 = copy.copy(state.state2)
            for place, fake in zip(_places_of_state(state), fakes, strict=True):
                place.put(fake)
        return dict(zip(names, fakes, strict=True))

    def quantize(self, value: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
        """Make the tensors of ``named`` from a weight in full precision, on a device, with the library's kernels.

        Memory: on the device, twice the quantised weight, since its pieces are joined, and what the library takes for a
        million elements: some 20 bytes for each on the CPU. A wrapper is made from a whole weight at a time.
        """
        if is_wrapped(self.param):
            return wrapped.tensors_in(getattr(self.param, QUANTIZER)(value.to(device)))
        if issubclass(getattr(self.module, "source_cls", nn.Linear), _transposed()):
            value = value.T
        if kind_of(self.param) == "Int8Params":
            return _to_8_bits(value, getattr(self.module, FULL_DTYPE, torch.float16), device)
        return _to_4_bits(value, self.param, device)

    def refuse_unknown(self) -> None:
        """Raise if it is not known how another weight in full precision becomes one like this.

        Raises:
            ConfigError: The weight is a wrapper that ``outcore.quantized`` did not make.
        """
        if is_wrapped(self.param) and not hasattr(self.param, QUANTIZER):
            raise ConfigError(
                f"expected no weights= for a model that has its values, but weights= has one for '{self.name}', and "
                f"nothing says how it becomes a {type(self.param).__qualname__}; leave weights= out, or build the "
                "model on the meta device and pass it through outcore.quantized()"
            )

    def unpack(self, read: Callable[[], torch.Tensor], known: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of ``named`` from a checkpoint.

        Args:
            read: Reads the packed weight.
            known: What belongs to it, by the library's own names.
        """
        if WRAPPER in known:
            return wrapped.tensors_in(known[WRAPPER])
        packed = read()
        if kind_of(self.param) == "Int8Params":
            return [packed, known["SCB"]]
        from bitsandbytes.functional import QuantState

        state = QuantState.from_dict(dict(known), torch.device("cpu"))
        self.param.quant_state.dtype = state.dtype  # of the weight before it was quantised
        return [packed, *(place.tensor for place in _places_of_state(state))]


def full_checksum(value: torch.Tensor) -> int:
    """Return a checksum of a sample of a weight as bf16: the same for all dtypes that give the same bf16 values."""
    flat = value.detach().reshape(-1)
    count = min(flat.numel(), _SAMPLED)
    sample = flat.narrow(0, (flat.numel() - count) // 2, count).to("cpu", torch.bfloat16, copy=True)
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes())


def _to_8_bits(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Quantise row by row. Args: dtype: The dtype of the model, to which values are rounded first."""
    from bitsandbytes import functional

    made = []
    for rows in value.split(max(_PIECE // value.shape[1], 1)):
        made.append(functional.int8_vectorwise_quant(rows.to(device, dtype).to(torch.float16).contiguous())[:2])
    return [torch.cat(parts) for parts in zip(*made, strict=True)]


def _to_4_bits(value: torch.Tensor, like: Any, device: torch.device) -> list[torch.Tensor]:
    """Quantise block by block. The largest values of blocks are joined; if nested, they are quantised together."""
    from bitsandbytes import functional

    known, made = like.quant_state, []
    for piece in value.reshape(-1).split(_PIECE):
        made.append(
            functional.quantize_4bit(
                piece.to(device, known.dtype),
                blocksize=known.blocksize,
                quant_type=known.quant_type,
                quant_storage=like.quant_storage,
            )
        )
    state = made[0][1]
    state.absmax = torch.cat([state.absmax for _, state in made])
    if known.nested:
        state.offset, state.nested = state.absmax.mean(), True
        scales = state.absmax - state.offset
        state.absmax, state.state2 = functional.quantize_blockwise(scales, blocksize=known.state2.blocksize)
    return [torch.cat([packed for packed, _ in made]), *(place.tensor for place in _places_of_state(state))]


@functools.cache
def _refuse_other_backward() -> None:
    """Raise if backward does not read a weight where it is by then, as another version of the library might do."""
    import bitsandbytes

    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(mode=False):
        layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, device="cpu").to("cpu")
        weight, x = layer.weight, torch.ones(1, 64, device="cpu", requires_grad=True)
        weight.__class__ = present_class(weight)
        [want] = torch.autograd.grad(layer(x).sum(), x)
        made, before = layer(x).sum(), weight.data
        weight.data = before.clone()
        before.zero_()
        [found] = torch.autograd.grad(made, x)
    if not torch.equal(found, want):
        raise UnsupportedError(
            f"expected a bitsandbytes whose backward reads weights where they are, but "
            f"{bitsandbytes.__version__} keeps others; install 0.50, or load the model in bf16"
        )


def is_quantized(param: torch.Tensor) -> bool:
    """Return whether a parameter is a quantised weight. Imports nothing."""
    return is_wrapped(param) or bool(kind_of(param))


def kind_of(param: torch.Tensor) -> str:
    """Return ``Params4bit`` or ``Int8Params`` for weights of bitsandbytes, and an empty string for others."""
    if "bitsandbytes" not in sys.modules:
        return ""
    names = [kind.__name__ for kind in type(param).__mro__ if kind.__module__.startswith("bitsandbytes.")]
    return next((name for name in names if name in _KINDS), "")


def quantized_weights(model: nn.Module) -> Iterator[Quantized]:
    """Yield all quantised weights of a model, each once. What wrappers share with others is one parameter for all."""
    seen: set[int] = set()
    ordinary = (p for p in model.parameters() if not is_quantized(p))
    shared: dict[Hashable, Parameter] = {memory_of(p): p for p in ordinary if not p.requires_grad}
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None and is_quantized(param) and id(param) not in seen:
                seen.add(id(param))
                places = tuple(places_of(module, param))
                made = [_as_parameter(place.tensor) for place in places]
                if is_wrapped(param):
                    made = [shared.setdefault(memory_of(part), part) for part in made]
                parts = tuple(made)
                yield Quantized(f"{prefix}.{key}" if prefix else key, module, param, places, parts)


def places_of(module: nn.Module, param: Any) -> Iterator[TensorLocation]:
    """Yield the places of the further tensors of a quantised weight."""
    if is_wrapped(param):
        yield from (TensorLocation(*inner) for inner in wrapped.inner_of(param))
    elif kind_of(param) == "Int8Params":
        yield TensorLocation("SCB", module.state if param.CB is None else param, "SCB")
    else:
        yield from _places_of_state(param.quant_state)


def _places_of_state(state: Any) -> Iterator[TensorLocation]:
    for name, attribute in _STATES.items():
        yield TensorLocation(name, state, attribute)
    if state.nested:
        for name, attribute in _STATES.items():
            yield TensorLocation(f"nested_{name}", state.state2, attribute)
        yield TensorLocation("nested_offset", state, "offset")


def _as_parameter(tensor: torch.Tensor) -> Parameter:
    return tensor if isinstance(tensor, Parameter) else Parameter(tensor.detach(), requires_grad=False)


def refuse_unusable(name: str, module: nn.Module, param: Any) -> None:
    """Refuse weights of bitsandbytes without a lasting quantised form; for wrappers see ``wrapped.refuse_unusable``.

    Raises:
        UnsupportedError: The weight cannot be used; the message names it.
    """
    if is_wrapped(param):
        wrapped.refuse_unusable(name, param)
        return
    if kind_of(param) == "Int8Params":
        if param.has_fp16_weights:
            raise UnsupportedError(
                f"expected weights that stay quantised, but '{name}' has has_fp16_weights=True and is quantised anew "
                "in every forward; build its layer with has_fp16_weights=False, and train adapters"
            )
        is_ready = param.dtype == torch.int8 and next(places_of(module, param)).tensor is not None
    else:
        is_ready = param.bnb_quantized and param.quant_state is not None
        if getattr(param.quant_state, "packing_format_for_cpu", False):
            raise UnsupportedError(
                f"expected weights as they were quantised, but '{name}' was repacked by an evaluation on the CPU, "
                "after which bitsandbytes cannot train over it; load the model again, and prepare it unevaluated"
            )
        bias, computes_in = getattr(module, "bias", None), getattr(module, "compute_dtype", None)
        if bias is not None and bias.dtype != (computes_in or bias.dtype):
            raise UnsupportedError(
                f"expected a bias in the dtype that its layer computes in, but beside '{name}' it is {bias.dtype} and "
                f"bitsandbytes would replace it by {computes_in} in the first forward; load the model with "
                f"bnb_4bit_compute_dtype={bias.dtype}, or run one forward before outcore.prepare()"
            )
    if not is_ready:
        raise UnsupportedError(
            f"expected quantised weights, but '{name}' is not quantised yet; load the model with quantization_config=, "
            "or build it on the meta device and pass it through outcore.quantized()"
        )


def full_shape(module: nn.Module, param: Any) -> tuple[int, ...]:
    """Return the shape of a parameter before it was quantised, as checkpoints in full precision have it."""
    if not kind_of(param):
        return tuple(param.shape)
    shape = tuple(param.shape) if kind_of(param) == "Int8Params" else tuple(param.quant_state.shape)
    return shape[::-1] if issubclass(getattr(module, "source_cls", nn.Linear), _transposed()) else shape


def _transposed() -> Any:
    """Return the classes of layers whose weights are transposed."""
    library = sys.modules.get("transformers.pytorch_utils")
    return () if library is None else library.Conv1D


def give_back(
    module: Any,
    param: Any,
    values: Mapping[int, torch.Tensor],
    device: torch.device,
    moved: dict[tuple[int, torch.device], torch.Tensor],
) -> None:
    """Give the library tensors of its own again.

    Args:
        module: The module that has the weight.
        param: The weight; on the device, unless it is a wrapper.
        values: Values of parts, by the identity of the part.
        device: Where the parts go.
        moved: Values that were moved there already, by identity and device; they are shared. New ones are added.
    """
    places = list(places_of(module, param))
    there = [((id(place.tensor), device), values.get(id(place.tensor), place.tensor)) for place in places]
    own = [moved[key] if key in moved else moved.setdefault(key, value.to(device)) for key, value in there]
    if is_wrapped(param) and param.device != device:
        wrapped.replace(param, own)
        return
    for place, tensor in zip(places, own, strict=True):
        place.put(tensor)
    if kind_of(param) == "Int8Params":
        module.state.CB = param.data


def present_class(param: Parameter) -> type[Parameter]:
    """Return the class of a parameter while it has its bytes."""
    return _held_by_itself(type(param)) if kind_of(param) else Parameter


@functools.cache
def _held_by_itself(kind: type[Parameter]) -> type[Parameter]:
    """Return a subclass for weights that autograd holds by themselves: see [Note: quantised]."""

    def view(self: torch.Tensor, *shape: Any) -> torch.Tensor:
        return self if shape == (-1, 1) and self.shape[1:] == (1,) else kind.view(self, *shape)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.data.to(*args, **kwargs)  # what the state holds must be an ordinary tensor

    own = {"view": view} if kind.__name__ == "Params4bit" else {"to": to}
    return type(kind.__name__, (kind,), own)
