"""Which implementation of attention a model runs: one of those that Transformers has, by its name there."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outcore.core.errors import ConfigError

_FOR_GENERATION = "paged|"


def with_attention(name: str, build: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Build a model with an implementation of attention.

    Args:
        name: Name of the implementation.
        build: Builds a model with an implementation.

    Raises:
        ConfigError: There is none of that name, it is not installed, or the model cannot run with it here.
    """
    known = ["eager", *(k for k in ALL_ATTENTION_FUNCTIONS.valid_keys() if not k.startswith(_FOR_GENERATION))]
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        raise ConfigError(
            f"--attention: expected one of {', '.join(sorted(known))}, but got '{name}'; "
            f"{f'did you mean {near[0]}?' if near else 'kernels from the hub are not run'}"
        )
    if name == "flex_attention" and not torch.accelerator.is_available():
        raise ConfigError(
            "--attention: expected an implementation that trains on the CPU, but got 'flex_attention', which has no "
            "backward there; take sdpa or eager"
        )
    try:
        model = build(name)
    except Exception as error:  # a missing package may raise anything
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"--attention '{name}': expected an implementation that is installed and that this model has, but "
            f"transformers says: {said}; install what it asks for, or name another: {', '.join(sorted(known))}"
        ) from error
    taken = model.config._attn_implementation
    if taken != name:
        raise ConfigError(
            f"--attention '{name}': expected an implementation that is installed and that this model has, but "
            f"transformers takes '{taken}' in its place; install it, or name another: {', '.join(sorted(known))}"
        )
    return model
