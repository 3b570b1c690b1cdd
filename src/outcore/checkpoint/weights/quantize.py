"""Making a model on the meta device a quantised one, whose weights are quantised one by one as they are read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.extra import refuse_missing
from outcore.core.quantities import format_bytes
from outcore.model.quantized import FULL_DTYPE, QUANTIZER, is_quantized, kind_of

_DIMENSIONS, _WORTH_SAYING = 2, 0.01
"""Dimensions of a linear layer's weight, and the part of all parameters above which others are worth a warning."""


def quantized(model: nn.Module, config: Any) -> nn.Module:
    """Make the linear layers of a model on the meta device quantised ones, as ``from_pretrained`` does.

    ``prepare(weights=...)`` then reads their weights one by one and quantises each as it is read, unless the checkpoint
    holds it quantised already.

    Args:
        model: A Transformers model on the meta device, without adapters; add these afterwards.
        config: ``BitsAndBytesConfig`` or ``TorchAoConfig``; for a checkpoint that is quantised already, its
            ``model.config.quantization_config``.

    Returns:
        The same model. A warning says if much of it stays as it is, such as stacked matrices of experts.

    Raises:
        ConfigError: The library is not installed, ``config`` is no such configuration, or the model is not a
            Transformers model on the meta device.
        UnsupportedError: The ``TorchAoConfig`` does not quantise all linear layers in one way.

    Memory: none.
    """
    from transformers import BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
    from transformers.quantizers import AutoHfQuantizer

    kinds = {"bitsandbytes": BitsAndBytesConfig, "torchao": TorchAoConfig}
    if isinstance(config, Mapping) and config.get("quant_method") in kinds:
        refuse_missing(config["quant_method"], extra="quantized" if config["quant_method"] == "bitsandbytes" else None)
        config = kinds[config["quant_method"]].from_dict(dict(config))
    is_of_bitsandbytes = isinstance(config, BitsAndBytesConfig) and (config.load_in_4bit or config.load_in_8bit)
    if not is_of_bitsandbytes and not isinstance(config, TorchAoConfig):
        raise ConfigError(
            "quantized: expected a BitsAndBytesConfig with load_in_4bit or load_in_8bit, or a TorchAoConfig, but got "
            f"{config!r:.200}"
        )
    if not isinstance(model, PreTrainedModel) or not all(p.is_meta for p in model.parameters()):
        raise ConfigError(
            f"quantized: expected a model of Transformers on the meta device, but got a {type(model).__name__} with "
            "values, or of another library; build it under torch.device('meta')"
        )
    if is_of_bitsandbytes:
        _make_tables()
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Parameter) and is_quantized(weight):
            _quantize_on_meta(module, weight, model.dtype)
        elif not is_of_bitsandbytes and quantizer.param_needs_quantization(model, f"{name}.weight"):
            _wrap_on_meta(module, config, model.dtype)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    _say_what_stays(model)
    return model


def _say_what_stays(model: nn.Module) -> None:
    """Warn of large weights in no linear layer: Transformers stacks the matrices of experts, for example."""
    stacked = {n: p for n, p in model.named_parameters() if p.dim() > _DIMENSIONS and not is_quantized(p)}
    nbytes, params = sum(p.nbytes for p in stacked.values()), sum(p.numel() for p in stacked.values())
    if params > sum(p.numel() for p in model.parameters()) * _WORTH_SAYING:
        first, *_ = stacked
        warnings.warn(
            f"quantized: only matrices of linear layers become smaller; {format_bytes(nbytes)} of others stay in "
            f"{str(model.dtype).removeprefix('torch.')}, such as '{first}'",
            stacklevel=3,
        )


def _make_tables() -> None:
    """Create the code books of bitsandbytes on the CPU: it caches them on the device that first needs them."""
    refuse_missing("bitsandbytes", extra="quantized")
    import bitsandbytes

    bitsandbytes.functional.quantize_4bit(torch.zeros(64, device="cpu"), compress_statistics=True)


def _wrap_on_meta(module: Any, config: Any, dtype: torch.dtype) -> None:
    from torchao.quantization import FqnToConfig

    way = config.get_apply_tensor_subclass()
    if isinstance(way, FqnToConfig) or config.include_input_output_embeddings:
        raise UnsupportedError(
            f"quantized: expected a TorchAoConfig with one way for all linear layers, but got {way!r:.200} with "
            f"include_input_output_embeddings={config.include_input_output_embeddings}; let from_pretrained quantise "
            "the model"
        )

    quantizer = partial(_wrapped, dtype=dtype, way=way)
    module.weight = quantizer(module.weight.detach())
    if is_quantized(module.weight):
        setattr(module.weight, QUANTIZER, quantizer)


def _wrapped(value: torch.Tensor, *, dtype: torch.dtype, way: Any) -> Any:
    from torchao.quantization import quantize_

    outputs, inputs = value.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = Parameter(value.to(dtype), requires_grad=False)
    quantize_(layer, way)
    return layer.weight


def _quantize_on_meta(module: Any, weight: Any, dtype: torch.dtype) -> None:
    import bitsandbytes

    if module.bias is not None:  # in torch's default dtype so far; the first forward would replace it by this one
        module.bias.data = module.bias.data.to(getattr(module, "compute_dtype", None) or dtype)
    full = torch.empty(weight.shape, dtype=dtype, device="meta")
    setattr(module, FULL_DTYPE, dtype)
    if kind_of(weight) == "Int8Params":
        packed, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(full.half())
        module.weight = bitsandbytes.nn.Int8Params(packed, requires_grad=False, CB=packed, SCB=scales)
        return
    packed, state = bitsandbytes.functional.quantize_4bit(
        full,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    known: Mapping[str, Any] = {"quant_state": state, "bnb_quantized": True}
    module.weight = bitsandbytes.nn.Params4bit(packed, requires_grad=False, **{**weight.__dict__, **known})
    module.quant_state = state
