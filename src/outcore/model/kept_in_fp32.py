"""Tensors that a model's library keeps in fp32 in a model of 16 bits, such as the routers of some mixtures of experts.

This is the rule of ``from_pretrained`` in Transformers. A model lists patterns of names, and instances may change them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import nn

_LISTS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("_keep_in_fp32_modules_strict",),
    "float16": ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
}


def kept_in_fp32(model: nn.Module, dtype: str | None) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers that stay in fp32, also of models inside wrappers.

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
