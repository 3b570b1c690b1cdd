"""Which implementation of attention a model runs: one of those that Transformers has, by its name there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from outcore.core.errors import ConfigError


def with_attention(name: str, build: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Build a model with an implementation of attention.

    Args:
        name: Name of the implementation.
        build: Builds a model with an implementation.

    Raises:
        ConfigError: There is none of that name, it is not installed, or the model cannot run with it here.
    """
    where, said = f"--attention '{name}'", "kernels from the hub are not run"
    if name == "flex_attention" and not torch.accelerator.is_available():
        raise ConfigError(
            f"{where}: expected an implementation that trains on the CPU, but this one has no backward there; take "
            "sdpa or eager"
        )
    if "/" not in name:
        try:
            model = build(name)
        except Exception as error:  # a missing package may raise anything
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        else:
            if model.config._attn_implementation == name:
                return model
            said = f"it takes {model.config._attn_implementation} in its place"
    raise ConfigError(
        f"{where}: expected an implementation that is installed and that this model has, but transformers says: "
        f"{said}; install what it asks for, or name another"
    )
