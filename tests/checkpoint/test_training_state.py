"""A training state is saved to a directory and loaded under any plan, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.checkpoint.training_state import has_states, load_states, load_weights
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.values.access import ValueAccess
from outcore.memory.files.weights_file import WeightsDirectory, write_safetensors

from . import small

MODELS = ["llama", "tied", "mixtral"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "pure_bf16": torch.bfloat16}


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """All weights by name, and states by index."""
    states = optimizer.state_dict()
    flat = {f"{i}.{k}": v for i, values in states["state"].items() for k, v in values.items()}
    return {**dict(outcore.named_tensors(model)), **flat}


def save(model: Any, optimizer: Any, folder: Path) -> Path:
    outcore.save_pretrained(model, folder)
    small.save_states(optimizer, folder)
    return folder


@pytest.mark.parametrize(
    ("there", "here", "precision"),
    [
        *(("host", "disk", "bf16"), ("disk", "device", "bf16"), ("device", "host", "bf16")),
        *(("host", "disk", "pure_bf16"), ("disk", "device", "fp32")),
    ],
)
def test_a_run_goes_on_under_another_plan(there: str, here: str, precision: str, tmp_path: Path):
    def prepared(tier: str, seed: int) -> Any:
        model = small.build("llama", dtype=DTYPES[precision], seed=seed)
        return small.prepared(model, tmp_path, tier, precision=precision)

    with prepared(there, 0) as (model, optimizer):
        small.train(model, optimizer, range(3))
        save(model, optimizer, tmp_path / "checkpoint")
        want = small.train(model, optimizer, range(3, 6)), state_of(model, optimizer)
    with prepared(here, 1) as (model, optimizer):
        small.train(model, optimizer, range(2))  # other weights and states, to be overwritten
        load_weights(model, tmp_path / "checkpoint")
        load_states(optimizer, tmp_path / "checkpoint")
        got = small.train(model, optimizer, range(3, 6)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


@pytest.mark.parametrize("name", MODELS)
def test_states_come_back(name: str, tmp_path: Path):
    with small.prepared(small.build(name), tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer, range(2))
        want = state_of(model, optimizer)
        save(model, optimizer, tmp_path / "checkpoint")
        small.train(model, optimizer, range(2, 4))
        load_weights(model, tmp_path / "checkpoint")
        load_states(optimizer, tmp_path / "checkpoint")
        small.same(want, state_of(model, optimizer))


def test_weights_alone_renew_masters(tmp_path: Path):
    """A step after loading weights starts from what was loaded, not from an older master."""
    model = small.build("llama", dtype=torch.bfloat16)
    with small.prepared(model, tmp_path, "disk", precision="bf16") as (model, optimizer):
        outcore.save_pretrained(model, tmp_path / "first")
        first = dict(outcore.named_tensors(model))
        small.train(model, optimizer, range(3))
        load_weights(model, tmp_path / "first")
        small.same(first, dict(outcore.named_tensors(model)))
        masters = [values["master"] for values in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(m.bfloat16(), w) for m, w in zip(masters, first.values(), strict=True))


def test_adapters_alone(tmp_path: Path):
    def build() -> Any:
        return small.with_adapters(small.build("llama"))

    with small.prepared(build(), tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer, range(2))
        save(model, optimizer, tmp_path / "checkpoint")
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert not (tmp_path / "checkpoint" / "model.safetensors").exists()
    with small.prepared(build(), tmp_path, "disk") as (model, optimizer):
        load_weights(model, tmp_path / "checkpoint")
        load_states(optimizer, tmp_path / "checkpoint")
        got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


def test_buffers_come_back(tmp_path: Path):
    with small.prepared(small.build("plain"), tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer)
        outcore.save_pretrained(model, tmp_path / "checkpoint")
        want = {name: b.clone() for name, b in model.named_buffers()}
        small.train(model, optimizer, range(1, 3))
        load_weights(model, tmp_path / "checkpoint")
        small.same(want, dict(model.named_buffers()))


@pytest.mark.parametrize(
    "build",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), betas=(0.8, 0.7), amsgrad=False),
    ],
    ids=["momentum", "sgd", "adagrad", "tensor lr"],
)
def test_every_optimizer(build: Any, tmp_path: Path):
    def prepared(seed: int) -> Any:
        model = small.build("llama", seed=seed)
        return small.prepared(model, tmp_path, "host", optimizer=build(list(model.parameters())))

    with prepared(0) as (model, optimizer):
        small.train(model, optimizer, range(2))
        save(model, optimizer, tmp_path / "checkpoint")
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    with prepared(1) as (model, optimizer):
        load_weights(model, tmp_path / "checkpoint")
        load_states(optimizer, tmp_path / "checkpoint")
        got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


def test_settings_of_groups_come_back(tmp_path: Path):
    with small.prepared(small.build("llama"), tmp_path) as (model, optimizer):
        optimizer.param_groups[0].update(lr=0.1 + 0.2, betas=(0.85, 0.999), initial_lr=1 / 3, tags=["a"])
        small.save_states(optimizer, tmp_path / "checkpoint")
        kept = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        optimizer.param_groups[0].update(lr=1.0, betas=(0.5, 0.5), initial_lr=1.0, tags=["b"])
        load_states(optimizer, tmp_path / "checkpoint")
        assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == kept


def test_loaded_settings_are_saved_in_the_same_order(tmp_path: Path):
    """A resumed run writes the same bytes."""
    with small.prepared(small.build("plain", num_blocks=1), tmp_path) as (model, optimizer):
        before = [list(group) for group in optimizer.param_groups]
        saved = optimizer.state_dict()
        saved["param_groups"] = [dict(sorted(group.items())) for group in saved["param_groups"]]
        optimizer.load_state_dict(saved)
        assert [list(group) for group in optimizer.param_groups] == before


def test_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saving and loading hold at most one state at a time and never build the whole dict."""
    alive: list[Any] = []
    read = ValueAccess.read_state

    def watched(*args: Any) -> torch.Tensor:
        import weakref

        tensor = read(*args)
        assert sum(ref() is not None for ref in alive) <= 1
        alive.append(weakref.ref(tensor))
        return tensor

    with small.prepared(small.build("llama"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        monkeypatch.setattr(ValueAccess, "read_state", watched)
        monkeypatch.setattr(type(optimizer), "state_dict", None)
        small.save_states(optimizer, tmp_path / "checkpoint")
        load_states(optimizer, tmp_path / "checkpoint")
    assert len(alive) > 20


class TestRefusals:
    def prepared(self, folder: Path, **more: Any) -> Any:
        return small.prepared(small.build("llama", **more), folder)

    def test_nothing_there(self, tmp_path: Path):
        assert not has_states(tmp_path)
        with self.prepared(tmp_path) as (_, optimizer), pytest.raises(ConfigError, match="found neither"):
            load_states(optimizer, tmp_path)

    def test_another_model(self, tmp_path: Path):
        with self.prepared(tmp_path, num_hidden_layers=2) as (model, optimizer):
            save(model, optimizer, tmp_path / "checkpoint")
        with self.prepared(tmp_path) as (model, optimizer):
            small.train(model, optimizer)
            before = state_of(model, optimizer)
            with pytest.raises(ConfigError, match=r"'model\.layers\.2\..* missing there"):
                load_states(optimizer, tmp_path / "checkpoint")
            with pytest.raises(ConfigError, match="are missing"):
                load_weights(model, tmp_path / "checkpoint")
            small.same(before, state_of(model, optimizer))

    def test_another_precision(self, tmp_path: Path):
        model = small.build("llama", dtype=torch.bfloat16)
        with small.prepared(model, tmp_path, precision="pure_bf16") as (_, optimizer):
            small.save_states(optimizer, tmp_path / "checkpoint")
        model = small.build("llama", dtype=torch.bfloat16)
        with (
            small.prepared(model, tmp_path, precision="bf16") as (_, optimizer),
            pytest.raises(ConfigError, match=r"is float32 .* and bfloat16"),
        ):
            load_states(optimizer, tmp_path / "checkpoint")

    def test_other_groups(self, tmp_path: Path):
        with self.prepared(tmp_path) as (_, optimizer):
            small.save_states(optimizer, tmp_path / "checkpoint")
        model = small.build("llama")
        halves = [{"params": list(model.parameters())[i::2], "lr": 0.1} for i in range(2)]
        with (
            small.prepared(model, tmp_path, optimizer=torch.optim.AdamW(halves)) as (_, optimizer),
            pytest.raises(ConfigError, match="expected 2 param groups"),
        ):
            load_states(optimizer, tmp_path / "checkpoint")

    @pytest.mark.parametrize("metadata", [None, {"training_state": "{"}, {"training_state": "[1]"}])
    def test_somebody_elses_file(self, metadata: Any, tmp_path: Path):
        write_safetensors(tmp_path / "checkpoint", [], [], stem="optimizer", metadata=metadata)
        with self.prepared(tmp_path) as (_, optimizer), pytest.raises(ConfigError, match="not written by outcore"):
            load_states(optimizer, tmp_path / "checkpoint")

    def test_a_setting_that_json_cannot_hold(self, tmp_path: Path):
        with self.prepared(tmp_path) as (_, optimizer):
            optimizer.param_groups[0]["note"] = object()
            with pytest.raises(UnsupportedError, match="'note' is a object"):
                small.save_states(optimizer, tmp_path / "checkpoint")
        assert not (tmp_path / "checkpoint").exists()

    def test_no_adapters_there(self, tmp_path: Path):
        with small.prepared(small.with_adapters(small.build("llama")), tmp_path) as (model, _):
            (tmp_path / "empty").mkdir()
            with pytest.raises(ConfigError, match="expected adapter_model"):
                load_weights(model, tmp_path / "empty")

    def test_not_prepared(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="load_weights: expected a model that outcore.prepare"):
            load_weights(small.build("llama"), tmp_path)


def test_shards_of_both_kinds_stand_side_by_side(tmp_path: Path):
    """Replacing one kind of file leaves the other alone."""
    specs = [(f"t{i}", torch.float32, (4,)) for i in range(3)]
    values = [(name, torch.full((4,), float(i))) for i, (name, _, _) in enumerate(specs)]
    for stem in ("model", "optimizer"):
        write_safetensors(tmp_path, specs, values, stem=stem, max_shard_bytes=16)
    write_safetensors(tmp_path, specs[:1], values[:1], stem="optimizer")
    assert WeightsDirectory.open(tmp_path).names() == ["t0", "t1", "t2"]
    assert WeightsDirectory.open(tmp_path, "optimizer").names() == ["t0"]
    assert sorted(p.name for p in tmp_path.glob("optimizer*")) == ["optimizer.safetensors"]


def test_masters_follow_an_edit_before_they_are_saved(tmp_path: Path):
    model = small.build("llama", dtype=torch.bfloat16)
    with small.prepared(model, tmp_path, "device", precision="bf16") as (model, optimizer):
        small.train(model, optimizer)
        with torch.no_grad():
            model.lm_head.weight.fill_(0.5)
        small.save_states(optimizer, tmp_path / "checkpoint")
    saved = WeightsDirectory.open(tmp_path / "checkpoint", "optimizer")
    assert bool((saved.read("lm_head.weight.master") == 0.5).all())


def test_what_is_frozen_for_a_moment_keeps_its_states(tmp_path: Path):
    """For example, peft freezes the base model for a moment while it inspects it."""
    with small.prepared(small.build("llama"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        want = optimizer.state_dict()["state"].keys()
        model.requires_grad_(requires_grad=False)
        assert optimizer.state_dict()["state"].keys() == want
        model.requires_grad_(requires_grad=True)
