"""Where training ends with states in fewer bytes, beside the spread of fp32 runs that differ only in their seeds.

A small Llama reads Python's own standard library byte by byte. Prints one JSON object: the mean loss over held-out
batches at the end, per run.

    python benchmarks/convergence.py --steps 2000 > report.json
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from measuring import context
from transformers import LlamaConfig, LlamaForCausalLM

import outcore

LENGTH, ROWS, HELD_OUT = 96, 8, 64
FORMATS = ("bf16", "8bit")


def text() -> torch.Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(data) - LENGTH, (ROWS,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in starts])


def train(data: torch.Tensor, seed: int, state_format: str, steps: int) -> dict[str, float]:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "state_format": state_format}], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    cut = len(data) * 9 // 10
    drawn, held_out = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10**6)
    start_s, seen = time.perf_counter(), []
    with outcore.prepare(model, optimizer, hardware="none") as (model, optimizer):
        for step in range(steps):
            tokens = batch(data[:cut], drawn)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen += [loss.item()] if step >= steps - 100 else []
        model.eval()
        with torch.no_grad():
            tests = [batch(data[cut:], held_out) for _ in range(HELD_OUT)]
            losses = [model(input_ids=tokens, labels=tokens).loss.item() for tokens in tests]
    return {
        "seed": seed,
        "state_format": state_format,
        "held_out_loss": sum(losses) / len(losses),
        "last_training_loss": sum(seen) / len(seen),
        "seconds": time.perf_counter() - start_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5, help="of fp32 (default: 5)")
    args = parser.parse_args()
    data = text()
    runs = [train(data, seed, "fp32", args.steps) for seed in range(args.seeds)]
    spread = [run["held_out_loss"] for run in runs]
    lossy = [train(data, 0, state_format, args.steps) for state_format in FORMATS]
    within = {r["state_format"]: min(spread) <= r["held_out_loss"] <= max(spread) for r in lossy}
    report = {"benchmark": "convergence", **context("transformers"), "steps": args.steps, "runs": runs + lossy}
    print(json.dumps({**report, "fp32": [min(spread), max(spread)], "is_within_fp32": within}, indent=2))


if __name__ == "__main__":
    main()
