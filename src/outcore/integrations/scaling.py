"""fp16 under a Trainer: Accelerate's gradient scaler around the steps of a prepared optimizer.

Accelerate would wrap the optimizer for that. Here ``trainer.optimizer`` stays the prepared optimizer, so its ``step``
does what the wrapper's would do.

[Note: the scale of several ranks] On R ranks, a Trainer's losses are R times as large, and gradients are averaged. So
the scale is divided by R rounded up to a power of two. Then gradients are those of one rank with R times the
accumulation, and overflow with them. The scale that is saved is that of one rank.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from outcore.engine.optimizer import StreamedOptimizer


def share_scale(scaler: torch.amp.GradScaler, num_ranks: int) -> None:
    """Adapt the scale to several ranks. See [Note: the scale of several ranks]."""
    if num_ranks == 1 or not scaler.is_enabled():
        return
    factor = 2.0 ** (num_ranks - 1).bit_length()  # scales are powers of two, so that nothing is rounded
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
    """Make ``optimizer.step()`` a step of the scaler, which then adapts its scale."""
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
