"""Which optimizers are supported, and what is read from their groups."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outcore.core.errors import ConfigError
from outcore.optim import Lion, State
from outcore.optim.rules import AdagradHyper, AdamHyper, RuleHyper, SgdHyper, counts, rule_for


def params(count: int = 1) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


def test_adamw_group_becomes_plain_numbers():
    optimizer = torch.optim.AdamW(params(), lr=torch.tensor(0.5), betas=(0.8, 0.95), amsgrad=True, fused=True)
    rule = rule_for(optimizer)
    hyper = rule.hyper(optimizer.param_groups[0])
    assert hyper == AdamHyper(
        lr=0.5, beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.01, amsgrad=True, maximize=False, decoupled=True
    )
    assert type(hyper.lr) is float
    optimizer.param_groups[0]["lr"] = 7.0
    assert hyper.lr == 0.5  # a snapshot, not a view
    with pytest.raises(dataclasses.FrozenInstanceError):
        hyper.lr = 1.0


def test_adam_decouples_only_when_asked():
    for decoupled in (False, True):
        optimizer = torch.optim.Adam(params(), decoupled_weight_decay=decoupled)
        assert rule_for(optimizer).hyper(optimizer.param_groups[0]).decoupled is decoupled


def test_sgd_and_adagrad_groups():
    sgd = torch.optim.SGD(params(), lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True, maximize=True)
    assert rule_for(sgd).hyper(sgd.param_groups[0]) == SgdHyper(
        lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.2, nesterov=True, maximize=True
    )
    adagrad = torch.optim.Adagrad(params(), lr=0.1, lr_decay=0.3, eps=1e-5)
    assert rule_for(adagrad).hyper(adagrad.param_groups[0]) == AdagradHyper(
        lr=0.1, lr_decay=0.3, eps=1e-5, weight_decay=0.0, maximize=False
    )


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda p: torch.optim.AdamW(p), ("exp_avg", "exp_avg_sq")),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (lambda p: torch.optim.SGD(p), ()),
        (lambda p: torch.optim.SGD(p, momentum=0.9), ("momentum_buffer",)),
        (lambda p: torch.optim.Adagrad(p), ("sum",)),
    ],
)
def test_states_are_those_that_torch_makes(make, names):
    (param,) = params()
    optimizer = make([param])
    assert rule_for(optimizer).state_names(optimizer.param_groups) == names
    param.grad = torch.ones(3)
    optimizer.step()
    made = [name for name, value in optimizer.state[param].items() if name != "step" and value is not None]
    assert tuple(made) == names


def test_states_are_the_union_over_groups():
    first, second = params(2)
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second], "amsgrad": True}])
    assert rule_for(optimizer).state_names(optimizer.param_groups) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.5}])
    assert rule_for(optimizer).state_names(optimizer.param_groups) == ("momentum_buffer",)


def test_states_start_where_torch_starts_them():
    first, second = params(2)
    groups = [{"params": [first]}, {"params": [second], "initial_accumulator_value": 0.7}]
    optimizer = torch.optim.Adagrad(groups, initial_accumulator_value=0.3)
    rule = rule_for(optimizer)
    for param in (first, second):  # torch ignores the value in the group, so we must, too
        form = rule.states(param, optimizer.param_groups[0])["sum"]
        assert optimizer.state[param]["sum"].tolist() == [pytest.approx(form.initial)] * 3


class Renamed(torch.optim.AdamW):
    pass


class OtherStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class OtherStates(torch.optim.SGD):
    def _init_group(self, group, params, grads, momentum_buffer_list):
        return super()._init_group(group, params, grads, momentum_buffer_list)


def test_a_subclass_with_the_same_step_is_supported():
    optimizer = Renamed(params())
    assert rule_for(optimizer).kinds[0].name == "AdamW"
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # schedulers wrap the object's `step`
    assert rule_for(optimizer).kinds[0].name == "AdamW"


class OtherRule(Lion):
    def step(self, closure=None):
        return super().step(closure)


class Lion8bit(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [OtherStep, OtherStates, torch.optim.Rprop])
def test_any_other_optimizer_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=rf"one of torch\.optim\.AdamW, Adam, SGD, Adagrad, RMSprop.*{kind.__name__}"):
        rule_for(kind(params()))


class SGD(Lion):
    """A rule of the user's own with the name of torch's."""

    def states(self, shape, settings):
        return {"sum": State(initial=0.5)}


def test_a_rule_is_its_own_whatever_its_names():
    (param,) = params()
    optimizer = SGD([param])
    hyper = rule_for(optimizer).hyper(optimizer.param_groups[0])
    assert isinstance(hyper, RuleHyper)
    assert hyper.rule is optimizer
    assert rule_for(optimizer).states(param, optimizer.param_groups[0]) == {"sum": State(initial=0.5)}


def test_who_is_refused_hears_what_to_take():
    with pytest.raises(ConfigError, match=r"the step\(\) that it inherits.* but OtherRule has .*do in update\(\) what"):
        rule_for(OtherRule(params()))
    with pytest.raises(ConfigError, match=r'Adam8bit; take torch\.optim\.AdamW with state_format="8bit"'):
        rule_for(type("Adam8bit", (OtherStep,), {})(params()))
    with pytest.raises(ConfigError, match=r"Lion8bit; take outcore\.optim\.Lion"):
        rule_for(Lion8bit(params()))
    with pytest.raises(ConfigError, match=r"torch\.optim\.\w+\.Rprop; write its update as an outcore\.optim\.Rule"):
        rule_for(torch.optim.Rprop(params()))


@pytest.mark.parametrize("fused", [True, False])
def test_steps_of_sgd_that_count(fused):
    """With dampening, steps before the first one with momentum leave no trace."""
    for momentum, dampening, want in ((0.0, 0.5, False), (0.9, 0.5, True), (0.0, 0.0, True)):
        optimizer = torch.optim.SGD(params(), momentum=momentum, dampening=dampening, fused=fused)
        assert counts(rule_for(optimizer).hyper(optimizer.param_groups[0])) is want
    assert counts(rule_for(Lion(params())).hyper(Lion(params()).param_groups[0]))


@pytest.mark.parametrize("option", ["capturable=True", "differentiable=True"])
def test_other_implementations_are_refused(option):
    key, value = option.split("=")
    first, second = params(2)
    groups = [{"params": [first]}, {"params": [second], key: value == "True"}]
    optimizer = torch.optim.AdamW(groups)
    with pytest.raises(ConfigError, match=rf"torch\.optim\.AdamW in its fused, foreach or plain.*but got {option}"):
        rule_for(optimizer)


def test_a_group_changed_later_is_refused_at_the_step():
    optimizer = torch.optim.AdamW(params(), fused=True)
    rule = rule_for(optimizer)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ConfigError, match="capturable=True"):
        rule.hyper(optimizer.param_groups[0])


def test_fused_unset_and_true_may_stand_side_by_side():
    first, second = params(2)
    optimizer = torch.optim.AdamW([{"params": [first], "fused": True}, {"params": [second]}])
    assert rule_for(optimizer).kinds[0].name == "AdamW"
