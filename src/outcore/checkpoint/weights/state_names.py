"""Where a model's tensors are: every place of every parameter and buffer, by the name that ``state_dict`` gives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn


class StatePlace(NamedTuple):
    """One place of a tensor; a tied tensor has several."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    is_buffer: bool
    is_persistent: bool


def places(model: nn.Module) -> Iterator[StatePlace]:
    """Yield all places in the order of ``state_dict``; non-persistent buffers stand among the others."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for key, param in module._parameters.items():
            if param is not None:
                yield StatePlace(dot + key, module, key, param, is_buffer=False, is_persistent=True)
        hidden = module._non_persistent_buffers_set
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield StatePlace(dot + key, module, key, buffer, is_buffer=True, is_persistent=key not in hidden)
