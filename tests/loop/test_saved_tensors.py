"""What blocks may save, and where: tensors of every kind, and functions and hooks that hold tensors themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced, prepare_for_test
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import outcore
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.activations import offloaded_call as away
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.model import expensive_operations as dear
from outcore.planner.homes.pools import LEAST
from outcore.spec.plan import POLICIES, TIERS

from .rig import DEVICE, IS_SIMULATED, VOCAB, WIDTH, Tower, adamw, assert_same, batch, make, seen, train

EVEN = WIDTH + 1
each_pair = pytest.mark.parametrize(("policy", "tier"), [*itertools.product(POLICIES, TIERS)])


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)


class Two(nn.Module):
    """Two layers of an even width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(EVEN, EVEN), nn.Linear(EVEN, EVEN)


class Complex(Two):
    """Has pending conjugates and negations, of activations and of weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.up(x), self.down(x))
        weight = torch.view_as_complex(self.down.weight.view(EVEN, EVEN // 2, 2)).conj()
        y = (z * z.conj()).real + (z @ (z.mH @ z).conj()).imag + torch.fft.fft(x).conj().imag * z.conj().imag
        return x + 0.1 * torch.tanh(y + (weight * weight.exp()).imag.sum())


class Views(Two):
    """Saves many views of one storage, some of them empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        one, other = y.chunk(2, -1)
        begin = y.storage_offset() + 3
        found = [one.mT @ other, y.mT[..., ::2], y.expand(2, *y.shape)[1].transpose(0, 2).narrow(0, 1, 3), y[:, :0]]
        found += [
            y.unbind(0)[-1].t()[1:],
            y.as_strided((3, 5), (7, 2), begin),
            y > 0,
            y.topk(3).indices,
        ]
        total = sum((t.float() * t.float().sin()).sum() for t in found)
        return x + self.down(y) * torch.sigmoid(total)


class Sparse(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.up.weight.to_sparse()
        return x + 0.1 * torch.sparse.mm(matrix, self.down(x).flatten(0, 1).t()).t().view_as(x)


class Holding(torch.autograd.Function):
    """Holds an intermediate value, a number and a parameter on ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, number: int) -> torch.Tensor:
        ctx.x, ctx.weight, ctx.number = x, weight, number
        ctx.save_for_backward(x.detach(), None)
        return number * (x @ weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, nothing = ctx.saved_tensors
        assert nothing is None
        return ctx.number * (grad @ ctx.weight), ctx.number * grad.flatten(0, 1).t() @ ctx.x.flatten(0, 1), None


class Functions(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * Holding.apply(self.up(x), self.down.weight, 3)


class Inside(Two):
    """Has a checkpoint and saved-tensor hooks of its own."""

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.tanh(self.up(x)), 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.part, x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            return x + torch.tanh(self.down(y))


class Net(Tower):
    """A tower of such blocks."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(block, num_blocks=4)
        self.embed, self.head = nn.Embedding(VOCAB, EVEN), nn.Linear(EVEN, VOCAB)


def prepared(model: nn.Module, policy: str, tier: str, folder: Path) -> Any:
    """Prepare with one slot of each kind, poison in free memory, and the race checker."""
    optimizer = adamw(model)
    _, plan = forced(model, optimizer, "host", policy=policy, activations=tier, comfort=LEAST)
    options = {"plan": plan, "budget": outcore.Budget(disk=folder), "device": DEVICE, "race_checker": RaceChecker()}
    return prepare_for_test(model, optimizer, faults=Faults(poison=True), **options)


def same(block: Callable[[], nn.Module], policy: str, tier: str, folder: Path, drive: Any = train) -> None:
    model, twin = make(lambda: Net(block)), make(lambda: Net(block))
    plain = adamw(model, fused=True)
    torch.manual_seed(5)
    want = seen(drive(model, plain), model, plain)
    with prepared(twin, policy, tier, folder) as (twin, optimizer):
        torch.manual_seed(5)
        assert_same(want, seen(drive(twin, optimizer), twin, optimizer))


_NOT_SIMULATED = pytest.mark.skipif(IS_SIMULATED, reason="the simulated GPU knows neither complex nor sparse tensors")


@pytest.mark.parametrize(
    "block",
    [pytest.param(Complex, marks=_NOT_SIMULATED), Views, pytest.param(Sparse, marks=_NOT_SIMULATED), Functions, Inside],
)
@each_pair
def test_any_tensor(block: Callable[[], nn.Module], policy: str, tier: str, tmp_path: Path) -> None:
    same(block, policy, tier, tmp_path)


class TakesSparse(Two):
    def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.tanh(matrix @ self.down(self.up(x)).flatten(0, 1).t()).t().view_as(x)


@_NOT_SIMULATED
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
@each_pair
def test_sparse_arguments(policy: str, tier: str, tmp_path: Path) -> None:
    """Torch makes no views of sparse tensors, and does not tell the bytes of some."""

    def drive(model: nn.Module, optimizer: Any) -> Any:
        weights, leaf = torch.eye(EVEN).requires_grad_(), torch.eye(EVEN).to_sparse().requires_grad_()
        for step in range(2):
            csr = weights.detach().to_sparse_csr()
            x = model.embed(batch(step))
            matrices = (2 * weights).to_sparse(), leaf, csr, (3 * weights).to_sparse_csr()
            for block, matrix in zip(model.blocks, matrices, strict=True):
                x = block(x, matrix)
            model.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights.grad, leaf.grad.to_dense()

    same(TakesSparse, policy, tier, tmp_path, drive)


@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, nullcontext])
@each_pair
def test_hooks_around_the_model(
    around: Any, policy: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks around the model already hold the arguments of units; units then send nothing away."""
    sent, leave = [], OffloadedCall.leave
    monkeypatch.setattr(OffloadedCall, "leave", lambda mine, target: sent.append(mine) or leave(mine, target))

    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for step in range(2):
            with around():
                losses.append(model.loss(batch(step)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    same(Views, policy, tier, tmp_path, drive)
    assert bool(sent) == (tier != "device" and around is nullcontext)


class HoldsArgument(Two):
    """Holds its argument in a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * Holding.apply(x, self.down.weight, 3)


class HookReadsArgument(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y.register_hook(lambda grad: grad * x.detach().sign())
        return x + self.down(y)


class HoldsView(Two):
    """Holds a view of a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * Holding.apply(self.up(x), self.down.weight.detach().t().t(), 3)


@pytest.mark.parametrize(
    ("block", "refused", "said"),
    [
        (HoldsArgument, [("keep", "host"), ("keep", "disk")], "a hook or a function reads one"),
        (HookReadsArgument, [("keep", "host"), ("keep", "disk")], "a hook or a function reads one"),
        (HoldsView, [("keep", "device"), ("keep", "host"), ("keep", "disk")], "holds a view of a weight"),
    ],
)
@each_pair
def test_what_others_hold_is_there_or_refused(
    block: Callable[[], nn.Module], refused: Any, said: str, policy: str, tier: str, tmp_path: Path
) -> None:
    """Another tensor's bytes never take its place."""
    if (policy, tier) not in refused:
        same(block, policy, tier, tmp_path)
        return
    with prepared(make(lambda: Net(block)), policy, tier, tmp_path) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match=said):
            train(model, optimizer, 1)
