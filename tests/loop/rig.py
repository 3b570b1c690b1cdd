"""A plain model and its streamed twin: one loop drives both, and all that it sees must agree bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn
from torch.nn import functional

import outcore
from outcore.planner.homes.check import with_room
from outcore.planner.homes.pools import Comfort
from outcore.spec.budget import Limits
from outcore.spec.plan import Plan

WIDTH, VOCAB, LENGTH = 13, 31, 7
RESIDENT = ("device", "plain")
KINDS = (*RESIDENT, "host", "disk")
BLOCKS = ("device", "host", "host keep")
"""Kinds that differ inside of a block: weights that stay, that come and go, and that come and go under a graph."""
DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
IS_SIMULATED = DEVICE == "cuda" and not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState")
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
PLENTY = Limits(device_bytes=2**30, host_bytes=2**30, disk_bytes=None)


class Block(nn.Module):
    """A block without attention, but with all that matters here: dropout, a frozen parameter, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3)
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH)
        self.shift = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x) + self.shift))))


class Tower(nn.Module):
    """Embedding, blocks, head: the root unit and a unit per block."""

    def __init__(self, block: Callable[[], nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())


def batch(seed: int = 0, rows: int = 3) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=numbers, device="cpu").to(DEVICE)


def make(build: Callable[[], nn.Module] = Tower, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    torch.manual_seed(11)
    return build().to(DEVICE, dtype).train()


def plan_for(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    kind: str,
    policy: str = "recompute",
    units: Sequence[Any] | None = None,
    *,
    steps: int | None = None,
    depth: int = 0,
    precision: str | None = None,
) -> Plan:
    """Put everything on one tier (the root's weights stay on the device), with one slot of each kind if ``depth`` is 0.

    ``plain`` is the plan of ``prepare`` where everything fits: plain if possible, and activations are kept.
    """
    is_plain, tier = kind == "plain", "device" if kind == "plain" else kind
    comfort = Comfort(prefetch_depth=depth, num_buckets=depth + 1, max_slots_host=depth + 1)
    options = {"units": units, "precision": precision, "steps": steps}
    spec, plan = forced(model, optimizer, tier, policy=policy, comfort=comfort, **options)
    return with_room(spec, plan, PLENTY, clipping=True) if is_plain else plan


@contextmanager
def prepared(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    kind: str,
    folder: Path,
    *,
    policy: str = "recompute",
    units: Sequence[Any] | None = None,
    accumulation_steps: int | None = None,
    depth: int = 0,
    **options: Any,
) -> Iterator[Any]:
    """Call ``outcore.prepare`` with a plan for one tier; close at the end. The kind may name a policy: "host keep"."""
    kind, _, named = kind.partition(" ")
    policy = named or policy
    plan = plan_for(model, optimizer, kind, policy, units, steps=accumulation_steps, depth=depth)
    options |= {"accumulation_steps": accumulation_steps, "device": DEVICE}
    budget = outcore.Budget(disk=str(folder))
    with outcore.prepare(model, optimizer, plan=plan, budget=budget, units=units, **options) as result:
        yield result


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{**ADAMW, **options})


@contextmanager
def tower_on(kind: str, folder: Path, **options: Any) -> Iterator[Any]:
    """Prepare a new tower with AdamW, as ``prepared`` does it."""
    model = make()
    with prepared(model, adamw(model), kind, folder, **options) as result:
        yield result


Drive = Callable[[nn.Module, torch.optim.Optimizer], Any]


def same(
    drive: Drive,
    kind: str,
    folder: Path,
    *,
    build: Callable[[], nn.Module] = Tower,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    seed: int = 5,
    rounding: float = 0.0,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> None:
    """Drive a plain model and a streamed one; results of ``drive``, weights, buffers and states must be equal."""
    model = make(build, dtype)
    plain = optimizer(model)
    for group in plain.param_groups:
        group["fused"] = True
    torch.manual_seed(seed)
    want = seen(drive(model, plain), model, plain)
    twin = make(build, dtype)
    with prepared(twin, optimizer(twin), kind, folder, **options) as (twin, streamed):
        torch.manual_seed(seed)
        got = seen(drive(twin, streamed), twin, streamed)
    assert_same(want, got, rounding=rounding)


def agrees(*kinds: str, **options: Any) -> Callable[[Drive], Callable[..., None]]:
    """Make a test of a drive: a plain model and streamed ones of these kinds must see the same.

    Without kinds, the module's mark gives them. ``options`` are those of ``same``.
    """

    def decorate(drive: Drive) -> Callable[..., None]:
        def test(kind: str, tmp_path: Path) -> None:
            same(drive, kind, tmp_path, **options)

        test.__name__, test.__module__, test.__doc__ = drive.__name__, drive.__module__, drive.__doc__
        return pytest.mark.parametrize("kind", kinds)(test) if kinds else test

    return decorate


def seen(result: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    trained = {i: p.requires_grad for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    states = {i: dict(s) for i, s in optimizer.state_dict()["state"].items() if trained[i]}
    for state in states.values():
        state.pop("master", None)
    return {"result": result, "model": dict(model.state_dict()), "states": states}


def assert_same(want: Any, got: Any, path: str = "", rounding: float = 0.0) -> None:
    """Compare nests of tensors bit for bit, or up to ``rounding``."""
    if isinstance(want, torch.Tensor):
        want, got = want.detach().cpu(), got.detach().cpu()
        assert want.shape == got.shape, f"{path}: {tuple(want.shape)} != {tuple(got.shape)}"
        assert want.dtype == got.dtype, f"{path}: {want.dtype} != {got.dtype}"
        gap = float((want.double() - got.double()).abs().nan_to_num().max()) if want.numel() else 0.0
        if rounding:
            assert gap <= rounding, f"{path}: differs by {gap}"
        else:
            assert torch.equal(want.nan_to_num(7.5), got.nan_to_num(7.5)), f"{path}: differs by up to {gap}"
    elif isinstance(want, dict):
        assert set(want) == set(got), f"{path}: {list(want)} != {list(got)}"
        for key in want:
            assert_same(want[key], got[key], f"{path}/{key}", rounding)
    elif isinstance(want, list | tuple):
        assert len(want) == len(got), f"{path}: {len(want)} != {len(got)}"
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            assert_same(a, b, f"{path}/{i}", rounding)
    else:
        assert want == got, f"{path}: {want!r} != {got!r}"


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Take a few ordinary steps; return their losses."""
    losses = []
    for step in range(steps):
        loss = model.loss(batch(seed + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
