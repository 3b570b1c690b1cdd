"""Gathering, closing, preparing again, and processes that fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from unittest.mock import Mock

import nursery
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import outcore
from outcore.engine.unit.unit import Beneath, Presence
from outcore.engine.values.access import ValueAccess

from .rig import (
    DEVICE,
    KINDS,
    RESIDENT,
    Tower,
    adamw,
    agrees,
    assert_same,
    batch,
    make,
    prepared,
    same,
    tower_on,
    train,
)

KIND = pytest.mark.parametrize("kind", KINDS)
NAME = "blocks.1.up.weight"


@KIND
def test_gathered_to_read(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        want = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        for target in (
            model,
            model.blocks[1],
            model.get_parameter(NAME),
            [model.get_parameter(NAME), model.head.weight],
            model.blocks[1].parameters(),
        ):
            with outcore.gathered(target):
                assert torch.equal(model.get_parameter(NAME).cpu(), want[NAME])
                assert type(model.get_parameter(NAME)) is nn.Parameter
                with outcore.gathered(model.blocks[1]):
                    assert torch.equal(model.get_parameter(NAME).cpu(), want[NAME])
                assert torch.equal(model.get_parameter(NAME).cpu(), want[NAME])
                assert torch.equal(model.state_dict()[NAME].cpu(), want[NAME])
            if kind not in RESIDENT:
                with pytest.raises(outcore.AbsentParameterError):
                    model.get_parameter(NAME).sum()
        with outcore.gathered(model), torch.no_grad():
            model.get_parameter(NAME).zero_()  # lost without write=True
            model.head.weight.zero_()
        assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())


@agrees(*KINDS)
def test_gathered_to_write(model, optimizer):
    train(model, optimizer, 1)
    gathered = outcore.gathered if hasattr(optimizer, "engine") else None
    with torch.no_grad():
        if gathered is None:
            model.get_parameter(NAME).mul_(0.5)
            model.blocks[1].shift.add_(1)
            model.head.bias.data = torch.ones(31)
            model.blocks[0].norm.weight.fill_(0.75)
        else:
            with gathered([model.get_parameter(NAME), model.head.bias], write=True):
                model.get_parameter(NAME).mul_(0.5)
                model.blocks[1].shift.add_(1)
                model.head.bias.data = torch.ones(31)
            with (
                gathered(model),
                gathered(model.blocks[0], write=True),
            ):  # written although the outer one does not write
                model.blocks[0].norm.weight.fill_(0.75)
    return train(model, optimizer)


@agrees(*KINDS)
def test_forward_and_backward_while_gathered(model, optimizer):
    gathered = outcore.gathered if hasattr(optimizer, "engine") else lambda target: torch.enable_grad()
    with gathered(model):
        inside = model.loss(batch())
        inside.backward()
    before = model.loss(batch(1))
    with gathered(model.blocks[1]):
        before.backward()
        after = model.loss(batch(2))
    after.backward()
    optimizer.step()
    return inside, before, after


@agrees(*KINDS, "host keep")
def test_a_graph_over_gathered_parameters_is_walked_after_the_block(model, optimizer):
    gathered = outcore.gathered if hasattr(optimizer, "engine") else lambda target: nullcontext()
    loss = model.loss(batch())
    with gathered(model.blocks), gathered(model):
        norms = sum(p.pow(2).sum() for p in model.parameters())
        inside = model.loss(batch(1))
    (loss + norms).backward()
    inside.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return loss, norms, inside, grads


@pytest.mark.parametrize("kind", ["plain loop", *KINDS])
def test_a_graph_over_parameters_that_the_block_changes_is_refused(kind, tmp_path):
    model, is_plain = make(), kind == "plain loop"
    with nullcontext() if is_plain else prepared(model, adamw(model), kind, tmp_path):
        with nullcontext() if is_plain else outcore.gathered(model):
            norm = model.get_parameter(NAME).pow(2).sum()
            with torch.no_grad():
                model.get_parameter(NAME).mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|gathered: .* was changed in place"):
            norm.backward()


def double(model, factor=2.0):
    with torch.no_grad():
        model.get_parameter(NAME).mul_(factor)


@pytest.mark.parametrize("when", ["before the block", "inside, before the edit", "between two edits"])
@KIND
def test_a_graph_is_not_walked_with_weights_that_the_block_changed(kind, when, tmp_path):
    """Also when recomputes are no longer checked by their results."""
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 9)
        loss = model.loss(batch())
        with outcore.gathered(model):
            if when == "between two edits":
                double(model)
            loss = loss if when == "before the block" else model.loss(batch())
            double(model, 0.5)
            if when == "between two edits":
                model.loss(batch()).backward()  # with the weights of its forward
            else:
                with pytest.raises(RuntimeError, match=r"modified by an inplace operation|have changed since"):
                    loss.backward()
        if when == "between two edits":
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|have changed since"):
                loss.backward()
        optimizer.zero_grad()
        train(model, optimizer, 1)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_kept_weights_while_gathered(kind, tmp_path):
    with tower_on(kind, tmp_path, policy="keep") as (model, _):
        with outcore.gathered(model):
            loss = model.loss(batch())
        loss.backward()
        loss = model.loss(batch())
        with outcore.gathered(model), pytest.raises(outcore.UnsupportedError, match=r"outside of outcore.gathered\(\)"):
            loss.backward()


@KIND
def test_step_while_gathered_is_refused_and_errors_pass_through(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        want = model.state_dict()
        model.loss(batch()).backward()
        with (
            outcore.gathered(model.blocks[0]),
            pytest.raises(outcore.UnsupportedError, match="outside of outcore.gathered"),
        ):
            optimizer.step()
        with pytest.raises(ZeroDivisionError), outcore.gathered(model, write=True):
            with torch.no_grad():
                model.get_parameter(NAME).zero_()
            raise ZeroDivisionError
        assert torch.equal(model.state_dict()[NAME], want[NAME])  # changes by a failed block are not written
        optimizer.step()
        with pytest.raises(outcore.ConfigError, match="gathered: expected a model"), outcore.gathered(nn.Linear(2, 2)):
            pass


@KIND
def test_writing_between_forward_and_backward_is_refused(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, _):
        loss = model.loss(batch())
        with outcore.gathered(model.blocks[1], write=True), torch.no_grad():
            model.get_parameter(NAME).zero_()
        with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1'.*have changed since"):
            loss.backward()


@KIND
def test_use_after_close(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        model.loss(batch()).backward()
        outcore.close(model, keep_weights=False)
        outcore.close(model)
        optimizer.close()
        uses = {
            "forward": lambda: model(batch()),
            "step": optimizer.step,
            "state_dict": model.state_dict,
            "optimizer.state_dict": optimizer.state_dict,
            "named_tensors": lambda: list(outcore.named_tensors(model)),
            "gathered": lambda: outcore.gathered(model).__enter__(),
            "read": lambda: model.head.weight.sum(),
            "read block": lambda: model.get_parameter(NAME).sum(),
            "load": lambda: (
                model.load_state_dict({}, strict=False)
                and model.load_state_dict({NAME: torch.zeros(29, 13)}, strict=False)
            ),
            "deepcopy": lambda: __import__("copy").deepcopy(model),
        }
        for what, use in uses.items():
            try:
                use()
            except (outcore.OutcoreError, RuntimeError) as error:  # torch wraps errors while it loads
                assert "closed" in str(error) or "not prepared" in str(error), what
            else:
                pytest.fail(f"{what} did not raise")
        assert all(p.grad is None for p in model.parameters())


@KIND
def test_backward_after_close(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, _):
        loss = model.loss(batch())
        outcore.close(model)
        with pytest.raises(outcore.OutcoreError, match="closed"):
            loss.backward()


@KIND
def test_an_error_in_the_body_closes(kind, tmp_path):
    model = make()
    with pytest.raises(ZeroDivisionError), prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        torch.manual_seed(5)
        model.loss(batch()).backward()
        optimizer.step()
        raise ZeroDivisionError
    plain = make()
    plain_optimizer = adamw(plain, fused=True)
    torch.manual_seed(5)
    plain.loss(batch()).backward()
    plain_optimizer.step()
    assert_same(dict(plain.state_dict()), dict(model.state_dict()))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_the_body_ends_at_once(tmp_path):
    model = make()
    with pytest.raises(KeyboardInterrupt), prepared(model, adamw(model), "disk", tmp_path) as (model, _):
        raise KeyboardInterrupt
    with pytest.raises(outcore.AbsentParameterError, match="closed"):
        model.head.weight.sum()
    assert list(tmp_path.iterdir()) == []


def test_states_go_on_in_another_optimizer(tmp_path):
    model = make()
    mine, others = adamw(model), adamw(model)
    with prepared(model, mine, "host", tmp_path) as (_, optimizer):
        train(model, optimizer, 1)
        kept = optimizer.state_dict()
    del optimizer
    with pytest.raises(
        outcore.ConfigError, match="but this AdamW was prepared before, .* the optimizer that prepare returns"
    ):
        outcore.prepare(model, mine)
    plain = make()
    plain.load_state_dict(model.state_dict())
    plains = adamw(plain, fused=True)
    others.load_state_dict(kept)
    kept["param_groups"][0]["fused"] = True  # ours do not say so; a fused optimizer has its steps on the device
    plains.load_state_dict(kept)
    with prepared(model, others, "disk", tmp_path) as (_, optimizer):
        torch.manual_seed(5)
        got = train(model, optimizer)
    torch.manual_seed(5)
    assert_same(train(plain, plains), got)


@KIND
def test_second_prepare_is_refused(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        outer = nn.ModuleDict({"inner": model})
        for again in (model, outer, model.blocks[1]):
            with pytest.raises(outcore.ConfigError, match=r"prepared|not inside it"):
                outcore.prepare(again, torch.optim.AdamW(model.blocks[1].parameters()))
        train(model, optimizer, 1)


@KIND
def test_dropped_unclosed(kind, tmp_path):
    model = make()
    prepare = prepared(model, adamw(model), kind, tmp_path)
    model, optimizer = prepare.__enter__()
    train(model, optimizer, 1)
    gone = weakref.ref(optimizer.engine)
    del model, optimizer
    prepare.gen.close()
    del prepare
    gc.collect()
    assert gone() is None
    assert list(tmp_path.iterdir()) == []


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [batch(i, rows=1)[0].cpu() for i in range(6)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@agrees(*KINDS)
def test_forked_workers(model, optimizer):
    losses = []
    for epoch in range(2):
        model.loss(batch(epoch)).backward()
        optimizer.step()  # workers fork while updates are under way
        optimizer.zero_grad()
        for ids in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            loss = model.loss(ids.to(DEVICE))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("ending", ["collects", "exits"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_touches_nothing_of_its_parent(ending, tmp_path):
    def drive(model, optimizer):
        if hasattr(optimizer, "engine"):
            model.loss(batch(4)).backward()
            optimizer.zero_grad()
            child = os.fork()
            if child == 0:
                try:
                    if ending == "collects":
                        del model, optimizer
                        gc.collect()
                    else:
                        outcore.close(model)
                finally:
                    os._exit(0)
            pid, status = os.waitpid(child, 0)
            assert status == 0
        else:
            model.loss(batch(4)).backward()
            optimizer.zero_grad()
        return train(model, optimizer)

    same(drive, "disk", tmp_path)


SCRIPT = """
import sys, torch, outcore
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(2, 8, device="cuda" if torch.cuda.is_available() else "cpu")
budget = outcore.Budget(device="64MiB", host="64MiB", disk=sys.argv[1])
model, optimizer = outcore.prepare(model, optimizer, budget=budget)
model(x).sum().backward()
optimizer.step()
if sys.argv[2] == "error":
    raise ZeroDivisionError
import os
if os.fork() == 0:
    sys.exit(0)
os.wait()
model(x).sum().backward()
optimizer.step()
print(sum(t.sum() for _, t in outcore.named_tensors(model)).isfinite().item())
"""


def test_the_interpreter_ends_without_close(tmp_path):
    endings = {"error": 1, "fork": 0}
    running = {}
    for ending in endings:
        (tmp_path / ending).mkdir()
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / ending), ending]
        running[ending] = nursery.Whole(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for ending, process in running.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == endings[ending], err
        assert ("ZeroDivisionError" in err) == (ending == "error")
        assert "Exception ignored" not in err, err
        assert out == ("True\n" if ending == "fork" else "")
        assert list((tmp_path / ending).iterdir()) == []


def test_without_an_optimizer(tmp_path):
    plain, model = make().eval(), make().eval()
    model.requires_grad_(False)
    with prepared(model, None, "disk", tmp_path) as (model, optimizer):
        assert optimizer is None
        with torch.no_grad():
            assert torch.equal(model(batch()), plain(batch()))
        assert torch.equal(model(batch()), plain(batch()))
        x = torch.randn(2, 13, requires_grad=True)
        model.blocks[0](x).sum().backward()
        (want,) = torch.autograd.grad(plain.blocks[0](x).sum(), x)
        assert torch.equal(x.grad, want)


def test_units_as_a_class(tmp_path):
    same(lambda m, o: train(m, o), "disk", tmp_path, units=[type(Tower().blocks[0])])


@KIND
def test_prepared_again_after_close(kind, tmp_path):
    """Two stages with an optimizer each, as two plain loops over one model."""

    def stages(prepare):
        model, seen = make(), []
        torch.manual_seed(5)
        for seed in (0, 7):
            with prepare(model) as (_, optimizer):
                seen.append(train(model, optimizer, seed=seed))
        return seen, model

    want, plain = stages(lambda model: nullcontext((model, adamw(model, fused=True))))
    got, model = stages(lambda model: prepared(model, adamw(model), kind, tmp_path))
    assert_same(want, got)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (type(ours), ours.requires_grad, ours.device) == (type(theirs), theirs.requires_grad, theirs.device)
    after = []
    for one in (plain, model):
        torch.manual_seed(6)
        after.append(train(one, adamw(one, fused=True)))
    assert_same(*after)


def test_a_module_s_own_methods_are_there_again_after_close(tmp_path):
    model = make()
    own = {"__deepcopy__": lambda memo: "mine", "_apply": Mock(), "_load_from_state_dict": Mock()}
    layer = model.blocks[0].up
    layer.__dict__.update(own)
    with prepared(model, adamw(model), "host", tmp_path):
        assert layer.__dict__["__deepcopy__"] is not own["__deepcopy__"]
    assert {name: layer.__dict__[name] for name in own} == own


def test_what_was_frozen_to_evaluate_is_trained_again(tmp_path):
    model = make()
    want = {name: param.requires_grad for name, param in model.named_parameters()}
    assert set(want.values()) == {True, False}
    with prepared(model, None, "host", tmp_path):
        assert not any(p.requires_grad for p in model.parameters())
    assert {name: param.requires_grad for name, param in model.named_parameters()} == want


def test_close_that_cannot_keep_weights_changes_nothing(tmp_path, monkeypatch):
    def job(model, optimizer):
        seen = train(model, optimizer, 1)
        if not hasattr(optimizer, "plan"):
            return seen, train(model, optimizer)
        with outcore.gathered(model), pytest.raises(outcore.OutcoreError, match="is inside outcore.gathered"):
            outcore.close(model)
        with monkeypatch.context() as patched:
            patched.setattr("outcore.checkpoint.weights.model_values.host_free_bytes", lambda: 1000)
            with pytest.raises(outcore.OutcoreError, match=r"they take .* of host memory, .*keep_weights=False"):
                outcore.close(model)
            patched.setattr("outcore.checkpoint.weights.model_values.host_free_bytes", lambda: 2**40)
            for error in (KeyboardInterrupt, MemoryError):
                patched.setattr(ValueAccess, "read_weight", Mock(side_effect=error))
                with pytest.raises(error):
                    outcore.close(model)
        return seen, train(model, optimizer)

    same(job, "disk", tmp_path)


def test_an_interrupt_while_closing_keeps_the_weights(tmp_path, monkeypatch):
    model = make()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    with prepared(model, adamw(model), "host", tmp_path) as (model, optimizer):
        close = optimizer.engine.close
        monkeypatch.setattr(optimizer.engine, "close", lambda: (close(), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            outcore.close(model)
    assert_same(want, dict(model.state_dict()))


def test_an_interrupt_while_closing_does_not_stop_the_rest(tmp_path, monkeypatch):
    model = make()
    with prepared(model, adamw(model), "device", tmp_path):
        hide, calls = Presence.hide, []

        def interrupted(presence, **options):
            calls.append(presence)
            if len(calls) == 2:
                raise KeyboardInterrupt
            hide(presence, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Presence, "hide", interrupted)
            with pytest.raises(KeyboardInterrupt):
                outcore.close(model, keep_weights=False)
    assert sum(presence.now is Beneath.ABSENT for presence in calls) == len(calls) - 1 == len(model.blocks)


def test_the_end_of_a_block_closes_in_any_case(tmp_path, monkeypatch):
    model = make()
    with pytest.warns(UserWarning, match="are gone with the end of its block: they take"):
        with prepared(model, adamw(model), "host", tmp_path):
            monkeypatch.setattr("outcore.checkpoint.weights.model_values.host_free_bytes", lambda: 1000)
    with pytest.raises(outcore.ConfigError, match="closed without its weights .load what was saved with from_pretra"):
        outcore.prepare(model, adamw(model))
    assert list(tmp_path.iterdir()) == []
