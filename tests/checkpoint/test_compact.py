"""Compact masters are saved, loaded into either format, edited and trained on as if they were fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outcore
from outcore.checkpoint import library_files
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.checkpoint.training_state import load_states
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.engine_saves import EngineSaves
from outcore.engine.values import access
from outcore.memory.files import checkpoint_file
from outcore.spec.layout import CODES, ROW_NUMEL

from . import small
from .test_export import tensors
from .test_library_files import saved_beside
from .test_training_state import state_of


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Masters are made compact in pieces of two rows."""
    close, sizes = access.closed_masters, [0]

    def noted(values: torch.Tensor) -> Any:
        sizes.append(values.numel())
        return close(values)

    monkeypatch.setattr(access, "_MASTERS_AT_A_TIME", 2 * ROW_NUMEL)
    monkeypatch.setattr(access, "closed_masters", noted)
    yield
    assert max(sizes) <= 2 * ROW_NUMEL


def build(seed: int = 0, *, is_transposed: bool = False) -> Any:
    model = small.build("llama", dtype=torch.bfloat16, seed=seed)
    if is_transposed:  # another memory order
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
    return model


def optimizer_for(model: Any, chosen: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model.parameters(), "master_format": chosen}], lr=2.0**-6, weight_decay=0.1)


def prepared(folder: Path, chosen: str, tier: str, seed: int = 0, *, is_transposed: bool = False) -> Any:
    model = build(seed, is_transposed=is_transposed)
    return small.prepared(model, folder, tier, optimizer=optimizer_for(model, chosen))


def has_compact(optimizer: Any) -> bool:
    return any(CODES in unit.ledger.state_specs for unit in optimizer.engine.units)


def have_ties(model: Any, optimizer: Any) -> None:
    """Give a weight some ties. Few rows then have codes, so rows in another order would have others."""
    param = model.model.layers[1].mlp.up_proj.weight
    value = torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
    value[3, 5:9] = value[40, 1] = 1 + 2.0**-8  # halfway, and rounded down
    optimizer.engine.access.write_weight(*optimizer.engine.places[id(param)], value)


WAYS = [
    (("compact", "host"), ("compact", "disk")),
    (("compact", "disk"), ("compact", "device")),  # on the device, weights have fp32 masters
    (("compact", "device"), ("compact", "host")),
    (("compact", "host"), ("fp32", "disk")),
    (("fp32", "host"), ("compact", "disk")),
]


@pytest.mark.parametrize(("there", "here", "is_transposed"), [(*way, i % 2 == 0) for i, way in enumerate(WAYS)])
def test_a_checkpoint_goes_on_in_either_format(there: Any, here: Any, is_transposed: bool, tmp_path: Path) -> None:
    with prepared(tmp_path, *there, is_transposed=is_transposed) as (model, optimizer):
        assert has_compact(optimizer) == (there[0] == "compact" and there[1] != "device")
        small.train(model, optimizer, range(2))
        have_ties(model, optimizer)
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2)
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
        save.wait()
    with prepared(tmp_path, *here, 1) as (model, optimizer):
        small.train(model, optimizer, range(1))
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        assert optimizer.param_groups[0]["master_format"] == here[0]
        got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


@pytest.mark.parametrize(("there", "here"), WAYS)
def test_states_by_name_go_on_in_either_format(there: Any, here: Any, tmp_path: Path) -> None:
    with prepared(tmp_path, *there, is_transposed=True) as (model, optimizer):
        small.train(model, optimizer, range(2))
        small.save_states(optimizer, tmp_path / "s")
        kept, weights = optimizer.state_dict(), dict(outcore.named_tensors(model))
        assert {v["master"].dtype for v in kept["state"].values()} == {torch.float32}
        assert not any(CODES in v for v in kept["state"].values())
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    for load in (lambda o: load_states(o, tmp_path / "s"), lambda o: o.load_state_dict(kept)):
        with prepared(tmp_path, *here, 1) as (model, optimizer):
            with outcore.gathered(model, write=True), torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(weights[name])
            load(optimizer)
            got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
        assert want[0] == got[0]
        small.same(want[1], got[1])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_files_that_are_written_beside_training(tier: str, tmp_path: Path) -> None:
    with prepared(tmp_path, "compact", tier, is_transposed=True) as (model, optimizer):
        small.train(model, optimizer)
        have_ties(model, optimizer)
        outcore.save_pretrained(model, tmp_path / "want")
        small.save_states(optimizer, tmp_path / "want")
        save = saved_beside(model, optimizer, tmp_path)
        small.train(model, optimizer, range(5, 7))
        save.wait()
        small.same(dict(sorted(tensors(tmp_path / "want").items())), dict(sorted(tensors(tmp_path / "c").items())))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_masters_are_made_a_few_rows_at_a_time(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masters of a parameter are never all in memory at once."""
    read, sizes = EngineSaves._fresh, list[int]()

    def noted(saves: EngineSaves, memory: Any, start: int, stop: int) -> torch.Tensor:
        sizes.append(stop - start)
        return read(saves, memory, start, stop)

    monkeypatch.setattr(EngineSaves, "_fresh", noted)
    monkeypatch.setattr(library_files, "_MASTERS_AT_A_TIME", 1024)
    monkeypatch.setattr(library_files, "_MASTERS_OF_ONE_THREAD", 256)
    monkeypatch.setattr(checkpoint_file, "BLOCK_BYTES", 3 * 4096)
    with prepared(tmp_path, "compact", tier) as (model, optimizer):
        small.train(model, optimizer)
        have_ties(model, optimizer)
        small.save_states(optimizer, tmp_path / "want")
        saved_beside(model, optimizer, tmp_path).wait()
        want, got = (load_file(tmp_path / name / "optimizer.safetensors") for name in ("want", "c"))
        small.same(dict(sorted(want.items())), dict(sorted(got.items())))
    assert 0 < max(sizes) <= 2 * 1024


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is the effect of no_dist
def test_export_has_the_masters(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with prepared(tmp_path, "compact", "host", is_transposed=True) as (model, optimizer):
        small.train(model, optimizer, range(2))
        have_ties(model, optimizer)
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        states = optimizer.state_dict()["state"].values()
        names = [name for name, _ in model.named_parameters()]
        want = {name: state["master"].cpu() for name, state in zip(names, states, strict=True)}
    export_checkpoint(tmp_path / "c", tmp_path / "out", "dcp")
    loaded = {"model": {name: torch.zeros(value.shape) for name, value in want.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    small.same(want, loaded["model"])


def test_edits_are_those_of_fp32_masters(tmp_path: Path) -> None:
    """Edited elements become what was written; the others keep their masters."""
    found = []
    for chosen in ("fp32", "compact"):
        with prepared(tmp_path, chosen, "host") as (model, optimizer):
            small.train(model, optimizer, range(2))
            with outcore.gathered(model, write=True), torch.no_grad():
                weight = model.model.layers[0].mlp.up_proj.weight
                weight[::3] = 0.0
                weight[1, :5] = -0.0
                model.model.layers[2].mlp.down_proj.weight.mul_(2.0)
            edited = state_of(model, optimizer)
            param = model.model.layers[1].mlp.gate_proj.weight
            optimizer.state[param]["exp_avg"].mul_(0.5)
            found.append([edited, small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)])
    small.same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    small.same(found[0][2], found[1][2])


def test_who_writes_a_master_writes_its_weight(tmp_path: Path) -> None:
    with prepared(tmp_path, "compact", "disk") as (model, optimizer):
        small.train(model, optimizer)
        param = model.model.layers[1].mlp.up_proj.weight
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(7))
        optimizer.state[param]["master"] = value
        assert torch.equal(optimizer.state[param]["master"].cpu(), value)
        with outcore.gathered(param):
            assert torch.equal(param.cpu(), value.bfloat16())
        with pytest.raises(ConfigError, match="for which outcore.prepare"):
            optimizer.state[param][CODES] = torch.zeros(3)


def test_masters_have_the_precision_of_the_weights_that_were_given(tmp_path: Path) -> None:
    model = small.build("llama")
    want = {name: param.detach().cpu().clone() for name, param in model.named_parameters()}
    plan = small.prepared(model, tmp_path, "disk", optimizer=optimizer_for(model, "compact"), precision="bf16")
    with plan as (model, optimizer):
        assert has_compact(optimizer)
        for unit in optimizer.engine.units:
            for i, spec in enumerate(unit.spec.trainable):
                assert torch.equal(optimizer.engine.access.read_state(unit, "master", i), want[spec.name]), spec.name


def test_what_has_no_compact_masters_refuses_them(tmp_path: Path) -> None:
    for precision in ("fp32", "pure_bf16", "fp16"):
        model = build()
        with pytest.raises(
            ConfigError, match=f"master_format 'fp32' with precision {precision}, but got 'compact' for"
        ):
            outcore.prepare(model, optimizer_for(model, "compact"), precision=precision)
    with prepared(tmp_path, "compact", "host") as (model, optimizer):
        optimizer.param_groups[0]["master_format"] = "fp32"
        model(**small.batch()).loss.backward()
        with pytest.raises(UnsupportedError, match="master_format that the param group of .* is 'fp32' now"):
            optimizer.step()
