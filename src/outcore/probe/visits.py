"""Seconds that the engine takes per visit of a unit: a tiny model's step with the engine, minus its plain step."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from outcore.checkpoint.weights.model_values import FirstValues
from outcore.device.device import Device
from outcore.engine.engine import Engine, Promises
from outcore.engine.optimizer import StreamedOptimizer
from outcore.model.partition import partition
from outcore.optim.rules import rule_for
from outcore.planner.homes.pools import UnitHomes
from outcore.planner.search.plan_space import ALL_DEVICE, ALL_HOST, PlanSpace
from outcore.ranks.world import measuring

_UNITS, _WIDTH, _WARM_UP = 8, 16, 3
_LEAST_S = 1e-9  # 0 would say that a figure is not known


class VisitTimes(NamedTuple):
    """Seconds that a visit of a unit takes besides its computation."""

    on_host: float
    """With all of the unit's data in host memory."""
    on_device: float
    """With all of it on the device."""


def visit_times(open_device: Callable[[], Device], steps: int) -> VisitTimes:
    """Measure visits.

    Args:
        open_device: Opens the device, which is closed again.
        steps: Steps to time with each; their median counts.
    """
    with closing(open_device()) as device:
        plain_s = _step_s(*_model(device), device, steps)
    streamed_s = []
    for kind in (ALL_HOST, ALL_DEVICE):
        with closing(open_device()) as device:
            streamed_s.append(_streamed_s(device, kind, steps))
    return VisitTimes(*(max((s - plain_s) / (2 * _UNITS), _LEAST_S) for s in streamed_s))


def _streamed_s(device: Device, kind: UnitHomes, steps: int) -> float:
    """Time a step with the engine."""
    model, optimizer = _model(device)
    rule = rule_for(optimizer)
    cut = partition(model, units=[nn.Linear], keeps=rule.kept(optimizer.param_groups))
    choice = PlanSpace(cut.spec, policy="recompute", accumulation_steps=None, may_be_early=False)
    engine = Engine(cut, choice.plan(choice.uniform(kind)), device, [], rule, Promises())
    try:
        values = FirstValues(model, None)
        values.take_over(device.torch_device)
        engine.attach(values.of)
        with measuring():
            return _step_s(model, StreamedOptimizer(engine, optimizer), device, steps)
    finally:
        engine.close()


def _model(device: Device) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(_WIDTH, _WIDTH, device=device.torch_device, dtype=torch.float32) for _ in range(_UNITS)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _step_s(model: nn.Module, optimizer: torch.optim.Optimizer, device: Device, steps: int) -> float:
    batch = torch.ones(1, _WIDTH, dtype=torch.float32, device=device.torch_device)
    seconds = []
    for _ in range(_WARM_UP + steps):
        start_s = time.perf_counter()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        device.mark("probe").wait()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[_WARM_UP:])
