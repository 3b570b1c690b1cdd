"""Weights are written and read in the Hugging Face layout; damaged or hostile files are refused, with the place."""

from __future__ import annotations

import json
import os

import pytest
import safetensors
import safetensors.torch
import torch

from outcore.core.errors import ConfigError, DiskError
from outcore.memory.files import weights_file
from outcore.memory.files.weights_file import WeightsDirectory, write_safetensors


def some_tensors():
    generator = torch.Generator().manual_seed(7)
    tensors = {
        "odd.weight": torch.randn(3, 67, generator=generator).bfloat16(),
        "norm.weight": torch.randn(199, generator=generator),
        "scale": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
        "mask": torch.rand(13, generator=generator) > 0.5,
        "head.weight": torch.randn(41, 67, generator=generator).bfloat16(),
        "half": torch.randn(2, 3, 5, generator=generator).half(),
        "ids": torch.arange(11),
    }
    tensors["transposed"] = torch.randn(7, 9, generator=generator).t()
    return tensors


def specs_of(tensors):
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 2000, 1])
def test_round_trip_and_the_reference_reader_agree(tmp_path, max_shard_bytes):
    tensors = some_tensors()
    files = write_safetensors(tmp_path, specs_of(tensors), tensors.items(), max_shard_bytes=max_shard_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)
    weights = WeightsDirectory.open(tmp_path)
    assert_same({name: weights.read(name) for name in weights.names()}, tensors)
    assert {name: weights.shape(name) for name in weights.names()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert weights.dtype("half") == torch.float16
    # Readers that map the file make tensors in place, which needs aligned starts.
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in weights._entries.values())
    reference = {}
    for file in files:
        if file.suffix == ".safetensors":
            reference |= safetensors.torch.load_file(file)
            with safetensors.safe_open(file, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
    assert_same(reference, tensors)


def test_shards_have_the_hugging_face_names_and_index(tmp_path):
    tensors = {f"layers.{i}": torch.full((10,), float(i)) for i in range(5)}
    files = write_safetensors(tmp_path, specs_of(tensors), tensors.items(), max_shard_bytes=80, metadata={"step": "3"})
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [path.name for path in files] == [*shards, "model.safetensors.index.json"]
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"] == {f"layers.{i}": shards[i // 2] for i in range(5)}
    with safetensors.safe_open(files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "3"}


def test_transformers_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size=10_000)
    weights = WeightsDirectory.open(theirs)
    assert len(list(theirs.glob("model-*"))) > 1
    assert_same({name: weights.read(name) for name in weights.names()}, dict(model.state_dict()))
    config.save_pretrained(ours)
    specs = [(name, weights.dtype(name), weights.shape(name)) for name in weights.names()]
    stream = ((name, weights.read(name)) for name in weights.names())
    write_safetensors(ours, specs, stream, max_shard_bytes=10_000)
    again = transformers.LlamaForCausalLM.from_pretrained(ours)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_new_save_leaves_nothing_of_an_older_one(tmp_path):
    # from_pretrained prefers model.safetensors: it would load a stale one instead of the new shards.
    tensors = {"a": torch.ones(10), "b": torch.ones(10)}
    kept = tmp_path / "model-notes.safetensors"
    kept.write_text("a person's")
    for max_shard_bytes in (10**6, 40, 10**6):
        files = write_safetensors(tmp_path, specs_of(tensors), tensors.items(), max_shard_bytes=max_shard_bytes)
        assert sorted(tmp_path.iterdir()) == sorted([*files, kept])


def test_a_save_that_fails_leaves_the_older_one(tmp_path):
    tensors = {"a": torch.ones(10), "b": torch.ones(10)}
    write_safetensors(tmp_path, specs_of(tensors), tensors.items())

    def stream():
        yield "a", torch.zeros(10)
        raise RuntimeError("the run ends here")

    for max_shard_bytes in (10**6, 40):
        with pytest.raises(RuntimeError, match="ends here"):
            write_safetensors(tmp_path, specs_of(tensors), stream(), max_shard_bytes=max_shard_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(WeightsDirectory.open(tmp_path).read("a"), torch.ones(10))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", torch.ones(3))], "expected .'b'"),
        ([("b", torch.ones(3)), ("a", torch.ones(3))], "expected .'a'"),
        ([("a", torch.ones(3)), ("b", torch.ones(4))], "expected .'b'"),
        ([("a", torch.ones(3)), ("b", torch.ones(3).half())], "expected .'b'"),
        ([("a", torch.ones(3)), ("b", torch.ones(3)), ("c", torch.ones(3))], "'c' comes after the last"),
    ],
)
def test_tensors_that_do_not_match_the_specs(tmp_path, stream, message):
    specs = [("a", torch.float32, (3,)), ("b", torch.float32, (3,))]
    with pytest.raises(AssertionError, match=message):
        write_safetensors(tmp_path, specs, stream)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_writing(tmp_path, monkeypatch):
    def full(file, memory):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(weights_file, "_write_all", full)
    with pytest.raises(DiskError, match=f"weights '{tmp_path}'.*ENOSPC.*free space there"):
        write_safetensors(tmp_path, [("a", torch.float32, (3,))], [("a", torch.ones(3))])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path):
    tensors = {"a": torch.arange(10.0), "b": torch.arange(20.0)}
    write_safetensors(tmp_path, specs_of(tensors), tensors.items())
    return tmp_path / "model.safetensors"


def test_no_weights(tmp_path):
    with pytest.raises(ConfigError, match=f"'{tmp_path}'.*found neither"):
        WeightsDirectory.open(tmp_path)


def test_unknown_tensor(saved):
    with pytest.raises(ConfigError, match="expected a tensor 'c'"):
        WeightsDirectory.open(saved.parent).read("c")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_a_truncated_file(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        WeightsDirectory.open(saved.parent)


def test_a_file_that_is_truncated_after_it_was_opened(saved):
    weights = WeightsDirectory.open(saved.parent)
    os.truncate(saved, saved.stat().st_size - 4)
    with pytest.raises(ConfigError, match=r"tensor 'b': expected 80 bytes.*ends after 76 of them"):
        weights.read("b")


def test_extra_bytes_at_the_end(saved):
    saved.write_bytes(saved.read_bytes() + b"x")
    with pytest.raises(ConfigError, match="truncated or damaged"):
        WeightsDirectory.open(saved.parent)


def header(**tensors):
    return json.dumps(tensors).encode()


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"pickle" * 9, "cannot be parsed"),
        (b"[" * 50_000, "cannot be parsed"),
        (b"\xff\xfe{}", "cannot be parsed"),
        (b"[]", "expected a JSON object"),
        (b'{"a": 1}', "expected dtype, shape and data_offsets"),
        (b'{"a": {}, "a": {}}', "a name occurs twice"),
        (header(a=F32), "expected dtype, shape and data_offsets"),
        (header(a=F32 | {"dtype": "F1", "data_offsets": [0, 8]}), "expected a dtype of F64"),
        (header(a=F32 | {"dtype": "C64", "data_offsets": [0, 8]}), "complex weights .C64. must be saved as real ones"),
        (header(a=F32 | {"dtype": ["F32"], "data_offsets": [0, 8]}), "expected a dtype of F64"),
        (header(a=F32 | {"shape": [-2], "data_offsets": [0, 8]}), "non-negative integers"),
        (header(a=F32 | {"shape": [True], "data_offsets": [0, 8]}), "non-negative integers"),
        (header(a=F32 | {"data_offsets": [0, 7]}), "expected 8 bytes"),
        (header(a=F32 | {"data_offsets": [8, 0]}), "expected 8 bytes"),
        (header(a=F32 | {"data_offsets": [0]}), "expected 8 bytes"),
        (header(a=F32 | {"data_offsets": []}), "expected 8 bytes"),
        (header(a=F32 | {"shape": [2**62], "data_offsets": [0, 2**64]}), "truncated"),
        (header(a=F32 | {"data_offsets": [8, 16]}), "starts at byte"),
        (header(a=F32 | {"data_offsets": [0, 8]}, b=F32 | {"data_offsets": [4, 12]}), "'b' starts at byte"),
    ],
)
def test_a_file_that_is_no_safetensors(tmp_path, text, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match=message):
        WeightsDirectory.open(tmp_path)


@pytest.mark.parametrize("size", [0, 1, 2**40, 2**64 - 1])
def test_a_header_of_impossible_size(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="its header's size is"):
        WeightsDirectory.open(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be parsed"),
        ("{}", "expected a 'weight_map'"),
        ('{"weight_map": {}}', "expected a 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "a file name in the same folder for 'a', but got 1"),
        ('{"weight_map": {"a": ""}}', "a file name in the same folder"),
        ('{"weight_map": {"a": ".."}}', "a file name in the same folder"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "a file name in the same folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "a file name in the same folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "'gone.safetensors' beside it, but it is missing"),
        ('{"weight_map": {"c": "shard.safetensors"}}', "expected tensor 'c' in 'shard.safetensors'"),
    ],
)
def test_a_hostile_index(saved, index, message):
    saved.rename(saved.with_name("shard.safetensors"))
    (saved.parent / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=message):
        WeightsDirectory.open(saved.parent)
