"""Weights on the device are saved while training goes on, and no edit can reach what is still to be copied."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn

import outcore
from outcore.core.errors import UnsupportedError
from outcore.device.device_copies import sum_of_words
from outcore.engine import engine_saves as saves
from outcore.engine.engine import engine_of
from outcore.engine.saved_weights import SavedWeights
from outcore.memory.files.checkpoint_file import CheckpointFile

from . import small
from .test_library_files import saved_beside
from .test_training_state import state_of

PLANS = ("device", "plain", "resident")
"""All on the device, updated unit by unit or as in a plain loop; weights on the device and the rest on the host."""


@contextmanager
def prepared(kind: str, model: Any, folder: Path, **options: Any) -> Iterator[Any]:
    optimizer = small.adamw(model)
    homes = {"resident": lambda _: ("device", "host", "host")}.get(kind, "device")
    policy = "keep" if kind == "plain" else "recompute"
    plan = forced(model, optimizer, homes, policy=policy, precision=options.get("precision"))[1]
    plan = dataclasses.replace(plan, plain=True, pools=()) if kind == "plain" else plan
    with outcore.prepare(model, optimizer, plan=plan, device=small.DEVICE, **options) as pair:
        yield pair


class Gate:
    """Holds back all writes of the lanes until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened, self.held = threading.Event(), []
        write = CheckpointFile.write

        def held(file: CheckpointFile, *args: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.held.append(self.opened.wait(60))
            write(file, *args)

        patch.setattr(CheckpointFile, "write", held)


def loss_of(model: Any, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return model(**small.batch(step)).loss


@pytest.mark.parametrize("what", ["checkpoint", "library"])
@pytest.mark.parametrize("name", ["llama", "plain", "mixtral"])
@pytest.mark.parametrize("kind", PLANS)
def test_training_goes_on(kind: str, name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A whole forward and backward run before a byte of any home is written."""
    with prepared(kind, small.build(name), tmp_path) as (model, optimizer):
        small.train(model, optimizer, range(2))
        assert not [u.label for u in engine_of(model, "a test").units if u.presence.watch.is_shared]
        want = state_of(model, optimizer)
        outcore.save_pretrained(model, tmp_path / "want")
        gate = Gate(monkeypatch)
        if what == "checkpoint":
            save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2)
        else:
            save = saved_beside(model, optimizer, tmp_path)
        loss = loss_of(model, 2)
        with torch.no_grad():
            model(**small.batch(1))
        loss.backward()
        gate.opened.set()
        optimizer.step()
        optimizer.zero_grad()
        small.train(model, optimizer, range(3, 4))
        save.wait()
        assert gate.held
        assert all(gate.held)
        if what == "checkpoint":
            outcore.load_checkpoint(model, optimizer, tmp_path / "c")
            small.same(want, state_of(model, optimizer))
        else:
            small.same(_by_name(tmp_path / "want"), _by_name(tmp_path / "c"))
    with prepared(kind, small.build(name), tmp_path) as (model, optimizer):
        losses = small.train(model, optimizer, range(3))
        assert torch.equal(losses[2], loss.detach())


def _by_name(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    return dict(sorted({name: tensor for path in files for name, tensor in load_file(path).items()}.items()))


def _replace(param: nn.Parameter) -> None:
    param.data = torch.zeros_like(param.data)


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "mul_": lambda p: p.mul_(3),
    "data": lambda p: p.data.fill_(7),
    "replaced": _replace,
    "detach": lambda p: p.detach().zero_(),
    "view": lambda p: p.view(-1)[1:3].zero_(),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "init": nn.init.ones_,
    "setitem": lambda p: p.__setitem__(0, 5.0),
    "out": lambda p: torch.add(p, 1.0, out=p),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", PLANS)
def test_who_edits_waits(kind: str, edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Edits come between steps and after a forward, in a unit and in the root."""
    with prepared(kind, small.build("plain"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        want = state_of(model, optimizer)
        gate, wait = Gate(monkeypatch), SavedWeights.wait
        monkeypatch.setattr(SavedWeights, "wait", lambda *args: (gate.opened.set(), wait(*args)))
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
        loss = loss_of(model, 1)
        with torch.no_grad():
            for param in (model.embed.weight, model.blocks[1].down.weight):
                EDITS[edit](param)
        edited = model.blocks[1].down.weight.detach().clone()
        gate.opened.set()
        save.wait()
        assert all(gate.held)
        assert torch.equal(model.blocks[1].down.weight, edited)
        del loss
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))


@pytest.mark.parametrize("kind", PLANS)
def test_an_edit_that_came_before_is_saved(kind: str, tmp_path: Path):
    """On an accelerator the edit may still be queued."""
    with prepared(kind, small.build("plain"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        with torch.no_grad():
            for param in (model.embed.weight, model.blocks[1].down.weight):
                if param.is_cuda:
                    torch.cuda._sleep(10**9)
                param.mul_(3)
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
        want = state_of(model, optimizer)
        save.wait()
        small.train(model, optimizer)
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))


@pytest.mark.parametrize("kind", PLANS)
def test_who_has_kept_the_data(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If taking ``.data`` is seen, the save waits for the unit. If not, the edit fails it, and the next save waits."""
    with prepared(kind, small.build("plain"), tmp_path) as (model, optimizer):
        kept = [model.embed.weight.data, model.blocks[1].down.weight.data]
        small.train(model, optimizer)
        if kind != "resident":
            with monkeypatch.context() as patch:
                gate = Gate(patch)
                save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
                kept[1].add_(1)
                gate.opened.set()
                with pytest.raises(UnsupportedError, match=r"blocks\.1' that stay .* code that kept p"):
                    save.wait()
            assert not list((tmp_path / "c").iterdir())
        want, done, write = state_of(model, optimizer), [], CheckpointFile.write

        def noted(file: CheckpointFile, *args: Any) -> None:
            write(file, *args)
            done.append(file.path.name)

        monkeypatch.setattr(CheckpointFile, "write", noted)
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
        assert "model.safetensors" in done
        kept[1].zero_()
        save.wait()
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))


class Clamped(small.Block):
    """Clamps its own weights in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.down.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


def clamped() -> Any:
    torch.manual_seed(0)
    model = small.Plain()
    model.blocks[1] = Clamped(19)
    return model.to(small.DEVICE).train()


@pytest.mark.parametrize("kind", PLANS)
def test_a_unit_that_edits_itself(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is known as such from its first step on. A save before that fails instead of mixing old and new values."""
    with prepared(kind, clamped(), tmp_path) as (model, optimizer):
        with monkeypatch.context() as patch:
            gate = Gate(patch)
            save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=0)
            loss_of(model, 0)
            gate.opened.set()
            with pytest.raises(UnsupportedError, match=r"weights of unit 'blocks\.1' that stay as they are"):
                save.wait()
        assert not list((tmp_path / "c").iterdir())
        small.train(model, optimizer, range(2))
        want = state_of(model, optimizer)
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2)
        small.train(model, optimizer, range(2, 4))
        save.wait()
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))
    with prepared(kind, clamped(), tmp_path) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=4)
        small.train(model, optimizer, range(2, 3))


class Halved(small.Block):
    """Changes its own weights when it is told to, unseen through ``.data``."""

    is_due = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_due:
            self.down.weight.data.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_edit_behind_an_update_that_was_on_its_way(is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A unit's first edit fails the save, which would have half of it, whether the copy or the call comes first."""
    torch.manual_seed(0)
    model: Any = small.Plain()
    model.blocks[1] = block = Halved(19)
    with prepared("resident", model.to(small.DEVICE).train(), tmp_path) as (model, optimizer):
        small.train(model, optimizer, range(2))
        monkeypatch.setattr(saves, "_is_on_its_way", lambda _: is_late)
        gate = Gate(monkeypatch)
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2)
        block.is_due = True
        loss_of(model, 2)
        gate.opened.set()
        with pytest.raises(UnsupportedError, match=r"weights of unit 'blocks\.1' that stay as they are"):
            save.wait()


@pytest.mark.parametrize("kind", PLANS)
def test_everything_may_be_asked_for_meanwhile(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gathering, saving, copying and closing wait or read; training's bits are those of a run without saves."""
    asks: list[Callable[[Any, Any], object]] = [
        lambda model, _: model.state_dict(),
        lambda model, _: [repr(p) for p in model.parameters()],
        lambda model, _: outcore.save_pretrained(model, tmp_path / "p"),
        lambda _, optimizer: optimizer.state_dict(),
        lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
        lambda model, _: model.load_state_dict(model.state_dict()),
        lambda model, optimizer: outcore.save_checkpoint(model, optimizer, tmp_path / "d", step=9),
    ]

    def run(*, saves: bool) -> Any:
        with prepared(kind, small.build("plain"), tmp_path) as (model, optimizer):
            for i, ask in enumerate(asks):
                small.train(model, optimizer, range(i, i + 1))
                if saves:
                    outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=i)
                    loss_of(model, 50)
                    ask(model, optimizer)
                else:
                    loss_of(model, 50)
                with outcore.gathered(model, write=True), torch.no_grad():
                    model.blocks[0].down.weight[0] += 0.5
            if saves:
                outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=99)
            found = {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}
        return found

    small.same(run(saves=False), run(saves=True))


def test_sums_see_rows_that_change_places():
    """Rows that are swapped, reversed, shifted or negated change the sum."""
    values = torch.randn(64, 1001)
    before, moved = sum_of_words(values.flatten().view(torch.uint8)), values.clone()
    moved[[3, 41]] = values[[41, 3]]
    for other in (moved, values.flip(0), values.roll(1), -values):
        assert not torch.equal(sum_of_words(other.flatten().view(torch.uint8)), before)
