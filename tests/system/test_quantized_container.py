"""QLoRA in a container of the base's size in 4 bits and what libraries take: in bf16 it would not fit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from .test_container import memory_group

pytest.importorskip("bitsandbytes")

# Python, torch, TRL and bitsandbytes (about 400 MiB), activations, a piece of a weight in full precision.
LIBRARIES_BYTES = 440 * 2**20
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16}


@pytest.mark.timeout(300)
def test_a_base_of_4_bits(tmp_path: Path) -> None:
    quantized, in_bf16 = write_base(tmp_path / "base", **SIZES)
    limit = quantized + LIBRARIES_BYTES
    assert quantized < in_bf16 / 3
    (tmp_path / "text.txt").write_text("as a user would type it " * 100)
    done = run(tmp_path, limit, device=quantized // 2, host=quantized // 2)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1]
    assert math.isfinite(lines[0]["loss"])


def write_base(folder: Path, **sizes: int) -> tuple[int, int]:
    """Write a checkpoint. Returns the bytes of its units in 4 bits, doubly quantised, and the rest in bf16; and all."""
    config = LlamaConfig(vocab_size=260, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: torch.empty(p.shape, dtype=torch.bfloat16).normal_(0, 0.02) for name, p in model.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    packed = sum(p.numel() for name, p in state.items() if "proj" in name)
    whole = 2 * sum(p.numel() for p in state.values())
    return int(packed * 0.516) + whole - 2 * packed, whole


def run(folder: Path, limit: int, *, device: int, host: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from outcore.cli.main import main; main()", "train"]
    command += ["--model", "base", "--data", "text.txt", "--out", "run", "--steps", "1", "--batch-size", "1"]
    command += ["--seq-len", "32", "--lora", "4", "--load-in-4bit", "--set", "bnb_4bit_use_double_quant=true"]
    command += ["--device-memory", f"{device}", "--host-memory", f"{host}", "--disk", ".", "--hardware", "none"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "OMP_"))}
    with memory_group(limit) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        return subprocess.run(
            command, cwd=folder, preexec_fn=join, capture_output=True, text=True, check=False, env=environment
        )
