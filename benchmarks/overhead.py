"""What a prepared model costs over the plain loop where everything fits on the device: CPU seconds of tiny steps.

Prints one JSON object. The models are so small that a step is the interpreter's work rather than the kernels': a Llama,
and a tower of small multilayer perceptrons. Both loops are in memory at once, with the same values, and take turns of
``--steps`` steps, since machines are noisy; ratios are taken within a turn. The plain loop has no activation
checkpointing and steps ``torch.optim.AdamW(fused=True)``; both clip. The prepared model follows the plan that
``prepare`` makes by itself. With ``--device cpu`` the time is that of the process on one thread, so other work on the
machine does not count.

    python benchmarks/overhead.py --turns 21 --steps 20
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from measuring import context, spread
from step import HYPER, build, synchronize
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import outcore

Step = Callable[[], torch.Tensor]


class Perceptrons(nn.Module):
    """Blocks of two small layers."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width = args.hidden
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(args.layers)
        )
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return SimpleNamespace(loss=functional.mse_loss(self.head(x), y))


def loop(model: nn.Module, optimizer: Any, batch: dict[str, torch.Tensor]) -> Step:
    """Return a step of the loop, which is the same for both."""

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def turn(step: Step, steps: int) -> float:
    """Return CPU seconds per step."""
    synchronize()
    start = time.process_time()
    for _ in range(steps):
        step()
    synchronize()
    return (time.process_time() - start) / steps


def compare(model: nn.Module, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Run both loops in turns."""
    twin = copy.deepcopy(model).to(args.device)
    plain = loop(twin, torch.optim.AdamW(twin.parameters(), fused=True, **HYPER), batch)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    with outcore.prepare(model, optimizer, device=args.device) as (model, streamed):
        prepared = loop(model, streamed, batch)
        for _ in range(3):
            if not torch.equal(plain(), prepared()):
                raise AssertionError("the losses differ")
        seconds = [(turn(plain, args.steps), turn(prepared, args.steps)) for _ in range(args.turns)]
        plan = streamed.plan
    return {
        "parameters": sum(p.numel() for p in twin.parameters()),
        "plan": {"plain": plan.plain, "kept_bytes": plan.kept_bytes},
        "plain_s": spread([a for a, _ in seconds]),
        "prepared_s": spread([b for _, b in seconds]),
        "over_plain": spread([b / a for a, b in seconds]),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=97)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = args.batch_size, args.seq_len
    tokens = torch.randint(args.vocabulary, shape).to(args.device)
    points = torch.randn(2, *shape, args.hidden).to(args.device)
    results = {
        "llama": compare(build(args).float(), {"input_ids": tokens, "labels": tokens}, args),
        "perceptrons": compare(Perceptrons(args), {"x": points[0], "y": points[1]}, args),
    }
    print(json.dumps({"benchmark": "overhead", "results": results, **context("transformers")}))


if __name__ == "__main__":
    main()
