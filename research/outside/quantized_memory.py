"""QLoRA of a model of 1.13e9 parameters in a control group with room for the base in 4 bits and for the libraries.

``outcore train --lora 4`` takes one step, over bf16 weights that are quantised as they are read (``--load-in-4bit``,
double quantisation), or over weights that are already quantised in the checkpoint. The constant beside the base's size
is for Python, torch, TRL and bitsandbytes (about 400 MiB), adapters, activations, and pieces of full-precision weights.

python research/outside/quantized_memory.py --disk /mnt/nvme
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]

LIBRARIES_MIB = 480
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16}
CONFIG = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--libraries-mib", type=int, default=LIBRARIES_MIB)
    parser.add_argument("--packed", action="store_true", help="the checkpoint is quantised already")
    args = parser.parse_args()
    sizes = {**SIZES, "num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        numel, in_4_bits = write_base(Path(folder), is_packed=args.packed, **sizes)
        limit, start_s = in_4_bits + args.libraries_mib * 2**20, time.perf_counter()
        done, peak = train(Path(folder), limit, in_4_bits, is_packed=args.packed)
        report = {
            "parameters": numel,
            "in 4 bits, MiB": in_4_bits / 2**20,
            "limit, MiB": limit / 2**20,
            "peak, MiB": peak / 2**20,
            "status": done.returncode,
            "took, s": time.perf_counter() - start_s,
            "losses": losses(Path(folder)) if done.returncode == 0 else done.stderr[-2000:],
        }
    print(json.dumps(report, indent=2))
    sys.exit(done.returncode)


def write_base(folder: Path, *, is_packed: bool, **sizes: int) -> tuple[int, int]:
    """Write a checkpoint. Returns its number of parameters, and its bytes with doubly quantised layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from outcore.memory.files.weights_file import write_safetensors

    said = {"quant_method": "bitsandbytes", **CONFIG, "bnb_4bit_compute_dtype": "bfloat16"}  # the default would be fp32
    packed = {"quantization_config": said} if is_packed else {}
    config = LlamaConfig(vocab_size=260, architectures=["LlamaForCausalLM"], **sizes, **packed)
    config.save_pretrained(folder / "base")
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}

    def tensors(name: str, shape: torch.Size, device: str) -> list[tuple[str, torch.Tensor]]:
        generator = None if device == "meta" else torch.Generator().manual_seed(hash(shape) % 1000)
        value = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        return quantized(name, value) if is_packed and "proj" in name else [(name, value)]

    made = [each for name, shape in shapes.items() for each in tensors(name, shape, "cpu")]
    write_safetensors(folder / "base", [(n, t.dtype, tuple(t.shape)) for n, t in made], made)
    numel = {name: math.prod(shape) for name, shape in shapes.items()}
    rest = sum(n for name, n in numel.items() if "proj" not in name)
    return sum(numel.values()), int((sum(numel.values()) - rest) * 0.516) + 2 * rest


def quantized(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Quantise a tensor as Transformers saves it."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(value, compress_statistics=True, quant_type="nf4")
    return [(name, packed), *((f"{name}.{end}", part) for end, part in state.as_dict(packed=True).items())]


def train(folder: Path, limit: int, nbytes: int, *, is_packed: bool) -> tuple[subprocess.CompletedProcess[str], int]:
    """Train a step in a control group, half of the base on the device and half on the host. Returns also its peak."""
    from system.test_container import memory_group, peak_bytes

    (folder / "text.txt").write_text("as a user would type it " * 100)
    command = [sys.executable, "-c", "from outcore.command.main import main; main()", "train"]
    command += ["--model", "base", "--data", "text.txt", "--out", "run", "--steps", "1", "--batch-size", "1"]
    command += ["--seq-len", "32", "--lora", "4", "--disk", ".", "--hardware", "none"]
    command += ["--device-memory", f"{nbytes // 2}", "--host-memory", f"{nbytes // 2}"]
    command += [] if is_packed else ["--load-in-4bit", "--set", "bnb_4bit_use_double_quant=true"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "OMP_"))}
    with memory_group(limit) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(
            command, cwd=folder, preexec_fn=join, capture_output=True, text=True, check=False, env=environment
        )
        return done, peak_bytes(group)


def losses(folder: Path) -> list[float]:
    """The losses of the run."""
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
