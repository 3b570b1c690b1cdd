"""Autocast around, inside and between; its cache must not hold copies of weights that have left."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from .rig import Block, Tower, batch, same

pytestmark = [
    pytest.mark.parametrize("kind", ["device", "host"]),
    pytest.mark.parametrize("policy", ["keep", "recompute"]),
]


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


@pytest.mark.parametrize("build", [Tower, lambda: Tower(Nested)], ids=["plain", "nested"])
@pytest.mark.parametrize("cache", [True, False])
def test_forward_under_autocast(kind, policy, build, cache, tmp_path):

    def context():
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)

    same(drive_with(context), kind, tmp_path, build=build, policy=policy)


def test_two_forwards_in_one_context(kind, policy, tmp_path):
    # The plain loop sums both gradients in bf16 behind the cached cast; here each is cast first.
    def drive(model, optimizer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(batch()).float() - model(batch(1)).float()).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(drive, kind, tmp_path, policy=policy, rounding=2e-4, optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1))


def test_backward_inside_and_another_context_around(kind, policy, tmp_path):
    def drive(model, optimizer):
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

    same(drive, kind, tmp_path, policy=policy)
