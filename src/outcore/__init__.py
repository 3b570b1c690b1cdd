"""Out-of-core training for PyTorch: train models that do not fit on the device, to the same bits.

A plan decides where bytes live and when they move; it never changes the result. Start at ``prepare``.
"""

from outcore.api import close, gathered, named_tensors, prepare, save_pretrained
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
    "named_tensors",
    "prepare",
    "save_pretrained",
]
