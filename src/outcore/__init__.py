"""Out-of-core training for PyTorch: train models that do not fit on the device, to the same bits.

A plan decides where bytes live and when they move; it never changes the result. Start at ``prepare``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outcore import losses as losses
    from outcore.api import close, gathered, named_tensors, prepare, save_pretrained
    from outcore.checkpoint.save_and_load import load_checkpoint, save_checkpoint
    from outcore.checkpoint.weights.quantize import quantized
    from outcore.command.plan.from_python import plan
    from outcore.core.errors import (
        AbsentParameterError,
        ConfigError,
        DiskError,
        MemoryBudgetError,
        OutcoreError,
        PlanInfeasibleError,
        UnsupportedError,
    )
    from outcore.spec.budget import Budget
    from outcore.spec.plan import Plan

__all__ = [
    "AbsentParameterError",
    "Budget",
    "ConfigError",
    "DiskError",
    "MemoryBudgetError",
    "OutcoreError",
    "Plan",
    "PlanInfeasibleError",
    "UnsupportedError",
    "close",
    "gathered",
    "load_checkpoint",
    "named_tensors",
    "plan",
    "prepare",
    "quantized",
    "save_checkpoint",
    "save_pretrained",
]

_HOMES = {
    "Budget": "outcore.spec.budget",
    "Plan": "outcore.spec.plan",
    "load_checkpoint": "outcore.checkpoint.save_and_load",
    "plan": "outcore.command.plan.from_python",
    "quantized": "outcore.checkpoint.weights.quantize",
    "save_checkpoint": "outcore.checkpoint.save_and_load",
}


def __getattr__(name: str) -> object:
    """Import on first use, so that ``outcore --help`` does not wait for torch."""
    if name == "losses":
        return importlib.import_module("outcore.losses")
    if name not in __all__:
        raise AttributeError(f"module 'outcore' has no attribute '{name}'")
    home = _HOMES.get(name) or ("outcore.core.errors" if name.endswith("Error") else "outcore.api")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
