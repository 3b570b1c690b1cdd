"""A checkpoint is exported to other formats: Transformers, PEFT and torch's distributed checkpoints can read it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks.conftest import launch
from torch import nn

import outcore
from outcore.checkpoint.export_checkpoint import _CheckpointTensors, export_checkpoint
from outcore.checkpoint.export_merged import class_of
from outcore.core.errors import ConfigError
from outcore.spec.manifest import Manifest, TensorRecord

from . import small
from .test_training_state import state_of


def saved(model: Any, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Train two steps and save a checkpoint. Returns the weights."""
    with small.prepared(model, tmp_path, **options) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        return dict(outcore.named_tensors(model))


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral", "gpt2", "t5"])
def test_for_from_pretrained(name: str, tmp_path: Path):
    model = small.build(name, dtype=torch.bfloat16)
    want = saved(model, tmp_path, precision="bf16")
    export_checkpoint(tmp_path / "c", tmp_path / "out", "hf")
    model.save_pretrained(tmp_path / "plain")
    files = [{p.name for p in (tmp_path / folder).iterdir()} for folder in ("out", "plain")]
    assert files[0] == files[1]
    got = dict(type(model).from_pretrained(tmp_path / "out").named_parameters())
    small.same({n: want[n] for n in got}, got)


def test_a_module_of_nobody(tmp_path: Path):
    from safetensors.torch import load_file

    model = small.build("plain")
    for param in model.parameters():
        param.requires_grad_(True)
    want = saved(model, tmp_path)
    export_checkpoint(tmp_path / "c", tmp_path / "out", "hf")
    got = load_file(tmp_path / "out" / "model.safetensors")
    small.same(dict(sorted(want.items())), dict(sorted(got.items())))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft uses the old name
@pytest.mark.parametrize("merge", [False, True])
def test_adapters(merge: bool, tmp_path: Path):
    from peft import PeftModel

    base = small.build("llama")
    base.save_pretrained(tmp_path / "base")
    model = small.with_adapters(type(base).from_pretrained(tmp_path / "base")).to(small.DEVICE)
    saved(model, tmp_path)
    ids = small.batch()["input_ids"]
    want = model.eval()(input_ids=ids).logits
    export_checkpoint(tmp_path / "c", tmp_path / "out", "hf", merge=merge)
    if merge:
        got = type(base).from_pretrained(tmp_path / "out")
    else:
        got = PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), str(tmp_path / "out"))
    got = got.to(small.DEVICE)
    torch.testing.assert_close(got.eval()(input_ids=ids).logits, want, rtol=1e-5 if merge else 0, atol=1e-5 * merge)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("there", "here"), [("disk", "device"), ("device", "disk")])
def test_for_torch(there: str, here: str, tmp_path: Path):
    """A plain loop that continues from it makes the same steps as this run; so does a run that loads its states."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with small.prepared(small.build("llama"), tmp_path, there, optimizer=None) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        want = small.train(model, optimizer, range(2, 12)), state_of(model, optimizer)
    export_checkpoint(tmp_path / "c", tmp_path / "out", "dcp")

    def loaded() -> Any:
        plain = small.build("llama", seed=1)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0, fused=True)
        weights, states = get_state_dict(plain, optimizer)
        found = {"model": weights, "optimizer": states}
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
        set_state_dict(plain, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        return plain, optimizer

    plain, optimizer = loaded()
    assert small.train(plain, optimizer, range(2, 12)) == want[0]
    states = optimizer.state_dict()["state"]
    flat = {f"{i}.{key}": value for i, values in states.items() for key, value in values.items()}
    small.same(want[1], {**dict(plain.named_parameters()), **flat})
    plain, optimizer = loaded()
    with small.prepared(plain, tmp_path, here, optimizer=optimizer) as (model, streamed):
        assert small.train(model, streamed, range(2, 12)) == want[0]
        small.same(want[1], state_of(model, streamed))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_experts_have_the_names_of_the_model(tmp_path: Path):
    """The checkpoint has them one by one, as the library saves them."""
    import torch.distributed.checkpoint as dcp

    want = saved(small.build("mixtral"), tmp_path)
    export_checkpoint(tmp_path / "c", tmp_path / "out", "dcp")
    loaded = {"model": {name: torch.zeros(value.shape) for name, value in want.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    small.same(want, loaded["model"])


FULLY_SHARDED = """
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from checkpoint import small

warnings.simplefilter("ignore")
distributed.init_process_group("gloo")
model = small.build("llama", seed=1)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
weights, states = get_state_dict(model, optimizer)
found = {"model": weights, "optimizer": states}
dcp.load(found, checkpoint_id=sys.argv[1])
set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
states = optimizer.state_dict()["state"]
found = dict(model.named_parameters())
found |= {f"{i}.{key}": value for i, values in states.items() for key, value in values.items()}
whole = {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in found.items()}
torch.save(whole, f"{sys.argv[2]}/{distributed.get_rank()}.pt")
"""


@pytest.mark.skipif(small.DEVICE != "cpu", reason="over gloo, between processes on the CPU")
def test_for_fully_sharded_modules(tmp_path: Path):
    """FSDP2 on two ranks."""
    with small.prepared(small.build("llama"), tmp_path, "disk", optimizer=None) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=2, wait=True)
        want = state_of(model, optimizer)
    export_checkpoint(tmp_path / "c", tmp_path / "out", "dcp")
    launch(FULLY_SHARDED, 2, [str(tmp_path / "out"), str(tmp_path)])
    for rank in range(2):
        small.same(want, torch.load(tmp_path / f"{rank}.pt"))


def test_a_subclass_of_the_users_own(tmp_path: Path):
    from transformers import LlamaForCausalLM

    model = small.build("llama")
    model.__class__ = type("MyLlama", (type(model),), {})
    want = saved(model, tmp_path)
    export_checkpoint(tmp_path / "c", tmp_path / "out", "hf")
    got = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    small.same(want, dict(got.named_parameters()))


def test_a_class_that_transformers_does_not_have():
    with pytest.raises(ConfigError, match="expected a class of transformers, but the model is a 'MyLlama'; go on from"):
        class_of(SimpleNamespace(architectures=["MyLlama"]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft uses the old name
@pytest.mark.parametrize("merge", [False, True])
def test_what_was_trained_beside_adapters_is_not_left_out(merge: bool, tmp_path: Path):
    model = small.with_adapters(small.build("llama"))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    saved(model, tmp_path)
    with pytest.raises(ConfigError, match=r"all trained weights .* but 'base_model.model.model.norm.weight' .* is not"):
        export_checkpoint(tmp_path / "c", tmp_path / "out", "hf", merge=merge)
    assert not (tmp_path / "out").exists()


def test_half_of_a_configuration_is_not_kept(tmp_path: Path):
    model = small.build("mixtral")
    model.config.bad = object()
    with pytest.warns(UserWarning, match="from_pretrained will not know this model"):
        saved(model, tmp_path)
    assert not list((tmp_path / "c").glob("*/config.json"))
    with pytest.raises(ConfigError, match="expected a configuration in .*; go on from"):
        export_checkpoint(tmp_path / "c", tmp_path / "out", "dcp")
    assert export_checkpoint(tmp_path / "c", tmp_path / "out", "hf").endswith("as weights without a configuration")


def test_a_model_that_its_library_does_not_save(tmp_path: Path):
    model = small.build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    saved(model, tmp_path)
    with pytest.raises(ConfigError, match=r"as the libraries save them .* but there are none .*; go on from"):
        export_checkpoint(tmp_path / "c", tmp_path / "out", "hf")


def test_a_parameter_without_elements_that_several_ranks_saved():
    """No rank has a part of it."""
    records = {"model.none": TensorRecord("bfloat16", (0, 3), ())}
    tensor = _CheckpointTensors(Path(), Manifest(step=1, files={}, tensors=records)).weight("none")
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (0, 3))


def test_frozen_parameters_are_exported_with_the_others_but_not_for_torch(tmp_path: Path):
    model: nn.Module = small.build("llama")
    model.model.layers[0].requires_grad_(False)
    want = saved(model, tmp_path)
    with pytest.raises(ConfigError, match="all trained, but 'model.layers.0.input_layernorm.weight' is frozen"):
        export_checkpoint(tmp_path / "c", tmp_path / "out", "dcp")
    assert not (tmp_path / "out").exists()
    export_checkpoint(tmp_path / "c", tmp_path / "whole", "hf")
    small.same(want, dict(type(model).from_pretrained(tmp_path / "whole").named_parameters()))
    with pytest.raises(ConfigError, match="empty or not there yet"):
        export_checkpoint(tmp_path / "c", tmp_path, "hf")
    with pytest.raises(ConfigError, match="--merge"):
        export_checkpoint(tmp_path / "c", tmp_path / "out", "hf", merge=True)
