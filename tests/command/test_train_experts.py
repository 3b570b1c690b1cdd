"""Adapters on mixtures of experts: ``outcore train`` and ``dpo`` train them bit for bit as TRL's trainers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from outcore.command.train.model.byte_tokenizer import byte_tokenizer

from .conftest import CHECKPOINTING, Run, read_jsonl, write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore")  # peft and bitsandbytes warn

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 260, "max_position_embeddings": 128}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
ALL: dict[str, Any] = {"target_modules": "all-linear"}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LOOP = {"per_device_train_batch_size": 2, "max_length": 32}
TRAINERS = {"train": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, initializer_range=0.1, **SIZES, **KINDS[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def plain(method: str, weights: Path, start: Path, rows: list[Any], targets: Any, in_4bit: bool, out: Path) -> Any:
    """The same job, trained by TRL's trainer. Args: start: The adapter that it begins with."""
    how: dict[str, Any] = {"dtype": torch.float32}
    if in_4bit:
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        how = {"dtype": torch.bfloat16, "quantization_config": packed}
    kind, settings = TRAINERS[method]
    args = settings(
        output_dir=str(out), save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=in_4bit, max_steps=3, learning_rate=1e-2, **{CHECKPOINTING: False}, **LOOP,
    )  # fmt: skip
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(weights, **how),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **targets),
    )
    set_peft_model_state_dict(trainer.model, load_file(start / "adapter_model.safetensors"))
    trainer.train()
    trainer.model.save_pretrained(out)
    return trainer


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def seen(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("name", "method", "targets", "in_4bit", "room"),
    [
        ("qwen3_moe", "train", ALL, False, "160KiB"),
        ("mixtral", "dpo", EXPERTS, False, "210KiB"),
        ("gpt_oss", "train", EXPERTS, True, "104KiB"),
        ("qwen3_moe", "dpo", ALL, True, "80KiB"),
    ],
)
def test_trained_over_tiers_and_resumed(
    name: str, method: str, targets: dict[str, Any], in_4bit: bool, room: str, command: Run, tmp_path: Path
):
    weights, data = saved(name, tmp_path / "weights"), tmp_path / "data.jsonl"
    rows = [{"prompt": f"What is {n}?", "chosen": f" It is {n}.", "rejected": " Who knows"} for n in range(9)]
    if method == "train":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    write_jsonl(data, rows)
    shared = [method, "--model", weights, "--data", data, "--disk", tmp_path, "--lora", 4]
    shared += ["--load-in-4bit", "--precision", "pure_bf16"] if in_4bit else ["--precision", "fp32"]
    for key, value in ({f"lora.{key}": value for key, value in targets.items()} | LOOP).items():
        shared += ["--set", f"{key}={json.dumps(value)}"]
    done = command(*shared, "--out", tmp_path / "start", "--steps", 1, "--lr", 1e-300)
    assert done.status == 0, done.err
    assert "_pattern" not in done.err, "the fused experts' rank is not said to be ignored"
    run = ["--out", tmp_path / "run", "--steps", 3, "--lr", 1e-2, "--save-every", 2]
    run += ["--device-memory", room, "--host-memory", room]
    assert command(*shared, *run).status == 0
    units = json.loads((tmp_path / "run" / "plan.json").read_text())["units"]
    assert {unit["weights"] for unit in units} >= {"device", "disk"}
    trainer = plain(method, weights, tmp_path / "start" / "model", rows, targets, in_4bit, tmp_path / "plain")
    assert seen(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == seen(trainer.state.log_history)
    want = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    assert any("experts.base_layer.lora_B" in key and tensor.any() for key, tensor in want.items())
    assert_equal(load_file(tmp_path / "run" / "model" / "adapter_model.safetensors"), want)
    (tmp_path / "run" / "checkpoint-3").rename(tmp_path / "aside")
    assert command(*shared, *run, "--resume").status == 0
    assert_equal(load_file(tmp_path / "run" / "model" / "adapter_model.safetensors"), want)
