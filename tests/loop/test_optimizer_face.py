"""An optimizer's interface beside ``step``: hooks, ``state``, groups that come later, and others that may step."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import outcore
from outcore.spec.plan_table import plan_table

from .rig import KINDS, adamw, agrees, assert_same, batch, make, prepared, same, tower_on, train

KIND = pytest.mark.parametrize("kind", KINDS)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def register_all(optimizer, seen):
    """Register every kind of hook; some change their arguments."""

    def halve(optimizer, args, kwargs):
        seen.append(("before", len(args), sorted(kwargs)))
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    def more(optimizer, state_dict):
        return {**state_dict, "more": len(state_dict["state"])}

    return [
        optimizer.register_step_pre_hook(halve),
        optimizer.register_step_post_hook(lambda o, a, k: seen.append(("after", o.param_groups[0]["lr"]))),
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("saving")),
        optimizer.register_state_dict_post_hook(more),
        optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(s.pop("more"))),
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded")),
    ]


@pytest.mark.parametrize("when", ["before", "after, on the old one", "after, on the new one"])
def test_hooks(when, tmp_path):
    seen, old = [], []

    def optimizer(model):
        old.append(adamw(model))
        if when == "before":
            register_all(old[-1], seen)
        return old[-1]

    def drive(model, optimizer):
        # Kernels are checked at first use, with optimizers that global hooks see, too.
        train(model, optimizer, 1)
        model.state_dict()  # waits for the update
        seen.clear()
        handles = []
        if when != "before":
            handles = register_all(old[-1] if "old" in when else optimizer, seen)
        everywhere = [
            torch_optimizer.register_optimizer_step_pre_hook(lambda o, a, k: seen.append("any before")),
            torch_optimizer.register_optimizer_step_post_hook(lambda o, a, k: seen.append("any after")),
        ]
        losses = train(model, optimizer)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        optimizer.step(lambda: seen.append("closure"))
        for handle in [*handles, *everywhere]:
            handle.remove()
        return losses, saved["more"], train(model, optimizer), list(seen)

    same(drive, "host", tmp_path, optimizer=optimizer)


def plain_states(state):
    return {name: value.clone() for name, value in state.items() if name != "master"}


@KIND
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_states_can_be_read_and_changed(kind, make_optimizer, tmp_path):
    def drive(model, optimizer):
        losses, seen = train(model, optimizer), []
        params = [p for p in model.parameters() if p.requires_grad]
        assert len(optimizer.state) == len(params)
        assert all(p in optimizer.state for p in params)
        for param in params:
            seen.append(plain_states(optimizer.state[param]))
        name = "exp_avg" if make_optimizer is adamw else "momentum_buffer"
        a, b, c, d = model.head.weight, model.blocks[0].up.weight, model.blocks[1].down.bias, model.blocks[2].up.bias
        optimizer.state[a][name].zero_()
        optimizer.state[b][name][0] = 0.25
        optimizer.state[b][name].view(-1)[3:].mul_(0.5)
        optimizer.state[c][name] = torch.full(c.shape, 0.125)
        if make_optimizer is adamw:
            optimizer.state[a]["step"].fill_(7)
            del optimizer.state[d]  # torch's fused SGD does not take momentum for some
        losses += train(model, optimizer)
        optimizer.state = collections.defaultdict(dict)
        return seen, losses + train(model, optimizer), [plain_states(s) for s in optimizer.state.values()]

    same(drive, kind, tmp_path, optimizer=make_optimizer)


def test_a_state_of_ones_own_has_no_home(tmp_path):
    with tower_on("host", tmp_path) as (model, optimizer):
        train(model, optimizer)
        state = optimizer.state[model.head.weight]
        with pytest.raises(outcore.ConfigError, match="'ema', for which outcore.prepare"):
            state["ema"] = torch.zeros(3)
        with pytest.raises(outcore.ConfigError, match="exp_avg of 'head.weight' with shape"):
            state["exp_avg"] = torch.zeros(3)
        with pytest.raises(outcore.UnsupportedError, match="to be deleted"):
            del state["exp_avg"]
        with pytest.raises(outcore.ConfigError, match="is not"):
            optimizer.state[torch.nn.Parameter(torch.zeros(3))] = {}
        assert "exp_avg" in repr(state)


@KIND
def test_a_group_that_comes_later(kind, tmp_path):
    def without_head(model):
        return torch.optim.AdamW([*model.embed.parameters(), *model.blocks.parameters()], lr=1e-2)

    def drive(model, optimizer):
        losses = train(model, optimizer)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 3e-3, "fused": True})
        model.zero_grad()
        return losses + train(model, optimizer), optimizer.param_groups[1]["lr"]

    same(drive, kind, tmp_path, optimizer=without_head)


def test_a_group_without_memory_is_refused(tmp_path):
    with tower_on("host", tmp_path) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match=r"shape \(3,\) that is not in the model"):
            optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(3))})
        with pytest.raises(outcore.UnsupportedError, match="'blocks.0.shift', which was frozen"):
            optimizer.add_param_group({"params": [model.blocks[0].shift]})
        with pytest.raises(ValueError, match="more than one"):
            optimizer.add_param_group({"params": [model.head.weight]})
        train(model, optimizer)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_other_optimizers_refuse(kind, tmp_path):
    model = make()
    old, other = adamw(model), torch.optim.SGD(model.head.parameters(), lr=0.1)
    with prepared(model, old, kind, tmp_path) as (model, optimizer):
        model.loss(batch()).backward()
        for use in (old.step, old.state_dict, lambda: old.load_state_dict(optimizer.state_dict())):
            with pytest.raises(outcore.UnsupportedError, match=r"optimizer that outcore.prepare\(\) returned"):
                use()
        for another in (other, torch.optim.SGD(model.parameters(), lr=0.1)):
            with pytest.raises(outcore.UnsupportedError, match="one optimizer for a prepared model.*another SGD"):
                another.step()
        optimizer.step()
        old.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    free = torch.nn.Parameter(torch.ones(2))
    free.grad = torch.ones(2)
    torch.optim.SGD([free], lr=1.0).step()
    assert free.tolist() == [0.0, 0.0]


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer, as libraries do."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_wrapper_goes_on(tmp_path):
    same(lambda model, optimizer: train(model, Wrapper(optimizer)), "host", tmp_path)


@pytest.mark.parametrize(
    ("options", "setting"),
    [({"momentum": 0.0}, ("momentum", 0.9)), ({}, ("amsgrad", True))],
    ids=["momentum", "amsgrad"],
)
def test_states_that_were_not_foreseen_are_refused(options, setting, tmp_path):
    model = make()
    optimizer = sgd(model, **options) if options else adamw(model)
    with prepared(model, optimizer, "host", tmp_path) as (model, optimizer):
        train(model, optimizer)
        optimizer.param_groups[0][setting[0]] = setting[1]
        model.loss(batch()).backward()
        with pytest.raises(outcore.UnsupportedError, match="no memory was taken; set momentum or amsgrad before"):
            optimizer.step()
        optimizer.param_groups[0][setting[0]] = 0
        optimizer.step()


@agrees("host", optimizer=sgd)
def test_momentum_that_pauses(model, optimizer):
    losses = []
    for momentum in (0.9, 0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        losses += train(model, optimizer)
    return losses


@agrees("plain", "device", "host", "disk", optimizer=lambda model: sgd(model, dampening=0.4))
def test_momentum_that_begins_later(model, optimizer):
    """With dampening, momentum begins with the whole gradient of that step."""
    losses = []
    for momentum in (0.0, 0.9, 0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        losses += train(model, optimizer)
    return losses


@KIND
def test_loading_replaces_settings(kind, tmp_path):
    """As in torch: what the saved groups lack is gone, or has its default; nothing is shared with what was loaded."""

    def drive(model, optimizer):
        seen, held = train(model, optimizer), optimizer.param_groups
        saved = optimizer.state_dict()
        rate = torch.tensor(3e-3)
        optimizer.param_groups[0] |= {"initial_lr": 0.5, "mine": "gone", "amsgrad": False}
        del saved["param_groups"][0]["maximize"]
        saved["param_groups"][0] |= {"lr": rate, "theirs": [1]}
        optimizer.load_state_dict(saved)
        rate.fill_(1e9)
        saved["param_groups"][0]["theirs"].append(2)
        held[0]["lr"] = 1e9  # a plain loop, too, has another list with other groups now
        held.clear()
        seen += train(model, optimizer)
        return seen, {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "fused")}

    same(drive, kind, tmp_path)


def named(model):
    return torch.optim.SGD([(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@pytest.mark.parametrize("of", [named, adamw])
def test_loading_keeps_names_and_what_the_class_requires(of, tmp_path):
    def drive(model, optimizer):
        train(model, optimizer)
        saved = optimizer.state_dict()
        for key in ("param_names", "nesterov", "fused", "decoupled_weight_decay"):
            saved["param_groups"][0].pop(key, None)
        optimizer.load_state_dict(saved)
        return {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}

    same(drive, "host", tmp_path, optimizer=of)


def test_states_that_were_held_over_a_load_are_refused(tmp_path):
    with tower_on("host", tmp_path) as (model, optimizer):
        train(model, optimizer)
        held = optimizer.state[model.head.weight]
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(outcore.UnsupportedError, match="or of states that were replaced since"):
            optimizer.state[model.head.weight] = held


@pytest.mark.parametrize("wrong", ["exp_avg", "step", "format", "groups"])
def test_a_load_that_is_refused_changes_nothing(wrong, tmp_path):
    with tower_on("host", tmp_path) as (model, optimizer):
        train(model, optimizer)
        groups, before = optimizer.param_groups, optimizer.state_dict()
        settings, saved = dict(groups[0]), optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 7.0
        if wrong == "format":
            saved["param_groups"][0]["state_format"] = "8bit"
        elif wrong == "groups":
            saved["param_groups"][0]["params"].pop()
        else:
            saved["state"][0]["exp_avg"].zero_()
            saved["state"][5][wrong] = torch.zeros(3, 2)
        with pytest.raises(outcore.ConfigError):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups is groups
        assert groups[0] == settings
        assert_same(before, optimizer.state_dict())
        train(model, optimizer)


@KIND
def test_param_groups_are_assigned(kind, tmp_path):
    """As a wrapper does after loading, which has groups of its own then; a scheduler follows."""

    def drive(model, optimizer):
        scheduler, seen = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), train(model, optimizer)
        first, *rest = optimizer.param_groups
        optimizer.param_groups = [{**first, "lr": 3e-3}]
        seen += train(model, optimizer)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 1.5e-3
        optimizer.param_groups.extend(rest)
        model.zero_grad()
        return seen + train(model, optimizer)

    def in_two(model):
        return torch.optim.AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters()}], lr=1e-2)

    same(drive, kind, tmp_path, optimizer=in_two)


def test_groups_that_cannot_be_assigned_are_refused(tmp_path):
    model = make()
    old = adamw(model)
    with prepared(model, old, "host", tmp_path) as (model, optimizer):
        groups = optimizer.param_groups
        first, other = groups[0], torch.nn.Parameter(torch.zeros(3))
        for wrong in ([{**first, "params": [other]}], [first, {**first, "params": [model.head.weight]}]):
            with pytest.raises(outcore.ConfigError, match="groups of parameters of the model, each once, but got"):
                optimizer.param_groups = wrong
            assert optimizer.param_groups is groups
        model.loss(batch()).backward()
        old.param_groups = [dict(first)]
        with pytest.raises(outcore.ConfigError, match="change param_groups of the optimizer that prepare returned"):
            optimizer.step()
        old.param_groups = groups
        optimizer.step()


def test_the_plan_prints_as_the_table_of_all_bytes(tmp_path):
    model = make()
    with prepared(model, adamw(model), "host", tmp_path) as (_, optimizer):
        plan = optimizer.plan
        assert str(plan) == plan_table(optimizer.model_spec, plan)
        assert "slots" in str(plan)
        plan.save(tmp_path / "plan.json")
        loaded = outcore.Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert str(loaded) == "precision fp32, 4 units", "a plan by itself knows no bytes"
