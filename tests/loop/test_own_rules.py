"""A user's rules, with all that a rule may have, train to the bits of their own plain step."""

from __future__ import annotations

import pytest
import torch

from outcore.optim import Rule, State
from outcore.optim.joined import Joined

from .rig import KINDS, assert_same, batch, make, prepared, same, train


class SGD(Rule):
    """Torch has an optimizer of this name, and one with a state ``sum``. Only matrices have a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def states(self, shape, settings):
        number = {"total": State(initial=1.0, shape=())} if len(shape) == 2 else {}
        return {"sum": State(initial=0.5), "mean": State(dtype=torch.bfloat16), **number}

    def update(self, weight, grad, states, step, settings):
        factor = 1.0
        if "total" in states:
            states["total"].mul_(0.5)
            factor += float(states["total"])
        states["sum"].addcmul_(grad, grad)
        states["mean"].lerp_(grad.to(torch.bfloat16), 0.1)
        weight.addcdiv_(states["mean"].to(weight.dtype), states["sum"].sqrt(), value=-factor * settings["lr"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_of_ones_own(kind, tmp_path):
    same(train, kind, tmp_path, optimizer=lambda model: SGD(model.parameters()))


def pair(model):
    first, *others = model.parameters()
    adagrad = torch.optim.Adagrad([first], lr=0.05, initial_accumulator_value=0.1, fused=True)
    return [adagrad, torch.optim.AdamW([p for p in others if p.requires_grad], fused=True)]


def test_adagrad_beside_another(tmp_path):
    """Only Adagrad has states before the first step."""
    model, twin = make(), make()
    optimizers, joined = pair(model), Joined(pair(twin))
    torch.manual_seed(5)
    for step in range(2):
        model.loss(batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with prepared(twin, joined, "host", tmp_path) as (twin, streamed):
        first, second = next(twin.parameters()), streamed.param_groups[1]["params"][0]
        assert (dict(streamed.state[first])["sum"] == torch.tensor(0.1)).all()
        assert not streamed.state[second]
        torch.manual_seed(5)
        train(twin, streamed)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
