"""Autocast around, inside of and between blocks; its cache must not hold copies of weights that have left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from .rig import WIDTH, Block, Tower, agrees, batch, same

pytestmark = pytest.mark.parametrize("kind", ["device", "plain", "host", "device keep", "plain keep", "host keep"])


class Nested(Block):
    """Turns autocast off, and on again, inside."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.up(self.norm(x.float()))
        with torch.autocast("cpu", dtype=torch.float16):
            z = self.down(functional.gelu(y))
        return x + self.dropout(z)


def drive_with(context):
    def drive(model, optimizer):
        losses = []
        for step in range(3):
            with context():
                logits = model(batch(step))
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch(step).flatten())
            loss.backward()  # outside of the context
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.detach(), logits.dtype))
        return losses

    return drive


@pytest.mark.pairs
@pytest.mark.parametrize("build", [Tower, lambda: Tower(Nested)], ids=["plain", "nested"])
@pytest.mark.parametrize("cache", [True, False])
def test_forward_under_autocast(kind, build, cache, tmp_path):

    def context():
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)

    same(drive_with(context), kind, tmp_path, build=build)


@agrees(rounding=0.0002, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1))
def test_two_forwards_in_one_context(model, optimizer):
    # The plain loop adds both gradients in bf16, at the cached cast; here each is cast first.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(batch()).float() - model(batch(1)).float()).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@agrees()
def test_backward_inside_and_another_context_around(model, optimizer):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(batch()).flatten(0, 1).float(), batch().flatten())
        loss.backward()
        before = (
            torch.is_autocast_cache_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )
    late = functional.cross_entropy(model(batch(1)).flatten(0, 1).float(), batch(1).flatten())
    with torch.autocast("cpu", dtype=torch.float16):
        late.backward()  # recompute must not see it
    optimizer.step()
    return before, loss, late


class Twice(nn.Module):
    """One cast of the weight serves both uses, so both gradients are added in bf16."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(torch.tanh(self.up(x))))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        with torch.backends.mkldnn.flags(enabled=False):  # oneDNN has no bf16 kernel for every width
            return x + self.rnn(x)[0].to(x.dtype)


BUILDS = {"twice": Twice, "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU)}


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("name", BUILDS)
def test_a_weight_used_twice_in_one_block(kind, name, tmp_path):
    def context():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    options = {"units": ["blocks.*"]}
    same(drive_with(context), kind, tmp_path, build=lambda: Tower(BUILDS[name]), **options)


class Branches(nn.Module):
    """Passes its argument to two operations that autocast casts it for."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.one(x) * self.two(x)


@pytest.mark.parametrize("is_leaf", [False, True])
def test_an_argument_used_twice_in_one_block(kind, is_leaf, tmp_path):
    """Autocast casts it each time. It casts a leaf only once, and both gradients are added before that cast."""

    def drive(model, optimizer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = model.embed(batch())
            x = x.detach().requires_grad_() if is_leaf else x
            y = x
            for block in model.blocks:
                y = block(y)
            loss = model.head(y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), x.grad if is_leaf else None

    same(drive, kind, tmp_path, build=lambda: Tower(Branches))


class AroundBlocks(Tower):
    """A layer of the root runs before, between and after units."""

    def __init__(self):
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = self.between(self.embed(ids))
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


def test_a_weight_of_the_root_used_around_units(kind, tmp_path):
    # A unit's first kept call empties the cache, to find out whether the unit needs one.
    def context():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    options = {"rounding": 1e-3 if "keep" in kind else 0.0}
    sgd = {"optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1)}
    same(drive_with(context), kind, tmp_path, build=AroundBlocks, units=[Block], **options, **sgd)
