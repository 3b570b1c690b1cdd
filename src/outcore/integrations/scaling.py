"""fp16 under a Trainer: Accelerate's gradient scaler around the steps of a prepared optimizer.

Accelerate would wrap the optimizer for that. Ours stays what ``trainer.optimizer`` is, so its ``step`` does what the
wrapper's would.

[Note: the scale of several ranks] A Trainer's losses are as many times larger on R ranks as there are ranks, and
gradients are averaged. So the scale is so many times smaller: then gradients are those of one rank with R times the
accumulation, and overflow with them. What is saved is the scale of one rank.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from outcore.runtime.optimizer import StreamedOptimizer


def share_scale(scaler: torch.amp.GradScaler, num_ranks: int) -> None:
    """Let the scale be that of one of several ranks. See [Note: the scale of several ranks]."""
    if num_ranks == 1 or not scaler.is_enabled():
        return
    factor = 2.0 ** (num_ranks - 1).bit_length()  # a scale is a power of two, so that nothing is rounded
    state, load = scaler.state_dict, scaler.load_state_dict

    def saved() -> dict[str, Any]:
        found = state()
        return {**found, "scale": found["scale"] * factor}

    def load_saved(state_dict: dict[str, Any]) -> None:
        load({**state_dict, "scale": state_dict["scale"] / factor})

    load_saved(state())
    scaler.state_dict = saved  # type: ignore[method-assign]
    scaler.load_state_dict = load_saved  # type: ignore[method-assign]


def step_with(scaler: torch.amp.GradScaler, optimizer: StreamedOptimizer) -> None:
    """Let ``optimizer.step()`` be a step of the scaler, and adapt its scale."""
    plain = optimizer.step

    def step(self: StreamedOptimizer, closure: Any = None) -> Any:
        outer = self.step  # a scheduler may have wrapped this function
        self.step = plain  # type: ignore[method-assign]
        try:
            result = scaler.step(self) if closure is None else scaler.step(self, closure)
            scaler.update()
        finally:
            self.step = outer  # type: ignore[method-assign]
        return result

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
