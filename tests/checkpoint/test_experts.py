"""Adapters on the fused tensors of experts: from a checkpoint that has experts one by one to one that is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import outcore
from outcore.checkpoint.export_checkpoint import export_checkpoint

from . import small

pytestmark = pytest.mark.filterwarnings("ignore")  # peft asks transformers for an attribute under its old name

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.1, "pad_token_id": None}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
ALL: dict[str, Any] = {"target_modules": "all-linear"}  # with the experts and the router of the first two kinds
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = [
    ("qwen3_moe", ALL, torch.float32),
    ("mixtral", EXPERTS, torch.bfloat16),
    ("gpt_oss", EXPERTS, torch.bfloat16),
]


def on_meta(name: str, dtype: torch.dtype) -> Any:
    config = AutoConfig.for_model(name, vocab_size=small.VOCAB, max_position_embeddings=64, **SIZES, **KINDS[name])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def adapted(model: Any, targets: dict[str, Any], folder: Path) -> Any:
    model.config.name_or_path = model.name_or_path = str(folder)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, **targets)).train().to(model.device)


def exact(mine: dict[str, torch.Tensor], theirs: Any) -> None:
    """Compare in any order: peft puts the parameters of experts into another one in each forward."""
    small.same(dict(sorted(mine.items())), dict(sorted(theirs.named_parameters())))


@pytest.mark.parametrize(("name", "targets", "dtype"), CASES)
def test_trained_resumed_exported_and_merged(name: str, targets: Any, dtype: torch.dtype, tmp_path: Path):
    base, saved = tmp_path / "base", tmp_path / "saved"
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(on_meta(name, dtype).config, dtype=dtype).save_pretrained(base)

    def loaded(folder: Path = base) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    plain = adapted(loaded(), targets, base).to(small.DEVICE)
    with small.prepared(adapted(on_meta(name, dtype), targets, base), tmp_path, "disk", weights=base) as (model, adamw):
        begun = dict(outcore.named_tensors(model))
        plain.load_state_dict({key: value for key, value in begun.items() if "lora_" in key}, strict=False)
        exact(begun, plain)
        losses = small.train(model, adamw, range(2))
        outcore.save_checkpoint(model, adamw, saved, step=2, wait=True)
        want = dict(outcore.named_tensors(model))
        losses += small.train(model, adamw, range(2, 4))
    adamw = small.adamw(plain)
    adamw.param_groups[0]["fused"] = True
    assert small.train(plain, adamw, range(4)) == losses
    again = adapted(on_meta(name, dtype), targets, base)
    with small.prepared(again, tmp_path, "host", weights=base, checkpoint=saved) as (model, adamw):
        assert small.train(model, adamw, range(2, 4)) == losses[2:]
        exact(dict(outcore.named_tensors(model)), plain)
    export_checkpoint(saved, tmp_path / "adapter", "hf")
    export_checkpoint(saved, tmp_path / "merged", "hf", merge=True)
    exported = PeftModel.from_pretrained(loaded(), tmp_path / "adapter")
    exact(want, exported)
    small.same(exported.merge_and_unload().state_dict(), loaded(tmp_path / "merged").state_dict())


def test_random_experts_below_adapters(tmp_path: Path):
    """Two adapters stand around one module of experts, whose first values are its own."""
    with small.prepared(adapted(on_meta("qwen3_moe", torch.float32), ALL, tmp_path), tmp_path) as (model, _):
        made = dict(outcore.named_tensors(model))
    assert {key.rpartition("lora_")[2][0] for key, value in made.items() if not value.any()} == {"B"}
    experts = [float(value.std()) for key, value in made.items() if key.endswith(("gate_up_proj", "down_proj"))]
    assert experts == pytest.approx([SIZES["initializer_range"]] * 4, rel=0.1)
