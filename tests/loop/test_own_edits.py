"""Units that change their own parameters in forward: the change is kept, once, wherever the weights live."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore

from .rig import WIDTH, Tower, adamw, batch, make, prepared, same, train

KIND = pytest.mark.parametrize("kind", ["device", "host", "disk"])
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])


class Clipped(nn.Module):
    """Edits itself in four ways; each edit has the same effect twice as once."""

    def __init__(self):
        super().__init__()
        self.data, self.copied, self.replaced, self.inplace = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.read = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        self.data.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.copied.weight.copy_(self.copied.weight.round(decimals=1))
            self.inplace.weight.clamp_(max=0.05)
        self.replaced.weight.data = self.replaced.weight.data.clamp(min=-0.1)
        for layer in (self.data, self.copied, self.replaced, self.inplace):
            x = x + torch.tanh(layer(x)) * self.read.data.mean()
        return x * self.read


class Codebook(nn.Module):
    """Moves its codes after using them, so a second run would not see those of the first."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)

    def forward(self, x):
        nearest = torch.cdist(x.detach().flatten(0, 1), self.codes).argmin(1)
        y = x + torch.tanh(self.up(x)) + self.codes[nearest].view_as(x)
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return y


def drive(model, optimizer):
    losses = train(model, optimizer)
    with torch.no_grad():
        losses.append(model.loss(batch(5)))
        for block in model.blocks:
            block.eval()
        losses.append(model.loss(batch(6)))
    return losses


@KIND
@POLICY
def test_clipped_weights(kind, policy, tmp_path):
    same(drive, kind, tmp_path, build=lambda: Tower(Clipped, 2), policy=policy, units=[Clipped])


@pytest.mark.parametrize("kind", ["device", "host"])
def test_masters_follow(kind, tmp_path):
    def run(kind):
        model = make(lambda: Tower(Clipped, 2), torch.bfloat16)
        with prepared(model, adamw(model), kind, tmp_path, units=[Clipped]) as (model, optimizer):
            drive(model, optimizer)
            return {n: t.clone() for n, t in outcore.named_tensors(model)}

    torch.manual_seed(0)
    device, other = run("device"), run(kind)
    assert all(torch.equal(device[n], other[n]) for n in device)
    assert all(t.max() <= 0.05 for n, t in other.items() if "inplace.weight" in n)


@KIND
def test_a_codebook(kind, tmp_path):
    same(drive, kind, tmp_path, build=lambda: Tower(Codebook, 2), policy="keep", units=[Codebook])


@KIND
def test_a_codebook_under_recompute_is_refused(kind, tmp_path):
    model = make(lambda: Tower(Codebook, 2))
    with prepared(model, adamw(model), kind, tmp_path, units=[Codebook]) as (model, optimizer):
        says = r"unit 'blocks.1': recompute gave another result .* its own parameters in forward \('blocks.1.codes'\)"
        with pytest.raises(outcore.UnsupportedError, match=rf"{says}.*outside of forward, or .* the policy keep"):
            train(model, optimizer)


class Unused(Codebook):
    """Has a running value in a parameter that no result depends on."""

    def forward(self, x):
        with torch.no_grad():
            self.codes.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x + torch.tanh(self.up(x))


@KIND
@POLICY
def test_a_running_value_in_a_parameter(kind, policy, tmp_path):
    same(drive, kind, tmp_path, build=lambda: Tower(Unused, 2), policy=policy, units=[Unused])


class Grows(Codebook):
    def forward(self, x):
        self.codes.data = torch.cat([self.codes.data] * 2)
        return x + torch.tanh(self.up(x))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_another_shape_is_refused(kind, tmp_path):
    model = make(lambda: Tower(Grows, 2))
    with prepared(model, adamw(model), kind, tmp_path, units=[Grows]) as (model, _):
        with pytest.raises(outcore.UnsupportedError, match="'blocks.0.codes' to keep shape"):
            model.loss(batch())
