"""fp16 under a Trainer: Accelerate's gradient scaler around the steps of a prepared optimizer.

Accelerate would wrap the optimizer for that. Ours stays what ``trainer.optimizer`` is, so its ``step`` does what the
wrapper's would.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from outcore.runtime.optimizer import StreamedOptimizer


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
