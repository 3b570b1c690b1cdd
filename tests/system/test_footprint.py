"""Memory and disk over time: nothing grows from step to step, nothing is left after closing."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from pathlib import Path

import psutil
import torch
from torch import nn

import outcore


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, width: int) -> None:
    x = torch.randn(5, width)
    for _ in range(steps):
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def prepared(folder: Path, width: int, depth: int) -> outcore.api.Prepared:
    torch.manual_seed(0)
    model = Stack(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = sum(p.numel() * 4 for p in model.parameters())
    # Of five times the weights, weights and all states, all tiers get some.
    budget = outcore.Budget(device=2 * weights, host=2 * weights, disk=folder)
    return outcore.prepare(model, optimizer, budget=budget)


def rss_bytes() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator holds back is not held by anybody
    return psutil.Process().memory_info().rss


def test_a_hundred_steps_do_not_grow(tmp_path: Path) -> None:
    width = 65
    model, optimizer = prepared(tmp_path, width, depth=6)
    used = {tier for unit in optimizer.plan.units for tier in (unit.weights, unit.gradients, unit.states)}
    assert "disk" in used
    train(model, optimizer, 20, width)
    before, lanes = rss_bytes(), threading.active_count()
    train(model, optimizer, 100, width)
    outcore.close(model)
    assert rss_bytes() < 1.01 * before
    assert threading.active_count() < lanes


def test_creating_and_closing_leaves_nothing(tmp_path: Path) -> None:
    width = 257

    def once() -> None:
        model, optimizer = prepared(tmp_path, width, depth=8)
        train(model, optimizer, 2, width)
        outcore.close(model)
        outcore.close(model)

    for _ in range(3):
        once()
    before, threads, files = rss_bytes(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        once()
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    # One run takes about 70 MB: a single arena kept alive would show twenty times over.
    assert rss_bytes() - before < 20e6


def test_a_closed_model_can_be_collected(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path, 65, depth=6)
    train(model, optimizer, 1, 65)
    outcore.close(model)
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None
