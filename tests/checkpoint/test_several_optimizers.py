"""Several optimizers over one model: how a prepared model treats their states, hooks, groups and defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plans import plan_for
from torch import nn

import outcore
from outcore.core.errors import ConfigError, PlanInfeasibleError

from .small import DEVICE

ROOM = outcore.Budget(device="64MiB", host="64MiB")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to(DEVICE)


def two(model: nn.Module, first: type = torch.optim.RMSprop, **more: Any) -> list[torch.optim.Optimizer]:
    params = list(model.parameters())
    return [first(params[:4], lr=1e-2, **more), torch.optim.AdamW(params[4:], lr=1e-2, fused=True)]


def backward(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 16).to(DEVICE)).square().sum().backward()


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for step in range(3):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def test_they_keep_their_states_where_nothing_is_prepared() -> None:
    model = build()
    optimizers = two(model)
    train(model, *optimizers)
    with pytest.raises(PlanInfeasibleError):
        outcore.prepare(model, optimizers, budget=outcore.Budget(device=1024, host=1024), device=DEVICE)
    plan_for(model, optimizers, budget=ROOM, device=DEVICE)  # type: ignore[arg-type]
    assert [len(optimizer.state) for optimizer in optimizers] == [4, 4]
    plain = build()
    others = two(plain)
    train(plain, *others)
    with outcore.prepare(model, optimizers, budget=ROOM, device=DEVICE) as (model, optimizer):
        got, want = train(model, optimizer), train(plain, *others)
        assert all(torch.equal(value, want[name]) for name, value in got.items())
        with pytest.raises(ConfigError, match="this RMSprop was prepared before"):
            outcore.prepare(build(), optimizers, budget=ROOM, device=DEVICE)
        assert len(optimizer.state) == 8


def test_one_of_them_may_be_adagrad() -> None:
    model, plain = build(), build()
    want = train(plain, *two(plain, torch.optim.Adagrad, fused=True))
    with outcore.prepare(model, two(model, torch.optim.Adagrad), budget=ROOM, device=DEVICE) as (model, optimizer):
        got = train(model, optimizer)
    assert all(torch.equal(value, want[name]) for name, value in got.items())


def test_hooks_are_those_that_each_has_when_they_are_due() -> None:
    model = build()
    optimizers, called = two(model), list[str]()

    def hook(name: str) -> Any:
        return lambda *_: called.append(name)

    removed = optimizers[0].register_step_post_hook(hook("removed"))
    optimizers[0].register_step_pre_hook(hook("earlier"))
    with outcore.prepare(model, optimizers, budget=ROOM, device=DEVICE) as (model, optimizer):
        optimizers[1].register_step_pre_hook(hook("later"))
        optimizer.register_step_post_hook(hook("own"))
        removed.remove()
        backward(model)
        optimizer.step()
        optimizers[0].register_state_dict_post_hook(hook("saved"))
        optimizer.state_dict()
    assert called == ["earlier", "later", "own", "saved"]


def test_a_new_group_belongs_to_none_of_them() -> None:
    model = build()
    with outcore.prepare(model, two(model), budget=ROOM, device=DEVICE) as (model, optimizer):
        with pytest.raises(ConfigError, match="one was added later, which belongs to none of them"):
            optimizer.add_param_group({"params": []})
        train(model, optimizer)


def test_a_group_that_is_added_to_one_of_them_later_is_refused() -> None:
    model = build()
    optimizers = two(model)
    with outcore.prepare(model, optimizers, budget=ROOM, device=DEVICE) as (model, optimizer):
        train(model, optimizer)
        optimizers[1].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, device=DEVICE))]})
        with pytest.raises(ConfigError, match="was added later to the .* and would not be trained"):
            optimizer.step()


@pytest.mark.parametrize("how", ["taken", "assigned", "assigned to all"])
def test_lists_of_groups_that_change_are_refused(how: str) -> None:
    model = build()
    optimizers = two(model)
    with outcore.prepare(model, optimizers, budget=ROOM, device=DEVICE) as (model, optimizer):
        backward(model)
        groups = optimizers[0].param_groups
        if how == "assigned to all":
            with pytest.raises(ConfigError, match="but another list was assigned; change the groups themselves"):
                optimizer.param_groups = optimizer.param_groups[:1]
        else:
            optimizers[0].param_groups = [] if how == "taken" else [dict(groups[0])]
            named = "would still be trained; leave it" if how == "taken" else "to the RMSprop .* would not be trained"
            with pytest.raises(ConfigError, match=named):
                optimizer.step()
            optimizers[0].param_groups = groups
        optimizer.step()


def test_settings_of_all_are_loaded() -> None:
    """Each optimizer still knows its groups, and has what its class sets after loading."""
    model = build()
    optimizers = two(model, torch.optim.SGD)
    optimizers += [torch.optim.Adagrad([optimizers[1].param_groups[0]["params"].pop()], fused=True)]
    with outcore.prepare(model, optimizers, budget=ROOM, device=DEVICE) as (model, optimizer):
        train(model, optimizer)
        saved = optimizer.state_dict()
        for group, rate in zip(saved["param_groups"], (1.0, 2.0, 3.0), strict=True):
            group["lr"] = rate
            del group["maximize"]
        optimizer.load_state_dict(saved)
        found = [group for one in optimizers for group in one.param_groups]
        assert [(group["lr"], group["maximize"]) for group in found] == [(1.0, False), (2.0, False), (3.0, False)]
        train(model, optimizer)


def test_schedulers_see_what_all_have() -> None:
    model = build()
    params = list(model.parameters())
    adams = [torch.optim.Adam(params[:4]), torch.optim.AdamW(params[4:])]
    with outcore.prepare(model, adams, budget=ROOM, device=DEVICE) as (model, optimizer):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        assert [group["betas"][0] for group in optimizer.param_groups] == [0.95, 0.95]
    model = build()
    with outcore.prepare(model, two(model), budget=ROOM, device=DEVICE) as (model, optimizer):
        assert optimizer.defaults.keys() >= {"lr", "weight_decay"}
        assert not optimizer.defaults.keys() & {"alpha", "betas"}
