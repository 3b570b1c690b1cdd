"""Two devices: a model is wholly on the one that it was prepared for, whichever is current.

These tests are the first in their process: torch counts devices when the first backward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import simulator
import torch
from loop.rig import Tower, adamw, assert_same, plan_for, seen
from plans import prepare_for_test
from torch import nn

import outcore
from outcore.device.race import RaceChecker

pytestmark = pytest.mark.gpu
KINDS = ("device", "plain", "host", "disk")


@pytest.fixture(scope="module", autouse=True)
def _two_devices() -> Iterator[None]:
    with simulator.knobs(num_devices=2):
        yield


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: str) -> torch.Tensor:
    loss = model.loss(torch.arange(21, device=device).view(3, 7).add(number).remainder(31))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def made() -> nn.Module:
    torch.manual_seed(11)
    return Tower().train()


def run(kind: str, device: str, folder: Path) -> object:
    model = made()
    optimizer = adamw(model)
    options = {"plan": plan_for(model, optimizer, kind), "budget": outcore.Budget(disk=folder), "device": device}
    with prepare_for_test(model, optimizer, race_checker=RaceChecker(), **options) as (model, optimizer):
        torch.cuda.manual_seed_all(3)
        return seen([step(model, optimizer, i, device) for i in range(3)], model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_device_trains_as_the_first_and_takes_nothing_of_it(kind: str, tmp_path: Path) -> None:
    want = run(kind, "cuda:0", tmp_path)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    got = run(kind, "cuda:1", tmp_path)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.max_memory_allocated(0) == before
    assert_same(want, got)


def test_two_models_on_two_devices_in_turns(tmp_path: Path) -> None:
    want = run("host", "cuda:0", tmp_path)
    runs = []
    for device in ("cuda:0", "cuda:1"):
        model = made()
        optimizer = adamw(model)
        options = {"plan": plan_for(model, optimizer, "host"), "device": device}
        runs.append((*outcore.prepare(model, optimizer, **options), device))
    torch.cuda.manual_seed_all(3)
    losses = [[step(model, optimizer, i, device) for model, optimizer, device in runs] for i in range(3)]
    for (model, optimizer, _), mine in zip(runs, zip(*losses, strict=True), strict=True):
        assert_same(want, seen(list(mine), model, optimizer))
        outcore.close(model)
