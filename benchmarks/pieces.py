"""The cost of a batch in pieces beside accumulation over the same pieces, where the weights bind.

Prints one JSON object. Blocks sleep in forward and backward for each row of a batch, so the whole batch takes the same
compute time in any number of pieces. The bus is so slow that fetching a block takes ``--weights`` times as long as
its forward of all rows. Both contestants run in turn, for each number of pieces: units that run the batch in pieces
(``micro_batches_in_unit``), and a loop over as many micro-batches. ``fetched_bytes`` are those of a step.

    python benchmarks/pieces.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from measuring import context, prepare_slowed, spread
from torch import nn

from outcore.device.faults import Faults
from outcore.model.partition import partition
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.spec.plan import Plan, UnitPlan

ROWS = 16


class Sleep(torch.autograd.Function):
    """Sleeps for each row, twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, row_s: float) -> torch.Tensor:
        time.sleep(row_s * len(x))
        ctx.shape, ctx.row_s = weight.shape, row_s
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(2 * ctx.row_s * len(grad))
        return grad, grad.new_full(ctx.shape, 1e-6), None


class Block(nn.Module):
    """A block with one parameter."""

    def __init__(self, numel: int, row_s: float) -> None:
        super().__init__()
        self.weight, self.row_s = nn.Parameter(torch.zeros(numel)), row_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.row_s)


class Row(nn.Module):
    """A sequence of blocks."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        row_s = args.milliseconds / 1e3 / ROWS
        self.scale = nn.Linear(1, 1)
        self.blocks = nn.ModuleList(Block(args.numel, row_s) for _ in range(args.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale(x)
        for block in self.blocks:
            x = block(x)
        return x.sum() / ROWS


@contextlib.contextmanager
def prepared(args: argparse.Namespace, pieces: int) -> Iterator[Any]:
    """Prepare with weights and gradients on the host, and activations kept."""
    model = Row(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cut = partition(model, units=[Block], state_names=("exp_avg", "exp_avg_sq"), micro_batches_in_unit=pieces)
    tiers = [("device", "keep"), *[("host", "keep")] * args.blocks]
    units = [
        UnitPlan(name=unit.name, weights=tier, gradients=tier, states=tier, policy=policy)
        for unit, (tier, policy) in zip(cut.spec.units, tiers, strict=True)
    ]
    pools = pools_for(cut.spec, units, Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3))
    plan = Plan(precision="fp32", units=tuple(units), pools=pools, prefetch_depth=2, micro_batches_in_unit=pieces)
    fetch_s = args.weights * args.milliseconds / 1e3
    throttle = {"h2d": cut.spec.units[-1].weight_bytes / fetch_s}
    options = {"plan": plan, "units": [Block], "device": "cpu", "micro_batches_in_unit": pieces}
    with prepare_slowed(model, optimizer, faults=Faults(throttle=throttle), **options) as result:
        yield result


def measure(args: argparse.Namespace, pieces: int, micro_batches: int) -> dict[str, Any]:
    """Return the seconds and bytes of a step."""
    batch, seconds = torch.ones(ROWS, 1), []
    with prepared(args, pieces) as (model, optimizer):
        for step in range(args.steps + 1):
            before, start_s = optimizer.traffic()["h2d"], time.perf_counter()
            for rows in batch.chunk(micro_batches):
                model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:
                seconds.append(time.perf_counter() - start_s)
        fetched = optimizer.traffic()["h2d"] - before
    return {"step_s": spread(seconds), "fetched_bytes": fetched}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--numel", type=int, default=2**16, help="parameters of a block")
    parser.add_argument("--milliseconds", type=float, default=16.0, help="forward of a block, all rows")
    parser.add_argument("--weights", type=float, default=2.0, help="how many forwards bringing a block takes")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the blocks sleep
    results = {}
    for count in args.pieces:
        pieces, accumulated = measure(args, count, 1), measure(args, 1, count)
        faster = accumulated["step_s"]["median"] / pieces["step_s"]["median"]
        results[count] = {"in_pieces": pieces, "accumulation": accumulated, "times_faster": round(faster, 2)}
    shape = {"rows": ROWS, "blocks": args.blocks, "forward_s": args.milliseconds / 1e3, "weights": args.weights}
    print(json.dumps({"benchmark": "pieces", **shape, "results": results, **context()}))


if __name__ == "__main__":
    main()
