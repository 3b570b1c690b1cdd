"""Weights and states written while training goes on equal those that ``save_pretrained`` and ``save_states`` write."""

from __future__ import annotations

import itertools
import random
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import outcore
from outcore.checkpoint import begin_checkpoint as beside
from outcore.checkpoint.begin_checkpoint import begun
from outcore.checkpoint.library_files import LibraryFiles
from outcore.checkpoint.training_state import load_states, step_of_states
from outcore.core.errors import DiskError, OutcoreError
from outcore.engine.engine import engine_of
from outcore.integrations.trainer_saves import _move_into
from outcore.memory.files import weights_layout
from outcore.memory.files.checkpoint_file import BlockPool, CheckpointFile
from outcore.memory.files.checkpoint_folder import read_manifest
from outcore.spec.manifest import BLOCK_BYTES, ChecksummedBlock, Manifest

from . import small
from .test_export import tensors


def saved_beside(model: Any, optimizer: Any, folder: Path, name: str = "c", tidy_up: Any = list) -> Any:
    engine = engine_of(model, "a test")
    with begun(engine, folder / name, lambda files: Manifest(step=3, files=files), tidy_up) as (unfinished, save):
        files = LibraryFiles(engine, unfinished, save)
        files.weights(unfinished.path)
        files.states(optimizer, step=3)
        files.submit()
    return save


@pytest.mark.parametrize(
    ("tier", "dtype"),
    [("device", torch.float32), ("host", torch.float32), ("disk", torch.float32), ("disk", torch.bfloat16)],
)
@pytest.mark.parametrize("name", [*small.NAMES, "plain"])
def test_files(name: str, tier: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The files hold the state at the time of the call, whatever is trained meanwhile; large files are sharded."""
    if tier == "host":
        monkeypatch.setattr(weights_layout, "MAX_SHARD_BYTES", 20_000)
    model = small.build(name, dtype=dtype)
    if name == "llama":  # another memory order
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
    with small.prepared(model, tmp_path, tier) as (model, optimizer):
        small.train(model, optimizer)
        outcore.save_pretrained(model, tmp_path / "want")
        small.save_states(optimizer, tmp_path / "want")
        save = saved_beside(model, optimizer, tmp_path)
        small.train(model, optimizer, range(5, 7))
        save.wait()
        read_manifest(tmp_path / "c", check=True)
        small.same(dict(sorted(tensors(tmp_path / "want").items())), dict(sorted(tensors(tmp_path / "c").items())))
        assert step_of_states(tmp_path / "c") == 3
        load_states(optimizer, tmp_path / "c")
    if tier == "host":
        assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 1
    for path in (tmp_path / "c").glob("*.safetensors"):
        assert_aligned(path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft uses the old name
@pytest.mark.parametrize("tier", small.TIERS)
@pytest.mark.parametrize("kind", ["lora", "dora", "modules", "two", "buffers"])
def test_adapters(kind: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adapters are written on the save lane in peft's format. Those with other names have folders of their own."""
    more: dict[str, Any] = {"dora": {"use_dora": True}, "modules": {"modules_to_save": ["lm_head"]}}.get(kind, {})
    model = small.with_adapters(small.build("llama"), **more)
    if kind == "two":
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])
    if kind == "buffers":
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_A.register_buffer("mask", torch.ones(3).half())
    with small.prepared(model, tmp_path, tier) as (model, optimizer):
        small.train(model, optimizer)
        outcore.save_pretrained(model, tmp_path / "want")
        with monkeypatch.context() as patch:
            write, held = CheckpointFile.write, []

            def seen(file: CheckpointFile, *args: Any) -> None:
                held.append((threading.current_thread() is threading.main_thread(), file.path.name))
                write(file, *args)

            patch.setattr(CheckpointFile, "write", seen)
            save = saved_beside(model, optimizer, tmp_path)
            small.train(model, optimizer, range(5, 7))
            save.wait()
        is_one_file = kind != "buffers"  # with buffers, halves would come before floats: such a file is written at once
        assert ((False, "adapter_model.safetensors") in held) == is_one_file
        files = sorted(path.relative_to(tmp_path / "want") for path in (tmp_path / "want").rglob("*.*"))
        assert len(files) == 3 + 2 * (kind == "two")
        for name in files:
            want, got = tmp_path / "want" / name, tmp_path / "c" / name
            if name.suffix != ".safetensors":
                assert got.read_bytes() == want.read_bytes()
                continue
            small.same(dict(sorted(load_file(want).items())), dict(sorted(load_file(got).items())))
            with safe_open(want, "pt") as a, safe_open(got, "pt") as b:
                assert a.metadata() == b.metadata()
            assert_aligned(got)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft uses the old name
def test_an_adapter_whose_name_is_a_path(tmp_path: Path):
    """As a Trainer saves it: small files in a folder of their own, which are moved to the weights at last."""
    model = small.build("llama")
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="team/one")
    with small.prepared(model, tmp_path) as (model, _):
        engine = engine_of(model, "a test")
        with begun(engine, tmp_path / "c", lambda files: Manifest(step=1, files=files), list) as (unfinished, save):
            inner = unfinished.path / "inner"
            files = LibraryFiles(engine, unfinished, save)
            files.weights(inner)
            files.submit()
            _move_into(inner, unfinished.path)
        save.wait()
    names = {path.name for path in (tmp_path / "c" / "team" / "one").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_second_file_of_a_name(tmp_path: Path):
    """Two files of one name would overwrite each other."""
    with small.prepared(small.build("plain"), tmp_path) as (model, _):
        engine = engine_of(model, "a test")
        with (
            pytest.raises(OutcoreError, match="each file once, but 'model.safetensors' is"),
            begun(engine, tmp_path / "c", lambda files: Manifest(step=3, files=files), list) as (unfinished, save),
        ):
            for _ in range(2):
                files = LibraryFiles(engine, unfinished, save)
                files.weights(unfinished.path)
                files.submit()
    assert not (tmp_path / "c").exists()


def test_files_are_filled_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So the next update of a unit waits for its own weights and states alone."""
    write, order = CheckpointFile.write, list[str]()

    def noted(file: CheckpointFile, *args: Any) -> None:
        order.append(file.path.name)
        write(file, *args)

    with small.prepared(small.build("llama"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        monkeypatch.setattr(CheckpointFile, "write", noted)
        saved_beside(model, optimizer, tmp_path).wait()
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > len(optimizer.engine.units)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_drive_that_is_nearly_full(is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Space reserved for weights is not counted again with the states."""
    with small.prepared(small.build("plain"), tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        whole = saved_beside(model, optimizer, tmp_path).wait()
        room = _bytes_in(whole) - is_full * ((whole / "manifest.json").stat().st_size + 1)
        monkeypatch.setattr(beside, "disk_free_bytes", lambda path: room - _bytes_in(path))
        if is_full:
            with pytest.raises(DiskError, match="it takes .* are free"):
                saved_beside(model, optimizer, tmp_path / "again")
        else:
            saved_beside(model, optimizer, tmp_path / "again").wait()


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


@pytest.mark.parametrize("tier", small.TIERS)
def test_states_of_other_shapes(tier: str, tmp_path: Path):
    """Adafactor has states of rows and columns, and single numbers."""
    model = small.build("plain", dtype=torch.bfloat16)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    with small.prepared(model, tmp_path, tier, optimizer=optimizer) as (model, optimizer):
        small.train(model, optimizer)
        small.save_states(optimizer, tmp_path / "want")
        saved_beside(model, optimizer, tmp_path).wait()
    want, got = (load_file(tmp_path / name / "optimizer.safetensors") for name in ("want", "c"))
    assert any(name.endswith("row_var") for name in want)
    small.same(dict(sorted(want.items())), dict(sorted(got.items())))


def assert_aligned(path: Path) -> None:
    """Check that tensors are aligned: readers that map a file rely on it."""
    with safe_open(path, "pt") as file:
        for name in file.keys():
            tensor = file.get_tensor(name)
            assert tensor.data_ptr() % tensor.element_size() == 0, name
    load_file(path)


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_file_of_odd_pieces(is_direct: bool, tmp_path: Path):
    """Blocks, pages and pieces end anywhere; the sums are those of the file."""
    rng, lengths = random.Random(0), (1, 255, 4095, 4096, 5000, BLOCK_BYTES - 1, BLOCK_BYTES)
    for case in range(12):
        sizes = [rng.choice(lengths) for _ in range(rng.randrange(1, 9))]
        data, pool = random.Random(case).randbytes(sum(sizes)), BlockPool(is_direct=is_direct)
        file, at = CheckpointFile(tmp_path / str(case), len(data), pool), 0
        for size in sizes:
            part = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8)
            file.write(size, lambda start, stop, to, part=part: to.copy_(part[start:stop]))
            at += size
        pool.close()
        assert file.path.read_bytes() == data
        blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
        assert file.blocks == tuple(ChecksummedBlock(len(block), zlib.crc32(block)) for block in blocks)
