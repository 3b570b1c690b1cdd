"""How much device memory is saved if activations leave the device: predicted from shapes, and counted by a device.

python benchmarks/activation_peak.py --json peak.json                             # on a GPU it is counted, too
python tests/simulated_gpu/run.py benchmarks/activation_peak.py --json peak.json     # counted on the simulated one

Shapes are followed with the kernels of ``--device``. The CPU's fused attention, which keeps one number per row, stands
for a GPU's. Dropout in attention, for which the CPU has no fused kernel, is left out. The simulated GPU has plain
attention only, which keeps all scores: its counts compare small models with each other.

Shapes are those of SSDTrain's measurement (arXiv 2408.10013: GPT, 16 x 1024 tokens, at most 47% less at its peak), and
of whole models. *Beside the model* is all that a step has alive except weights, gradients and states: what is saved,
what blocks work with, embeddings and hidden states, and, if activations leave, the slots that they come back to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

import outcore
from outcore.model.partition import partition
from outcore.planner.forward.footprint import Footprint
from outcore.planner.forward.saved_bytes import footprint_of
from outcore.planner.homes.activation_policies import ActivationPolicy, Activations
from outcore.spec.plan import POLICIES, Policy, UnitPlan

SSDTRAIN_LESS = 0.47
GOAL_LESS = 0.70
GIB = 2**30


def gpt(hidden: int, layers: int, heads: int, length: int = 1024) -> GPT2Model:
    return GPT2Model(
        GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=length, vocab_size=512, attn_pdrop=0.0)
    )


def llama(hidden: int, layers: int, heads: int, inner: int, kind: Any = LlamaModel, config: Any = LlamaConfig) -> Any:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 512}
    return kind(
        config(**shape, num_attention_heads=heads, num_key_value_heads=heads // 4, max_position_embeddings=8192)
    )


def qwen3(hidden: int, layers: int, heads: int, inner: int) -> Any:
    return llama(hidden, layers, heads, inner, Qwen3Model, Qwen3Config)


HALVES = ["h.*.attn", "h.*.mlp"]
SHAPES: dict[str, tuple[Any, int, int]] = {
    "GPT, 8192, 4 layers (SSDTrain)": (lambda: gpt(8192, 4, 64), 16, 1024),
    "GPT, 12288, 3 layers (SSDTrain)": (lambda: gpt(12288, 3, 96), 16, 1024),
    "GPT, 16384, 2 layers (SSDTrain)": (lambda: gpt(16384, 2, 128), 16, 1024),
    "GPT, 8192, 4 layers (SSDTrain), units are halves": (lambda: gpt(8192, 4, 64), 16, 1024),
    "GPT, 12288, 3 layers (SSDTrain), units are halves": (lambda: gpt(12288, 3, 96), 16, 1024),
    "GPT-2 XL, 48 layers": (lambda: gpt(1600, 48, 25), 16, 1024),
    "GPT-3 13B, 40 layers": (lambda: gpt(5120, 40, 40), 16, 1024),
    "Llama 8B, 32 layers": (lambda: llama(4096, 32, 32, 14336), 4, 4096),
    "Qwen3 8B, 36 layers": (lambda: qwen3(4096, 36, 32, 12288), 4, 4096),
}
"""A model, its rows, and the tokens of each. Halves of a layer are attention, and what follows it."""
SMALL: dict[str, Any] = {
    "GPT": lambda: gpt(128, 24, 4, 128),
    "Llama": lambda: llama(128, 24, 4, 344),
    "Qwen3": lambda: qwen3(128, 24, 4, 344),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="shapes whose names have this in them")
    parser.add_argument("--device", default="cpu", help="with whose kernels shapes are followed")
    parser.add_argument("--no-steps", action="store_true", help="shapes alone: run nothing")
    args = parser.parse_args()
    device = torch.device(args.device)
    report = {"torch": torch.__version__, "transformers": transformers.__version__, "device": str(device)}
    report |= {"ssdtrain_less": SSDTRAIN_LESS, "goal_less": GOAL_LESS}
    report |= {"shapes": list(by_shapes(device, args.only)), "counted": []}
    if torch.cuda.is_available() and not args.no_steps:
        report["counted"] = list(counted())
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


def by_shapes(device: torch.device, only: str) -> Iterator[dict[str, Any]]:
    """Yield what a step is predicted to take."""
    for name, (build, rows, length) in SHAPES.items():
        if only not in name:
            continue
        print(name, file=sys.stderr)
        with torch.device("meta"):
            model = build().to(torch.bfloat16).train()
            ids = torch.zeros(rows, length, dtype=torch.long)
        halves = HALVES if name.endswith("halves") else None
        cut = partition(model, state_names=(), precision=None, units=halves)
        found = footprint_of(cut, {"input_ids": ids, "use_cache": False}, device)
        names = [unit.name for unit in cut.spec.units]
        kept = peak(found, names, "keep")
        row = {"name": name, "tokens": rows * length, "keep_gib": round(kept / GIB, 3), "ways": {}}
        for policy in POLICIES:
            here, away = peak(found, names, policy), peak_away(found, names, policy)
            row["ways"] |= {
                f"{policy}, device": {"gib": round(here / GIB, 3), "less": round(1 - here / kept, 3)},
                f"{policy}, away": {"gib": round(away / GIB, 3), "less": round(1 - away / kept, 3)},
            }
        yield row


def peak(found: Footprint, names: list[str], policy: Policy) -> int:
    homes: Any = {"weights": "device", "gradients": "device", "states": "device"}
    return found.peak_bytes(UnitPlan(name=name, policy=policy, **homes) for name in names)


def peak_away(found: Footprint, names: list[str], policy: Policy) -> int:
    """Peak bytes if activations leave, with their slots on the device."""
    sending = Activations(way=ActivationPolicy("host", policy), footprint=found)
    homes: Any = {"weights": "device", "gradients": "device", "states": "device"}
    units = [sending.unit(UnitPlan(name=name, **homes)) for name in names]
    return found.peak_bytes(units) + sending.taken["device"]


def counted() -> Iterator[dict[str, Any]]:
    """Yield what the device's own counter reports of small models."""
    for name, build in SMALL.items():
        kept, _ = counted_step(build, None)
        away, slots = counted_step(build, "host")
        less = round(1 - (away + slots) / kept, 3)
        yield {"name": f"{name}, 24 layers", "keep_mib": kept / 2**20, "away_mib": (away + slots) / 2**20, "less": less}


def counted_step(build: Any, activations: Any) -> tuple[int, int]:
    """Bytes in a step beyond those between steps, and bytes of the slots."""
    torch.manual_seed(0)
    model: nn.Module = build().train()
    sample = {"input_ids": torch.zeros(4, 128, dtype=torch.long, device="cuda"), "use_cache": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sample": sample, "activations": activations, "device": "cuda", "hardware": "none"}
    peaks = []
    with outcore.prepare(model, optimizer, **options) as (model, optimizer):
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(**sample).last_hidden_state.float().square().mean().backward()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            optimizer.step()
            optimizer.zero_grad()
        slots = [p.total_bytes for p in optimizer.plan.pools if p.kind == "activations" and p.tier == "device"]
    return max(peaks[1:]), sum(slots)


if __name__ == "__main__":
    main()
