"""After a refusal, a reload or a change of mind the run goes on as a plain loop would."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore

from .rig import DEVICE

WIDTH = 33


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 3)).to(dtype)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    losses = []
    for _ in range(count):
        x = torch.randn(7, 5, generator=generator).to(next(model.parameters()).dtype)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def tight(model: nn.Module, folder: Path) -> outcore.Budget:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return outcore.Budget(device=2 * weights, host=20 * weights, disk=folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_the_first_states_again_begins_again(dtype, tmp_path):
    model = build(dtype)
    with outcore.prepare(model, adamw(model), budget=tight(model, tmp_path)) as (model, optimizer):
        first = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        once = steps(model, optimizer, 3)
        model.load_state_dict(first[0])
        optimizer.load_state_dict(first[1])
        assert steps(model, optimizer, 3) == once


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_masters_survive_loading_in_any_order(order, tmp_path):
    model = build(torch.bfloat16)
    with outcore.prepare(model, adamw(model), budget=tight(model, tmp_path)) as (model, optimizer):
        steps(model, optimizer, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        want = steps(model, optimizer, 2)
    model = build(torch.bfloat16)
    with outcore.prepare(model, adamw(model), budget=tight(model, tmp_path)) as (model, optimizer):
        if order == "model first":
            model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if order != "model first":
            model.load_state_dict(saved[0])
        assert steps(model, optimizer, 2) == want


def test_a_refused_step_changes_nothing(tmp_path):
    model, plain = build(), build()
    want = steps(plain, adamw(plain, fused=True), 3)
    with outcore.prepare(model, adamw(model), budget=tight(model, tmp_path)) as (model, optimizer):
        generator = torch.Generator(DEVICE).manual_seed(1)
        loss = model(torch.randn(7, 5, generator=generator)).square().mean()
        loss.backward()
        last = model[2].weight
        kept, last.grad = last.grad, torch.zeros_like(last)
        with pytest.raises(outcore.UnsupportedError, match=r"2\.weight"):
            optimizer.step()
        last.grad = kept
        optimizer.step()
        optimizer.zero_grad()
        losses = [loss.item()]
        for _ in range(2):
            loss = model(torch.randn(7, 5, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses == want


def test_a_broken_promise_costs_no_bucket(tmp_path):
    model = build()
    options = {"budget": tight(model, tmp_path), "accumulation_steps": 1}
    with outcore.prepare(model, adamw(model), **options) as (model, optimizer):
        x = torch.randn(7, 5)
        for _ in range(4):  # more often than there are buckets
            model(x).sum().backward()
            with pytest.raises(outcore.UnsupportedError, match="accumulation_steps"):
                model(x).sum().backward()
            optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def test_parameters_of_two_models_are_gathered_together(tmp_path):
    a, b = build(), build()
    values = [p.detach().clone() for p in (*a.parameters(), *b.parameters())]
    with (
        outcore.prepare(a, adamw(a), budget=tight(a, tmp_path)) as (a, _),
        outcore.prepare(b, adamw(b), budget=tight(b, tmp_path)) as (b, _),
        outcore.gathered([*a.parameters(), *b.parameters()]),
    ):
        assert all(torch.equal(p, v) for p, v in zip((*a.parameters(), *b.parameters()), values, strict=True))
        with pytest.raises(outcore.ConfigError, match="no prepared model"):
            outcore.gathered([next(a.parameters()), nn.Parameter(torch.zeros(2))])
