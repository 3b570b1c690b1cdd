"""Adapters on a model without weights, for planning: the same that the run's Trainer adds later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outcore.core.errors import ConfigError


def with_adapters(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Add adapters to a model, as TRL's trainers do.

    Args:
        model: A model on the meta device.
        fields: Fields of ``LoraConfig``.

    Raises:
        ConfigError: The rank is above all widths of the model, so adapters would be larger than their layers.
    """
    widest, rank = max(max(param.shape, default=0) for param in model.parameters()), fields["r"]
    if rank > widest:
        raise ConfigError(
            f"--lora: expected a rank of at most {widest:,}, the largest width of the model, but got {rank:,}; lower it"
        )
    from peft import LoraConfig, get_peft_model

    is_quantized = getattr(model, "is_quantized", False)
    adapted: nn.Module = get_peft_model(model, LoraConfig(**fields))
    if is_quantized:
        for name, param in adapted.named_parameters():
            if param.requires_grad and "lora_magnitude_vector" not in name:
                param.data = param.data.to(torch.bfloat16)
    return adapted
