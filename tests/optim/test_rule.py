"""A user's own optimizers: what the kit finds, and how a rule behaves in a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch

from outcore.core.errors import ConfigError
from outcore.optim import Lion, Rule, State, check
from outcore.optim.blocks import update_blocks
from outcore.optim.piece import Piece
from outcore.optim.rule import settings_of
from outcore.optim.rules import RuleHyper, rule_for

from .update_cases import assert_same_bits, random


class Decaying(Rule):
    """Needs all that a rule may have: a state, a number that carries over from step to step, a shape of its own."""

    def __init__(self, params, lr=0.1, **more):
        super().__init__(params, {"lr": lr, **more})

    def states(self, shape, settings):
        return {"total": State(initial=1.0, shape=(), dtype=torch.float32), "mean": State(dtype=torch.float32)}

    def update(self, weight, grad, states, step, settings):
        states["total"].mul_(0.9)
        states["mean"].lerp_(grad.float(), 0.1 * float(states["total"]))
        weight.sub_(states["mean"], alpha=settings["lr"] / step)


class Scaled(Decaying):
    """Divides by the norm of the whole gradient."""

    is_whole = True

    def states(self, shape, settings):
        return {"rows": State(shape=shape[:1]), "count": State(shape=())}

    def update(self, weight, grad, states, step, settings):
        states["count"].add_(1)
        states["rows"].add_(grad.float().reshape(*grad.shape[:1], -1).norm(dim=-1).reshape(states["rows"].shape))
        weight.sub_(grad / grad.norm(), alpha=settings["lr"])


class Forgetful(Scaled):
    is_whole = False

    def states(self, shape, settings):
        return {}

    def update(self, weight, grad, states, step, settings):
        weight.sub_(grad / grad.norm(), alpha=settings["lr"])


class Spoiling(Decaying):
    def update(self, weight, grad, states, step, settings):
        weight.sub_(grad.mul_(2))


class Chosen(Decaying):
    """Only matrices have states: a number, and a state in another dtype."""

    def states(self, shape, settings):
        return super().states(shape, settings) if len(shape) == 2 else {}

    def update(self, weight, grad, states, step, settings):
        if states:
            super().update(weight, grad, states, step, settings)


class Wasteful(Decaying):
    temporaries = 2.0

    def update(self, weight, grad, states, step, settings):
        made = [grad + i for i in range(3)]
        weight.sub_(made[0])


def keeping(name="mine", settings=(), is_whole=False, **form):
    """Return a rule that has one state of this form."""

    class Keeping(Forgetful):
        def __init__(self, params):
            super().__init__(params, **dict(settings))

        def states(self, shape, settings):
            return {name: State(**form)}

    Keeping.is_whole = is_whole
    return Keeping


@pytest.mark.parametrize("kind", [Lion, Decaying, Scaled, Chosen])
def test_what_is_right_passes(kind):
    check(kind)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Forgetful, r"the bits of step.* the weight differs after step 1 in pieces .*set is_whole = True"),
        (Spoiling, r"the gradient to be only read, but update\(\) changed it"),
        (Wasteful, r"at most temporaries = 2 times .* but it made 3\.00 times as much \(torch.float32 of shape \(67"),
        (
            keeping("step"),
            "state 'step' of Keeping to have a name other than step, master, master_codes, and no '_absmax' at its end",
        ),
        (keeping("master"), "state 'master' of Keeping to have a name other than"),
        (keeping("mine_absmax"), "state 'mine_absmax' of Keeping to have a name other than"),
        (keeping(dtype=torch.int64), r"state 'mine' of Keeping to have one of the dtypes .* but got torch\.int64"),
        (keeping(shape=(1,)), r"state 'mine' of Keeping to have shape None or \(\), but got \(1,\); set is_whole"),
        (
            keeping(settings={"table": {}}.items()),
            "settings of a param group to be hashable .* 'table' is a dict:",
        ),
        (lambda p: Lion([{"params": p, "state_format": "8bit"}]), "no state_format in param groups"),
        (torch.optim.SGD, r"make\(\) to build an outcore\.optim\.Rule, but got SGD"),
    ],
)
def test_what_is_wrong_is_said(make, message):
    with pytest.raises(ConfigError, match=message):
        check(make)


def test_lion_is_that_of_the_paper():
    """Program 1 of arXiv:2302.06675, written out again."""
    weight, momentum = random(4097, 0), torch.zeros(4097)
    param = torch.nn.Parameter(weight.clone())
    optimizer = Lion([param], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 4):
        param.grad = grad = random(4097, step)
        optimizer.step()
        update = torch.sign(momentum * 0.9 + grad * 0.1)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update
        momentum = momentum * 0.99 + grad * 0.01
        torch.testing.assert_close(param.detach(), weight, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum, rtol=1e-5, atol=1e-7)


def test_a_rule_is_an_ordinary_optimizer():
    """It can be saved, loaded and stepped again."""
    params = [torch.nn.Parameter(random(65, 3)) for _ in range(2)]
    first, second = Decaying(params[:1]), Decaying(params[1:])
    params[0].grad = random(65, 4)
    first.step()
    params[1].data.copy_(params[0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for param, optimizer in zip(params, (first, second), strict=True):
        param.grad = random(65, 5)
        assert optimizer.step(lambda: 7) == 7
    assert_same_bits([params[0].detach()], [params[1].detach()])


def test_states_keep_their_dtype_and_device_when_they_are_loaded():
    """Torch's `load_state_dict` casts states to the parameter's dtype and device; here a number has another device."""
    param = torch.nn.Parameter(random(65, 3, torch.bfloat16))
    first = Decaying([param])
    param.grad = random(65, 4, torch.bfloat16)
    first.step()
    second = Decaying([param])
    second.load_state_dict(first.state_dict())
    assert_same_bits([second.state[param]["mean"]], [first.state[param]["mean"]])
    elsewhere = torch.nn.Parameter(torch.empty(65, device="meta"))
    for kind, device in ((Decaying, "cpu"), (Scaled, "meta")):
        optimizer = kind([elsewhere])
        number = next(name for name, form in optimizer.states((65,), {}).items() if form.shape == ())
        elsewhere.grad = torch.empty_like(elsewhere)
        optimizer.step()
        assert optimizer.state[elsewhere][number].device.type == device
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[elsewhere][number].device.type == device


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_whole_parameters_are_not_cut_and_keep_their_strides(kind):
    """Transposed parameter; the gradient has another dtype and a factor, and the scratch is far too small for it."""
    param = torch.nn.Parameter(random(33 * 65, 0).view(65, 33).T)
    optimizer = kind([param], lr=0.1)
    rule = rule_for(optimizer)
    hyper = rule.hyper(optimizer.param_groups[0])
    target = param.detach().clone().T.reshape(-1)
    forms = rule.states(param, optimizer.param_groups[0])
    shapes = {name: param.shape if form.shape is None else form.shape for name, form in forms.items()}
    states = {name: torch.zeros(shape).reshape(-1) for name, shape in shapes.items()}
    likes = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if shape != param.shape}
    likes[""] = torch.empty_like(param, device="meta")
    given = {"target": target, "states": states, "weights": None, "hyper": hyper, "likes": likes}
    for step in (1, 2):
        grad = random(33 * 65, step, torch.bfloat16)
        param.grad = (grad.float() * 0.3).view(65, 33).T
        optimizer.step()
        piece = Piece(grad=grad, step=step, factors=(torch.tensor(0.3),), **given)
        update_blocks([piece], torch.empty(256, dtype=torch.uint8))
        assert_same_bits([target], [param.detach().T.reshape(-1)])


def test_settings_are_a_snapshot_of_plain_values():
    optimizer = Lion([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5), betas=[0.8, 0.9])
    rule = rule_for(optimizer)
    hyper = rule.hyper(optimizer.param_groups[0])
    assert isinstance(hyper, RuleHyper)
    assert hyper.settings == {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.0, "maximize": False}
    assert hash(hyper) == hash(RuleHyper(optimizer, settings_of(optimizer.param_groups[0], optimizer.defaults)))
