"""``outcore demo --fit``: the largest model of the demo's kind whose run is predicted to take three minutes here."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from outcore.api import plan_in_time
from outcore.command.demo import plain_loop
from outcore.core.errors import ConfigError
from outcore.memory.machine import host_free_bytes
from outcore.preparation.forecast import NamedHardware
from outcore.preparation.prepare_options import Options
from outcore.spec.budget import Budget
from outcore.spec.model import Precision

MOST_S = 180.0
BESIDE = 60
"""Steps that take about as long as the comparison with the plain loop, the sample and the loss on unseen text."""
# Per parameter: weight, accumulated gradient, master weight (for fp32 the weight itself) and two moments.
STATE_BYTES = 2 + 4 + 4 + 8 if plain_loop.DTYPE == torch.bfloat16 else 4 + 4 + 8
PRECISION: Precision = "bf16" if plain_loop.DTYPE == torch.bfloat16 else "fp32"
DEVICE_FRACTION, HOST_FRACTION = 0.1, 0.85  # of all training state; what does not fit goes to disk
_SHAPES = (
    *((192, 8), (256, 8), (384, 8), (384, 12), (512, 12), (640, 12), (768, 12), (768, 16), (1024, 16), (1024, 24)),
    *((1280, 24), (1536, 24), (2048, 24), (2048, 32), (2560, 32), (3072, 32), (4096, 32), (5120, 40)),
)
"""Channels and layers, the smallest first."""


class FittingModel(NamedTuple):
    """A model's sizes, and how long one step of it is predicted to take."""

    sizes: Mapping[str, int]
    step_s: float

    def run_s(self, steps: int) -> float:
        """Return the predicted seconds of a whole demo."""
        return self.step_s * (steps + BESIDE)


def budget_of(num_params: int, folder: Path) -> Budget:
    """Return a budget so small that every tier is used."""
    nbytes = STATE_BYTES * num_params
    return Budget(device=int(DEVICE_FRACTION * nbytes), host=int(HOST_FRACTION * nbytes), disk=folder)


def largest(steps: int, device: str | None, folder: Path) -> FittingModel:
    """Return the largest model that trains so many steps in time; the smallest one, if none does.

    Raises:
        ConfigError: No times are predicted.
    """
    room = [shape for shape in _SHAPES if 2 * STATE_BYTES * _params(shape) <= host_free_bytes()] or _SHAPES[:1]
    found: dict[int, FittingModel] = {}

    def is_too_long(i: int) -> bool:
        found[i] = _predicted(room[i], device, folder)
        return found[i].run_s(steps) > MOST_S

    number = max(bisect.bisect_left(range(len(room)), 1, key=is_too_long) - 1, 0)
    return found[number] if number in found else _predicted(room[number], device, folder)


def _sizes(shape: Sequence[int]) -> dict[str, int]:
    hidden, layers = shape
    heads = max(4, hidden // 64)
    return {
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }


def _params(shape: Sequence[int]) -> int:
    hidden, layers = shape
    return layers * 12 * hidden**2 + 2 * plain_loop.VOCABULARY * hidden


def sample() -> dict[str, torch.Tensor]:
    """Return a batch of the demo."""
    ids = torch.zeros(plain_loop.BATCH_SIZE, plain_loop.SEQUENCE, dtype=torch.long, device="cpu")
    return {"input_ids": ids, "labels": ids}


def _predicted(
    shape: Sequence[int], device: str | None, folder: Path, *, hardware: NamedHardware | None = None
) -> FittingModel:
    with torch.device("meta"):
        model = plain_loop.build(seed=0, **_sizes(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=plain_loop.LR)
    budget = budget_of(sum(p.numel() for p in model.parameters()), folder)
    options = Options(budget=budget, precision=PRECISION, device=device, sample=sample(), hardware=hardware)
    *_, steps = plan_in_time(model, optimizer, options)
    if steps is None:
        raise ConfigError(
            "outcore demo --fit: expected a machine whose speed is known, but it is not measured; run outcore probe, "
            "or leave --fit out"
        )
    return FittingModel(_sizes(shape), steps.step_s)
