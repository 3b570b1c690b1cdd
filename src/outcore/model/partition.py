"""Cut a model into units: modules that move as a whole, with the parameters of each. No bytes are touched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.quantities import PAGE_BYTES, PARAM_ALIGN_BYTES, align_up
from outcore.core.strides import is_dense, row_major
from outcore.model.quantized import Quantized, full_shape, is_quantized, quantized_weights, refuse_unusable
from outcore.model.unit_modules import find_units, output_embeddings, select_units
from outcore.model.wrapped import bytes_of, is_wrapped, memory_of, tensors_in
from outcore.spec.model import (
    PRECISIONS,
    TRAINED_DTYPES,
    MasterFormat,
    ModelSpec,
    ParamSpec,
    Precision,
    StateForm,
    UnitSpec,
)

_COMPUTE_DTYPE = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "pure_bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
}
_CHOSEN: tuple[Precision, ...] = ("bf16", "fp16", "fp64")
"""A model's precision is the first of these in whose dtype it has parameters to train, else ``fp32``."""


Keeps = Callable[[torch.Tensor, str], tuple[tuple[StateForm, ...], int, bool, float, float, MasterFormat]]
"""(parameter, dtype of its update) -> fields of its ``ParamSpec``: ``states``, ``temporary_bytes``, ``is_whole``,
``update_cost``, ``update_flops``, ``master_format``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A model cut into units: the description, and the objects that it describes in the same order."""

    spec: ModelSpec
    modules: tuple[nn.Module, ...]
    """The module of every unit; the model itself for the root."""
    params: tuple[tuple[nn.Parameter, ...], ...]
    """The parameters of every unit, in the order of ``UnitSpec.params``."""
    quantized: tuple[Quantized, ...] = ()
    """Quantised weights of other libraries, whose parts are among the parameters."""


def partition(
    model: nn.Module,
    *,
    units: Sequence[str | type] | None = None,
    state_names: Sequence[str] = (),
    keeps: Keeps | None = None,
    precision: Precision | None = None,
    micro_batches_in_unit: int = 1,
) -> Partition:
    """Cut a model into units.

    Args:
        model: Any module, on any device, also meta.
        units: Exactly these modules (see ``select_units``); None finds repeated blocks and large input embeddings.
        state_names: Optimizer states per trainable element, by torch's names, without master weights.
        keeps: Gives the states of each parameter, instead of ``state_names``. None: each parameter has all of these, of
            its own shape and in the dtype of its update.
        precision: The precision; None for ``choose_precision(model)``.
        micro_batches_in_unit: The number of pieces in which every unit runs a batch.

    Raises:
        ConfigError: A dtype or parameter cannot be trained, or ``units`` do not fit the model.
        UnsupportedError: Something changes weights behind the optimizer's back.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(f"precision: expected one of {', '.join(PRECISIONS)} or None, but got {precision!r}")
    _refuse_unusable(model)
    named = find_units(model) if units is None else select_units(model, units)
    modules = (model, *named.values())
    quantized = tuple(quantized_weights(model))
    owned = _owned_tensors(model, modules, quantized)
    full = {id(part): 0 for weight in quantized for part in weight.parts}
    full |= {id(weight.named[0][1]): math.prod(full_shape(weight.module, weight.param)) for weight in quantized}
    chosen = choose_precision(model)
    wanted = precision or chosen
    # fp32 adapters or norms on a bf16 model are intended: nothing is converted if the wanted dtype is already in use.
    is_so = _COMPUTE_DTYPE[wanted] == _COMPUTE_DTYPE[chosen] or (
        wanted != "fp32" and any(_is_in(p, wanted) for p in model.parameters() if not is_quantized(p))
    )
    dtype = None if is_so else _COMPUTE_DTYPE[wanted]
    kept = {id(tensor) for tensor in kept_in_fp32(model, dtype)}
    specs, params = [], []
    for name, (own, buffer_bytes) in zip(("", *named), owned, strict=True):
        own.sort(key=lambda item: not item[1].requires_grad)
        dtypes = ("float32" if id(p) in kept else dtype for _, p in own)
        described = tuple(
            _describe(n, p, wanted, to, full.get(id(p)), keeps) for (n, p), to in zip(own, dtypes, strict=True)
        )
        specs.append(UnitSpec(name=name, params=described, buffer_bytes=buffer_bytes, is_cut=micro_batches_in_unit > 1))
        params.append(tuple(p for _, p in own))
    if keeps is not None:
        forms = (form for unit in specs for param in unit.trainable for form in param.states or ())
        state_names = tuple(dict.fromkeys(form.name for form in forms))
    spec = ModelSpec(
        units=tuple(specs),
        state_names=tuple(state_names),
        precision=wanted,
        micro_batches_in_unit=micro_batches_in_unit,
    )
    return Partition(spec=spec, modules=modules, params=tuple(params), quantized=quantized)


def choose_precision(model: nn.Module) -> Precision:
    """Return the precision of a model: fp32 if all trained parameters are float32, else bf16, fp16 or fp64.

    If nothing is trained, all parameters count.
    """
    everything = [p for p in model.parameters() if not is_quantized(p)]
    params = [p for p in everything if p.requires_grad] or everything
    return next((name for name in _CHOSEN if any(_is_in(p, name) for p in params)), "fp32")


def _is_in(param: nn.Parameter, precision: Precision) -> bool:
    return str(param.dtype).removeprefix("torch.") == _COMPUTE_DTYPE[precision]


def _describe(
    name: str,
    param: nn.Parameter,
    precision: Precision,
    dtype: str | None,
    stands_for: int | None,
    keeps: Keeps | None,
) -> ParamSpec:
    own = str(param.dtype).removeprefix("torch.")
    compute = own if dtype is None or stands_for is not None else dtype
    update = compute if precision == "pure_bf16" or compute == "float64" else "float32"
    master: MasterFormat = "fp32"
    kept = (None, 0, False, 1.0, 0.0, master) if keeps is None or not param.requires_grad else keeps(param, update)
    if kept[5] == "compact" and precision != "bf16":
        raise ConfigError(
            f"optimizer: expected master_format 'fp32' with precision {precision}, but got 'compact' for '{name}', "
            "which is for bf16 weights with fp32 masters; leave it out, or choose precision bf16"
        )
    return ParamSpec(
        name=name,
        shape=tuple(param.shape),
        dtype=compute,
        update_dtype=update,
        requires_grad=param.requires_grad,
        stands_for=stands_for,
        strides=None if param.stride() == row_major(param.shape) else param.stride(),
        states=kept[0],
        temporary_bytes=kept[1],
        is_whole=kept[2],
        update_cost=kept[3],
        update_flops=kept[4],
        master_format=kept[5] if (compute, update) == ("bfloat16", "float32") else master,
    )


def _owned_tensors(
    model: nn.Module, modules: Sequence[nn.Module], quantized: Sequence[Quantized]
) -> list[tuple[list[tuple[str, nn.Parameter]], int]]:
    """Return each unit's named parameters and bytes of buffers. What several units reach belongs to the root."""
    owners: dict[int, set[int]] = {}
    _collect_owners(model, 0, {id(m): i for i, m in enumerate(modules)}, owners, set())
    for param in _read_outside(model):
        owners.setdefault(id(param), set()).add(0)
    params: list[list[tuple[str, nn.Parameter]]] = [[] for _ in modules]
    buffer_bytes = [0] * len(modules)
    everything = {id(param): {id(param): (name, param)} for name, param in model.named_parameters()}
    for weight in quantized:
        everything[id(weight.param)] = inside = {id(part): (name, part) for name, part in weight.named}
        for part in inside:
            owners[part] = owners.get(part, set()) | owners[id(weight.param)]
    listed: dict[int, tuple[str, nn.Parameter]] = {}
    for own in everything.values():  # what wrappers share is listed once, by its own name if any
        listed |= {part: everything.get(part, own)[part] for part in own if part not in listed}
    for part, item in listed.items():
        params[_owner(owners[part])].append(item)
    for buffer in model.buffers():
        buffer_bytes[_owner(owners[id(buffer)])] += align_up(bytes_of(buffer), PARAM_ALIGN_BYTES)
    return [(p, align_up(b, PAGE_BYTES)) for p, b in zip(params, buffer_bytes, strict=True)]


def _read_outside(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters that are read outside of their module's call: heads by fused losses, AdaLoRA's by its loss."""
    for head in output_embeddings(model):
        yield from head.parameters()
    for module in model.modules():
        if any(kind.__name__ == "AdaLoraLayer" for kind in type(module).__mro__):
            adapters = ("lora_A", "lora_B", "lora_E", "ranknum")
            yield from (p for n, p in module.named_parameters() if n.partition(".")[0] in adapters)


def _owner(units: set[int]) -> int:
    return next(iter(units)) if len(units) == 1 else 0


def _collect_owners(
    module: nn.Module, unit: int, index: dict[int, int], owners: dict[int, set[int]], seen: set[tuple[int, int]]
) -> None:
    """Collect for every tensor the units from which it is reached, along every path."""
    unit = index.get(id(module), unit)
    if (id(module), unit) in seen:
        return
    seen.add((id(module), unit))
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        owners.setdefault(id(tensor), set()).add(unit)
    for child in module.children():
        _collect_owners(child, unit, index, owners, seen)


def _refuse_unusable(model: nn.Module) -> None:
    _refuse_unstable(model)
    for name, param in model.named_parameters():
        _refuse_parameter(name, param)
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            if is_quantized(param):
                refuse_unusable(f"{name}.{key}", module, param)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _refuse_embedding(name, module)
    _refuse_overlap(model)


def _refuse_unstable(model: nn.Module) -> None:
    """Refuse modules that make their parameters anew whenever they are listed: no reference to these would last."""
    before, now = dict(model.named_parameters()), dict(model.named_parameters())
    name = next((name for name, param in before.items() if now.get(name) is not param), None)
    if name is not None:
        raise UnsupportedError(
            f"expected parameters that stay the same objects, but '{name}' is made anew whenever it is listed, as PEFT "
            "does with adapters on nn.MultiheadAttention, which it merges in every forward; leave that module out of "
            "target_modules"
        )


def _refuse_parameter(name: str, param: nn.Parameter) -> None:
    kind = type(param)
    if kind.__name__ == "AbsentParameter":
        raise ConfigError(
            f"expected a model with weights, but those of '{name}' are not inside it: it is prepared already "
            "(outcore.close() gives it back), or it was closed without its weights (load what was saved with "
            "from_pretrained, and prepare that)"
        )
    if param._post_accumulate_grad_hooks:
        raise UnsupportedError(
            f"expected no post-accumulate-grad hooks, but '{name}' has one, "
            "and its gradient leaves the device as soon as it is there; use register_hook, "
            "or act on p.grad between backward() and step()"
        )
    if isinstance(param, UninitializedParameter):
        raise ConfigError(
            f"expected parameters with a shape, but '{name}' is not initialized yet; "
            "run one forward pass of the lazy module first"
        )
    if is_quantized(param):
        return
    if kind is not nn.Parameter:
        raise UnsupportedError(
            f"expected torch.nn.Parameter, or a quantised weight of bitsandbytes or torchao, but '{name}' is "
            f"{kind.__module__}.{kind.__qualname__}; hand over the model before it is quantized, or load it with "
            "transformers.BitsAndBytesConfig (load_in_4bit, load_in_8bit) and train adapters"
        )
    if param.layout is not torch.strided or not param.is_leaf:
        raise UnsupportedError(
            f"expected dense leaf parameters, but '{name}' has layout {param.layout} and is_leaf={param.is_leaf}; "
            "replace it by torch.nn.Parameter(value.detach().to_dense())"
        )
    if not is_dense(param.shape, param.stride()):
        raise UnsupportedError(
            f"expected parameters whose elements lie in memory once and without gaps, but '{name}' of shape "
            f"{tuple(param.shape)} has strides {param.stride()}: it is expanded, or a part of a larger tensor; replace "
            "it by torch.nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)) before you build "
            "the optimizer"
        )
    if str(param.dtype).removeprefix("torch.") not in TRAINED_DTYPES:
        raise ConfigError(
            f"expected parameters of dtype {' or '.join(TRAINED_DTYPES)}, but '{name}' is {param.dtype}; "
            f"{_advice_on(param.dtype)}"
        )


def _advice_on(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "a conversion would drop its imaginary part: keep both parts in a real parameter (torch.view_as_real)"
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return "it is quantized, or nothing to train: load the model in full precision, or make it a buffer"
    return "convert it first, for example with model.to(torch.bfloat16)"


def _refuse_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.max_norm is not None:
        raise UnsupportedError(
            f"expected weights that only the optimizer changes, but embedding '{name}' renormalizes its own in forward "
            f"(max_norm={module.max_norm}); build it without max_norm"
        )
    if module.sparse and module.weight.requires_grad:
        raise UnsupportedError(
            f"expected dense gradients, but embedding '{name}' was built with sparse=True; build it with sparse=False"
        )


def _refuse_overlap(model: nn.Module) -> None:
    """Refuse parameters that share memory without being one object: they would be stored and updated apart.

    Tensors inside wrappers are frozen. They may be the same as any other frozen tensor.
    """
    ranges, known = [], set[Hashable]()
    for name, param in sorted(model.named_parameters(), key=lambda named: is_wrapped(named[1])):
        for tensor in tensors_in(param):
            memory = memory_of(tensor)
            if tensor.is_meta or not tensor.nbytes or (is_wrapped(param) and memory in known):
                continue
            if not param.requires_grad:
                known.add(memory)
            ranges.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
    reached: dict[str, tuple[int, str]] = {}
    for device, start, stop, name in sorted(ranges):
        other_stop, other_name = reached.get(device, (0, ""))
        if start < other_stop:
            raise ConfigError(
                f"expected parameters with memory of their own, but '{other_name}' and '{name}' overlap; tie them by "
                "assigning the same torch.nn.Parameter to both modules, or clone what is inside of a wrapper"
            )
        reached[device] = stop, name


_LISTS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("_keep_in_fp32_modules_strict",),
    "float16": ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
}


def kept_in_fp32(model: nn.Module, dtype: str | None) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers that stay in fp32 in a model of 16 bits, also of models inside wrappers.

    This is the rule of ``from_pretrained`` in Transformers. A model lists patterns of names, such as those of the
    routers of some mixtures of experts, and instances may change them.

    Args:
        model: Any module.
        dtype: Dtype of the rest of the model; None, or a dtype of more bits: nothing is kept.
    """
    patterns = [pattern for name in _LISTS.get(dtype or "", ()) for pattern in getattr(model, name, None) or ()]
    if not patterns:
        for child in model.children():
            yield from kept_in_fp32(child, dtype)
        return
    listed = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))
    for prefix, module in model.named_modules():
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            full = f"{prefix}.{name}".replace(".base_layer.", ".")  # as if no adapter were around the module
            is_saved = tensor is not None and name not in module._non_persistent_buffers_set
            if is_saved and tensor.is_floating_point() and listed.search(full.removeprefix(".")):
                yield tensor
