"""Policy ``select``: results that are dear to compute are saved, on any tier, and the rest is recomputed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import outcore
from outcore.engine.activations import offloaded_call as away
from outcore.model import expensive_operations as dear

from .rig import DEVICE, WIDTH, Tower, adamw, assert_same, batch, make, seen, train

each_tier = pytest.mark.parametrize("tier", ["device", "host", "disk"])


@pytest.fixture(autouse=True)
def _small_products_are_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)


@contextmanager
def prepared(
    build: Callable[[], nn.Module], tier: str, folder: Path, homes: str = "host", policy: str = "select"
) -> Iterator[Any]:
    model = make(build)
    optimizer = adamw(model)
    _, plan = forced(model, optimizer, homes, policy=policy, activations=tier)
    with outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=folder), device=DEVICE) as result:
        yield result


def same(build: Callable[[], nn.Module], tier: str, folder: Path) -> None:
    model = make(build)
    plain = adamw(model, fused=True)
    want = seen(train(model, plain), model, plain)
    with prepared(build, tier, folder) as (model, optimizer):
        assert_same(want, seen(train(model, optimizer), model, optimizer))


class Attention(nn.Module):
    """Attention with optional dropout inside."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + functional.dropout(self.out(mixed.squeeze(1)), 0.1)
        return x * torch.rand_like(x)  # shows whether earlier random numbers were drawn


class Dropping(Attention):
    dropout = 0.1


class InPlace(Attention):
    """Changes a product's result in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.out(x).mul_(2))


class Unseen(Attention):
    """Changes it in place without a change of its version."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.out(x)
        made.data.mul_(2)
        return x + torch.tanh(made)


class Ending(Attention):
    """Returns a product's result, which the caller may change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x))


class Changing(Tower):
    """Changes the results of blocks in place."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).mul_(2)
        return self.head(x)


@pytest.mark.parametrize("block", [Attention, Dropping, InPlace, Unseen])
@each_tier
def test_any_block(block: type[nn.Module], tier: str, tmp_path: Path) -> None:
    same(lambda: Tower(block, num_blocks=4), tier, tmp_path)


@each_tier
def test_whoever_has_the_results_may_change_them(tier: str, tmp_path: Path) -> None:
    same(lambda: Changing(Ending, num_blocks=4), tier, tmp_path)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def products(folder: Path, policy: str) -> int:
    """Return the number of matrix products in a backward pass."""
    with prepared(lambda: Tower(num_blocks=2), "device", folder, policy=policy) as (model, _):
        loss = model.loss(batch())
        with Products() as counter:
            loss.backward()
    return counter.count


@pytest.mark.skipif(DEVICE != "cpu", reason="a mode of this thread comes first on the device's thread of autograd")
def test_products_are_not_computed_again(tmp_path: Path) -> None:
    keep, select, recompute = (products(tmp_path, policy) for policy in ("keep", "select", "recompute"))
    assert select == keep
    assert recompute == keep + 2 * 2, "two in each block"


def test_what_is_not_dear_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 10**9)
    assert products(tmp_path, "select") == products(tmp_path, "recompute")


class Undecided(nn.Module):
    """Does something else the second time."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Undecided.calls += 1
        if Undecided.calls % 2:
            return x + self.left(x)
        return x + self.right(x.mT).mT


def test_a_block_that_does_something_else_the_second_time(tmp_path: Path) -> None:
    with (
        prepared(lambda: Tower(Undecided, num_blocks=1), "device", tmp_path) as (model, _),
        pytest.raises(outcore.UnsupportedError, match="recompute does aten.convolution.* where forward did aten.addmm"),
    ):
        model.loss(batch()).backward()


def test_a_graph_that_is_retained(tmp_path: Path) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        loss = model.loss(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    model = make(Tower)
    plain = adamw(model, fused=True)
    torch.manual_seed(3)
    want = seen(drive(model, plain), model, plain)
    with prepared(Tower, "device", tmp_path) as (model, optimizer):
        torch.manual_seed(3)
        assert_same(want, seen(drive(model, optimizer), model, optimizer))
