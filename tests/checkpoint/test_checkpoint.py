"""A checkpoint is a run's whole state at one step: written while training goes on, visible as a whole or not at all."""

from __future__ import annotations

import errno
import json
import random
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outside.calls import Call, watched
from plans import forced
from safetensors.torch import save_file

import outcore
from outcore.api import Prepared
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.checkpoint.training_state import load_weights
from outcore.core.errors import ConfigError, DiskError, UnsupportedError
from outcore.engine.checkpoint_saves import Save
from outcore.memory.files.checkpoint_file import CheckpointFile
from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint
from outcore.spec.manifest import Manifest

from . import small
from .test_training_state import state_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure_bf16": torch.bfloat16}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
@pytest.mark.parametrize(
    ("there", "here"), [("host", "disk"), ("disk", "device"), ("device", "disk"), ("device", "host")]
)
def test_a_run_goes_on_under_another_plan(there: str, here: str, precision: str, tmp_path: Path):
    def prepared(tier: str, seed: int) -> Any:
        model = small.build("llama", dtype=DTYPES[precision], seed=seed)
        return small.prepared(model, tmp_path, tier, precision=precision)

    folder = tmp_path / "checkpoints"
    with prepared(there, 0) as (model, optimizer):
        small.train(model, optimizer, range(3))
        save = outcore.save_checkpoint(model, optimizer, folder, step=3)
        want = small.train(model, optimizer, range(3, 7)), state_of(model, optimizer)
        assert save.wait() == folder / "step-00000003"
    with prepared(here, 1) as (model, optimizer):
        small.train(model, optimizer, range(2))  # other weights and states, to be overwritten
        assert outcore.load_checkpoint(model, optimizer, folder) == {"step": 3}
        got = small.train(model, optimizer, range(3, 7)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


@pytest.mark.parametrize("name", ["plain", "tied", "mixtral", "gpt2", "t5"])
def test_models(name: str, tmp_path: Path):
    """Frozen and mixed parameters, buffers, tied weights, experts."""
    with small.prepared(small.build(name), tmp_path, "disk") as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        want = state_of(model, optimizer)
        small.train(model, optimizer, range(2, 4))
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_the_library_reads_it_as_it_is(name: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    with small.prepared(small.build(name, dtype=torch.bfloat16), tmp_path, precision="bf16") as (model, optimizer):
        small.train(model, optimizer, range(2))
        path = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True).wait()
        want = dict(outcore.named_tensors(model))
    got = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    small.same({name: want[name] for name in got}, got)


def tied_by_hand() -> Any:
    """The library does not know of the tie, so it cannot save the model."""
    model = small.build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def with_own_state() -> Any:
    model = small.build("plain")
    kind = type(model.blocks[1].down)
    model.blocks[1].down.__class__ = type("Own", (kind,), {"get_extra_state": lambda _: {"it": 1}})
    model.register_buffer("more", torch.arange(5))
    return model


def with_prompts() -> Any:
    """Peft saves a table of them instead of the encoder that makes them."""
    from peft import PromptEncoderConfig, get_peft_model

    settings = {"num_virtual_tokens": 3, "encoder_hidden_size": 8}
    return get_peft_model(small.build("llama"), PromptEncoderConfig(task_type="CAUSAL_LM", **settings))


def with_more_than_adapters() -> Any:
    model = small.with_adapters(small.build("llama"))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    model.base_model.model.model.layers[0].register_buffer("more", torch.arange(5))
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft uses the old name
@pytest.mark.parametrize("build", [tied_by_hand, with_own_state, with_prompts, with_more_than_adapters])
def test_what_the_library_does_not_save_is_beside_its_files(build: Any, tmp_path: Path):
    with small.prepared(build(), tmp_path, "disk") as (model, optimizer):
        small.train(model, optimizer, range(2))
        path = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True).wait()
        assert (path / "rest.safetensors").is_file()
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
        small.train(model, optimizer, range(4, 5))
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


def test_parameters_that_no_group_has(tmp_path: Path):
    model = small.build("plain")
    optimizer = torch.optim.AdamW(model.blocks[0].parameters(), lr=0.1)
    with small.prepared(model, tmp_path, optimizer=optimizer) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


def test_small_state(tmp_path: Path):
    """Random generators continue; extra values come back unchanged."""
    extra = {
        "scheduler": {"base_lrs": [0.1, float("inf")], 3: (1, None), "$odd": True},
        "tensor": torch.arange(5, dtype=torch.int16),
        "array": np.eye(2),
        "number": np.float64(0.25),
        "nested": {"": [{}, (), []]},
    }
    with small.prepared(small.build("plain"), tmp_path) as (model, optimizer):
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=0, extra=extra, wait=True)
        want = torch.rand(3), random.random(), np.random.rand(3)  # noqa: NPY002
        got = outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        after = torch.rand(3), random.random(), np.random.rand(3)  # noqa: NPY002
    assert torch.equal(want[0], after[0])
    assert want[1] == after[1]
    assert np.array_equal(want[2], after[2])
    assert got.pop("step") == 0
    assert torch.equal(got.pop("tensor"), extra.pop("tensor"))
    assert np.array_equal(got.pop("array"), extra.pop("array"))
    assert got == extra
    assert type(got["number"]) is np.float64


@pytest.mark.parametrize("tier", small.TIERS)
def test_older_ones_are_removed(tier: str, tmp_path: Path):
    with small.prepared(small.build("plain"), tmp_path, tier) as (model, optimizer):
        for step in range(4):
            small.train(model, optimizer, range(step, step + 1))
            outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=step, keep=2)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000002", "step-00000003"]


def test_every_changed_byte_of_the_manifest_is_noticed(tmp_path: Path):
    with small.prepared(small.build("plain", num_blocks=1), tmp_path) as (model, optimizer):
        path = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True).wait()
        manifest = path / "manifest.json"
        text = manifest.read_bytes()
        json.loads(text)
        for i in range(0, len(text), 7):
            manifest.write_bytes(text[:i] + bytes([text[i] ^ 1 << i % 8]) + text[i + 1 :])
            with pytest.raises(ConfigError, match="cannot be used"):
                outcore.load_checkpoint(model, optimizer, tmp_path / "c")


@pytest.mark.parametrize("meta", [False, True])
def test_prepare_goes_on_from_a_checkpoint(meta: bool, tmp_path: Path):
    with small.prepared(small.build("plain", dtype=torch.bfloat16), tmp_path, precision="bf16") as (model, optimizer):
        frozen = {n: p.clone() for n, p in outcore.named_tensors(model) if n.endswith("up.bias")}
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, extra={"epoch": 1}, wait=True)
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    again = small.build("plain", dtype=torch.bfloat16, meta=meta, seed=1)
    for name, value in frozen.items():
        module, _, key = name.rpartition(".")
        again.get_submodule(module)._parameters[key] = torch.nn.Parameter(value, requires_grad=False)
    with small.prepared(again, tmp_path, "disk", precision="bf16", checkpoint=tmp_path / "c") as (model, optimizer):
        assert optimizer.resumed == {"step": 2, "epoch": 1}
        got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


def test_experts_that_are_saved_one_by_one_come_back_on_the_meta_device(tmp_path: Path):
    with small.prepared(small.build("mixtral"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        want = state_of(model, optimizer)
    model = small.build("mixtral", meta=True)
    with small.prepared(model, tmp_path, "disk", checkpoint=tmp_path / "c") as (model, optimizer):
        small.same(want, state_of(model, optimizer))


def test_bad_input_changes_nothing(tmp_path: Path):
    with small.prepared(small.build("plain"), tmp_path) as (model, optimizer):
        path = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=7, wait=True).wait()
        for arguments, message in (
            ({"step": -1}, "step to be an integer from 0 on, but got -1"),
            ({"step": 8, "keep": 0}, "keep to be an integer from 1 on, but got 0"),
            ({"step": 8, "extra": {"step": 1}}, "without 'step'"),
            ({"step": 8, "extra": {"a": [object()]}}, r"extra\['a'\]\[0\] is a builtins.object"),
        ):
            with pytest.raises(ConfigError, match=message):
                outcore.save_checkpoint(model, optimizer, tmp_path / "c", **arguments)
        assert list((tmp_path / "c").iterdir()) == [path]
        for folder, step, message in (
            (tmp_path / "none", None, "there is none"),
            (tmp_path / "c", 8, "a checkpoint of step 8"),
            (path / "unit-00001.safetensors", None, "there is none"),
        ):
            with pytest.raises(ConfigError, match=message):
                outcore.load_checkpoint(model, optimizer, folder, step=step)
    other = small.build("plain", seed=1)  # frozen parameters of a different base
    with small.prepared(other, tmp_path) as (model, optimizer):
        want = state_of(model, optimizer)
        with pytest.raises(ConfigError, match=r"'blocks\.0\.up\.bias' has other values"):
            outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))
    with (
        small.prepared(small.build("plain", num_blocks=2), tmp_path) as (model, optimizer),
        pytest.raises(ConfigError, match=r"is missing here and float32"),
    ):
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")


def test_of_trainers_checkpoints_those_without_the_whole_state_are_refused(tmp_path: Path):
    """None is removed: the Trainer knows which is the best."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    unfinished = UnfinishedCheckpoint(tmp_path / "c" / "checkpoint-9")
    (unfinished.path / "trainer_state.json").write_text("{}")
    unfinished.commit(lambda files: Manifest(step=9, files=files))
    with small.prepared(small.build("plain"), tmp_path) as (model, optimizer):
        with pytest.raises(ConfigError, match="this Trainer's has no states"):
            outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        with pytest.raises(ConfigError, match="it is a plain Trainer's"):
            outcore.load_checkpoint(model, optimizer, tmp_path / "checkpoint-1")
        with pytest.raises(ConfigError, match="expected weights in safetensors files .*, but there are none"):
            export_checkpoint(tmp_path / "c", tmp_path / "out", "hf")
        for step in (1, 2):
            with pytest.warns(UserWarning, match=r"has checkpoints of later steps than \d, up to checkpoint-9"):
                outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=step, keep=1, wait=True)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"checkpoint-9", "step-00000002"}


def test_a_model_is_exported_without_the_checkpoints_beside_it(tmp_path: Path):
    source = tmp_path / "c"
    (source / "checkpoint-3").mkdir(parents=True)
    (source / "checkpoint-3" / "optimizer.pt").touch()
    (source / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(ConfigError, match="expected a folder outside of"):
        export_checkpoint(source, source / "out", "hf")
    export_checkpoint(source, tmp_path / "out", "hf")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_one_that_failed_does_not_cost_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with small.prepared(small.build("plain"), tmp_path, "disk") as (model, optimizer):
        with monkeypatch.context() as patch:
            patch.setattr("outcore.memory.files.checkpoint_file._write_at", full)
            with pytest.raises(DiskError, match="ENOSPC"):
                outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        assert _fails_beside(model, optimizer, tmp_path / "c", monkeypatch)
        with pytest.raises(DiskError, match="ENOSPC"):
            outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=3)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000003"]


def _fails_beside(model: Any, optimizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Start a save whose commit fails while training goes on, and do not wait for it. Returns whether it failed."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedCheckpoint, "commit", fails)
        save = outcore.save_checkpoint(model, optimizer, folder, step=2)
        while not save.done:
            time.sleep(0.001)
    return save.error is not None


@pytest.mark.parametrize("how", ["close", "block", "error"])
def test_the_end_of_a_run_says_that_the_last_save_failed(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The failure is an error, everything is closed by then, and weights are ordinary ones."""
    error = KeyError("of the loop")
    with small.prepared(small.build("plain"), tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert _fails_beside(model, optimizer, tmp_path / "c", monkeypatch)
        block = Prepared(model, optimizer)
        if how == "error":
            block.__exit__(KeyError, error, None)
            assert "the last save failed: " in error.__notes__[0]
        else:
            with pytest.raises(DiskError, match="ENOSPC"):
                outcore.close(model) if how == "close" else block.__exit__(None, None, None)
        small.same(want, dict(model.state_dict()))
        outcore.close(model)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_who_saves_beside_training_waits_for_no_drive(tier: str, tmp_path: Path):
    """The caller syncs nothing, and bypasses the page cache for a single page only, to try direct I/O."""
    calls: list[tuple[str, str]] = []

    def see(call: Call, do: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            calls.append((call.name, Path(call.path).name))
        return do()

    with small.prepared(small.build("llama"), tmp_path, tier) as (model, optimizer):
        small.train(model, optimizer)
        with watched(tmp_path / "c", see):
            save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
        save.wait()
        assert ("write", "state.json") in calls
        assert [name for name in calls if name[0] in ("fsync", "pwrite")] == [("pwrite", ".direct")]


def test_ctrl_c_while_the_end_of_a_block_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Everything is closed without a second wait: the save is given up."""
    write, fail, go_on = CheckpointFile.write, Save.fail, threading.Event()
    main = threading.main_thread()
    monkeypatch.setattr(
        CheckpointFile, "write", lambda *args: (threading.current_thread() is main or go_on.wait(5), write(*args))
    )
    monkeypatch.setattr(Save, "fail", lambda *args: (fail(*args), go_on.set()))

    waited = []

    def interrupt(save: Save) -> None:
        waited.append(save)
        raise KeyboardInterrupt

    with small.prepared(small.build("plain"), tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer)
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
        monkeypatch.setattr(Save, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Prepared(model, optimizer).__exit__(None, None, None)
        assert optimizer.engine.is_closed
        assert len(waited) == 1
        small.same(want, dict(model.state_dict()))
    assert not list((tmp_path / "c").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with small.prepared(small.build("plain", num_blocks=1), tmp_path) as pair:
        yield pair


def test_models_and_optimizers_with_little_to_save(tmp_path: Path):
    """Parameters and buffers without elements, an optimizer without states, and learning rates that are tensors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    model[0].register_parameter("empty", torch.nn.Parameter(torch.empty(0, 3)))
    model[1].register_buffer("nothing", torch.empty(0))
    first, second = (list(layer.parameters()) for layer in model)
    groups = [{"params": first}, {"params": second, "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    options: dict[str, Any] = {"units": [torch.nn.Linear]}
    plan = forced(model, optimizer, "disk", depth=1, **options)[1]
    options |= {"budget": outcore.Budget(disk=str(tmp_path)), "device": small.DEVICE}
    with outcore.prepare(model, optimizer, plan=plan, **options) as (model, optimizer):

        def step() -> None:
            model(torch.ones(2, 3, device=small.DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        want = state_of(model, optimizer)
        optimizer.param_groups[1]["lr"].fill_(7.0)
        step()
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        small.same(want, state_of(model, optimizer))
        assert float(optimizer.param_groups[1]["lr"]) == 0.5


def with_buffer(value: torch.Tensor, **options: Any) -> Any:
    model = small.build("plain", num_blocks=1)
    model.blocks[0].register_buffer("more", value, **options)
    return model


def test_expanded_buffers(tmp_path: Path):
    """Elements share memory."""
    with small.prepared(with_buffer(torch.ones(2, 1).expand(2, 3)), tmp_path) as (model, optimizer):
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        outcore.save_pretrained(model, tmp_path / "weights")
        buffer = model.blocks[0].more
        for load in (
            lambda: outcore.load_checkpoint(model, optimizer, tmp_path / "c"),
            lambda: load_weights(model, tmp_path / "weights"),
        ):
            buffer[:, :1].fill_(2.0)
            load()
            assert torch.equal(buffer.cpu(), torch.ones(2, 3))
        assert model.blocks[0].more.stride() == (1, 0)


def odd_buffers() -> list[Any]:
    """Return buffers that a save refuses, and what it says of each."""
    on_cpu = pytest.mark.skipif(small.DEVICE != "cpu", reason="the simulated GPU has no complex numbers")
    odd = [pytest.param(torch.ones(3, dtype=torch.complex64), "is torch.complex64", marks=on_cpu, id="complex")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about sparse tensors
        for layout in (torch.sparse_coo, torch.sparse_csr):
            odd.append(pytest.param(torch.eye(3).to_sparse(layout=layout), f"has the layout {layout}", id=str(layout)))
    return odd


@pytest.mark.parametrize(("value", "what"), odd_buffers())
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
def test_buffers_that_no_file_holds_are_refused_by_name(value: torch.Tensor, what: str, tmp_path: Path):
    with small.prepared(with_buffer(value), tmp_path) as (model, optimizer):
        with pytest.raises(UnsupportedError, match=rf"'blocks.0.more' {what}; .* persistent=False"):
            outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        with pytest.raises(UnsupportedError, match=rf"'blocks.0.more' {what}; .* persistent=False"):
            outcore.save_pretrained(model, tmp_path / "weights")
    assert not list((tmp_path / "c").iterdir())
    with small.prepared(with_buffer(value, persistent=False), tmp_path) as (model, optimizer):
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)


def test_small_state_of_schedulers(run: Any, tmp_path: Path):
    """The state of torch's schedulers comes back and continues."""
    from torch.optim import lr_scheduler

    makers = {
        "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
        "in turn": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
        ),
    }
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    states = {name: make(plain).state_dict() for name, make in makers.items()}
    outcore.save_checkpoint(*run, tmp_path / "c", step=1, extra=states, wait=True)
    got = outcore.load_checkpoint(*run, tmp_path / "c")
    assert {name: got[name] for name in states} == states
    assert type(got["multistep"]["milestones"]) is type(states["multistep"]["milestones"])


@pytest.mark.parametrize("value", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), {1, 2}, object()])
def test_small_state_that_cannot_be_saved(value: Any, run: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"extra\['x'\] is a"):
        outcore.save_checkpoint(*run, tmp_path / "c", step=1, extra={"x": value})
    assert not (tmp_path / "c").exists()
