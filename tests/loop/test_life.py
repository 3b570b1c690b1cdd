"""Gathering, closing, preparing again, and processes that fork."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import outcore

from .rig import KINDS, Tower, adamw, batch, make, prepared, same, train

KIND = pytest.mark.parametrize("kind", KINDS)
NAME = "blocks.1.up.weight"


@KIND
def test_gathered_to_read(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        want = model.state_dict()
        for target in (
            model,
            model.blocks[1],
            model.get_parameter(NAME),
            [model.get_parameter(NAME), model.head.weight],
            model.blocks[1].parameters(),
        ):
            with outcore.gathered(target):
                assert torch.equal(model.get_parameter(NAME), want[NAME])
                assert type(model.get_parameter(NAME)) is nn.Parameter
                with outcore.gathered(model.blocks[1]):
                    assert torch.equal(model.get_parameter(NAME), want[NAME])
                assert torch.equal(model.get_parameter(NAME), want[NAME])
                assert torch.equal(model.state_dict()[NAME], want[NAME])
            if kind != "device":
                with pytest.raises(outcore.AbsentParameterError):
                    model.get_parameter(NAME).sum()
        with outcore.gathered(model), torch.no_grad():
            model.get_parameter(NAME).zero_()  # without write=True it is lost
            model.head.weight.zero_()
        assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())


@KIND
def test_gathered_to_write(kind, tmp_path):
    def drive(model, optimizer):
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

    same(drive, kind, tmp_path)


@KIND
def test_forward_and_backward_while_gathered(kind, tmp_path):
    def drive(model, optimizer):
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

    same(drive, kind, tmp_path)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_kept_weights_while_gathered(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path, policy="keep") as (model, _):
        with outcore.gathered(model):
            loss = model.loss(batch())
        loss.backward()
        loss = model.loss(batch())
        with outcore.gathered(model), pytest.raises(outcore.UnsupportedError, match=r"outside of outcore.gathered\(\)"):
            loss.backward()


@KIND
def test_step_while_gathered_is_refused_and_errors_pass_through(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
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
        assert torch.equal(model.state_dict()[NAME], want[NAME])  # what a failed block changed is not written
        optimizer.step()
        with pytest.raises(outcore.ConfigError, match="gathered: expected a model"), outcore.gathered(nn.Linear(2, 2)):
            pass


@KIND
def test_writing_between_forward_and_backward_is_refused(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, _):
        loss = model.loss(batch())
        with outcore.gathered(model.blocks[1], write=True), torch.no_grad():
            model.get_parameter(NAME).zero_()
        with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1'.*have changed since"):
            loss.backward()


@KIND
def test_use_after_close(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        model.loss(batch()).backward()
        outcore.close(model)
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
            except (outcore.OutcoreError, RuntimeError) as error:  # torch wraps what happens while it loads
                assert "closed" in str(error) or "not prepared" in str(error), what
            else:
                pytest.fail(f"{what} did not raise")
        assert all(p.grad is None for p in model.parameters())


@KIND
def test_backward_after_close(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, _):
        loss = model.loss(batch())
        outcore.close(model)
        with pytest.raises(outcore.OutcoreError, match="closed"):
            loss.backward()


@KIND
def test_an_error_in_the_body_closes(kind, tmp_path):
    model = make()
    with pytest.raises(ZeroDivisionError), prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        model.loss(batch()).backward()
        optimizer.step()
        raise ZeroDivisionError
    with pytest.raises(outcore.AbsentParameterError, match="closed"):
        model.head.weight.sum()
    assert list(tmp_path.iterdir()) == []


@KIND
def test_second_prepare_is_refused(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        outer = nn.ModuleDict({"inner": model})
        for again in (model, outer, model.blocks[1]):
            with pytest.raises(outcore.ConfigError, match=r"prepared|prepare\(\) already manages"):
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
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return batch(i, rows=1)[0]


@KIND
def test_forked_workers(kind, tmp_path):
    def drive(model, optimizer):
        losses = []
        for epoch in range(2):
            model.loss(batch(epoch)).backward()
            optimizer.step()  # workers fork while updates are under way
            optimizer.zero_grad()
            for ids in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
                loss = model.loss(ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return losses

    same(drive, kind, tmp_path)


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
budget = outcore.Budget(device="64MiB", host="64MiB", disk=sys.argv[1])
model, optimizer = outcore.prepare(model, optimizer, budget=budget)
model(torch.randn(2, 8)).sum().backward()
optimizer.step()
if sys.argv[2] == "error":
    raise ZeroDivisionError
import os
if os.fork() == 0:
    sys.exit(0)
os.wait()
model(torch.randn(2, 8)).sum().backward()
optimizer.step()
print(sum(t.sum() for _, t in outcore.named_tensors(model)).isfinite().item())
"""


def test_the_interpreter_ends_without_close(tmp_path):
    endings = {"error": 1, "fork": 0}
    running = {}
    for ending in endings:
        (tmp_path / ending).mkdir()
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / ending), ending]
        running[ending] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
