"""The cost of checkpoints: steps during a save, steps that wait for a save, and the drive's own rate.

Prints one JSON object. Blocks sleep in forward and backward, so the host is free as with an accelerator. Three runs
take turns: without checkpoints, with checkpoints during training, and with ``wait=True``. ``worst`` is the slowest step
during a checkpoint, over the median step of the run without checkpoints; ``lost`` is what the checkpoints added to
the whole run. ``held`` is how long the call itself took. ``straight`` writes as many bytes with as many threads and the
same sums, from memory, or from another file if states are on disk: it shows what the drive can do.

    python benchmarks/saving.py --folder DIR [--clip] [--early] [--share 0.5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import context, spread
from pieces import Row

import outcore
from outcore.memory.files.checkpoint_file import BlockPool, CheckpointFile
from outcore.model.partition import partition
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.spec.plan import Plan, UnitPlan

TIERS = ("host", "disk")
ROWS = 16


@contextlib.contextmanager
def prepared(args: argparse.Namespace, tier: str) -> Iterator[Any]:
    """Prepare with weights and gradients on the host, and states on a tier."""
    torch.manual_seed(0)
    model = Row(args)
    units = [type(model.blocks[0])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cut = partition(model, units=units, state_names=("exp_avg", "exp_avg_sq"))
    homes = [("device", "device"), *[("host", tier)] * args.blocks]
    updates = ["host", *["device" if i < args.share * args.blocks else "host" for i in range(args.blocks)]]
    plans = [
        UnitPlan(
            name=unit.name,
            weights=weights,
            gradients=weights,
            states=states,
            policy="keep",
            update=update,
            early=args.early and update == "host" and bool(unit.name),
        )
        for unit, (weights, states), update in zip(cut.spec.units, homes, updates, strict=True)
    ]
    pools = pools_for(cut.spec, plans, Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3))
    plan = Plan(precision="fp32", units=tuple(plans), pools=pools, prefetch_depth=2, accumulation_steps=1)
    options = {"budget": outcore.Budget(disk=str(args.folder)), "device": "cpu", "accumulation_steps": 1}
    with outcore.prepare(model, optimizer, plan=plan, units=units, clipping=args.clip, **options) as result:
        yield result


def run(args: argparse.Namespace, tier: str, mode: str) -> dict[str, Any]:
    """Return the seconds of steps and of checkpoints."""
    steps, beside, saves, held, nbytes = [], [], [], [], 0
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    batch = torch.ones(ROWS, 1)
    with prepared(args, tier) as (model, optimizer):
        save, began_s, start_s = None, 0.0, time.perf_counter()
        for step in range(args.steps + 1):
            was_saving = save is not None and not save.done
            step_s = time.perf_counter()
            model(batch).backward()
            if args.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            if mode != "without" and step % args.every == 1:
                began_s, was_saving = time.perf_counter(), True
                save = outcore.save_checkpoint(model, optimizer, folder, step=step, keep=1, wait=mode == "at_once")
                held.append(time.perf_counter() - began_s)
            if save is not None and save.done and was_saving:
                saves.append(time.perf_counter() - began_s)
            if step:
                (beside if was_saving else steps).append(time.perf_counter() - step_s)
            else:
                start_s = time.perf_counter()
        total_s = time.perf_counter() - start_s
        if save is not None and not save.done:
            save.wait()
            saves.append(time.perf_counter() - began_s)
        if save is not None:
            nbytes = sum(path.stat().st_size for path in save.wait().iterdir() if path.is_file())
    shutil.rmtree(folder)
    return {"steps": steps, "beside": beside, "saves": saves, "held": held, "total_s": total_s, "bytes": nbytes}


def straight(args: argparse.Namespace, nbytes: int, *, is_copy: bool) -> float:
    """Seconds to write ``nbytes`` and make them durable. Args: is_copy: Whether the bytes come from the drive."""
    data, nbytes = torch.zeros(2**22, dtype=torch.uint8), nbytes // 4096 * 4096
    source = os.open(args.folder / "source", os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def read(start: int, stop: int, to: torch.Tensor) -> None:
        if is_copy:
            os.preadv(source, [to.numpy().data], start)
        else:
            to.copy_(data[: stop - start])

    pool, path = BlockPool(), args.folder / "straight"
    if is_copy:
        CheckpointFile(args.folder / "source", nbytes, pool).write(nbytes, lambda a, b, to: to.copy_(data[: b - a]))
    start_s = time.perf_counter()
    CheckpointFile(path, nbytes, pool).write(nbytes, read)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start_s
    pool.close()
    os.close(source)
    path.unlink()
    (args.folder / "source").unlink()
    return seconds


def measure(args: argparse.Namespace, tier: str) -> dict[str, Any]:
    """Make all three runs, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in ("without", "beside", "at_once")}
    drive_s = []
    for _ in range(args.turns):
        for mode, found in runs.items():
            found.append(run(args, tier, mode))
        drive_s.append(straight(args, runs["beside"][-1]["bytes"], is_copy=tier == "disk"))
    median_s = statistics.median(s for found in runs["without"] for s in found["steps"])
    plain_s = statistics.median(found["total_s"] for found in runs["without"])
    result: dict[str, Any] = {"step_s": spread([s for found in runs["without"] for s in found["steps"]])}
    result["without_worst"] = spread([max(found["steps"]) / median_s for found in runs["without"]])
    result["bytes"] = runs["beside"][-1]["bytes"]
    result["straight_bytes_per_s"] = spread([result["bytes"] / s for s in drive_s])
    for mode in ("beside", "at_once"):
        saves = [s for found in runs[mode] for s in found["saves"]]
        slow = [max(found["beside"]) / median_s for found in runs[mode]]
        lost_s = statistics.median(found["total_s"] for found in runs[mode]) - plain_s
        count = statistics.median(len(found["saves"]) for found in runs[mode])
        result[mode] = {"worst": spread(slow), "save_s": spread(saves), "lost_s_per_save": lost_s / max(count, 1)}
        result[mode]["held_s"] = spread([s for found in runs[mode] for s in found["held"]])
    rates = [s / drive for found, drive in zip(runs["at_once"], drive_s, strict=True) for s in found["saves"]]
    result["rate_over_straight"] = spread([1 / rate for rate in rates])
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the drive")
    parser.add_argument("--tiers", nargs="*", choices=TIERS, default=list(TIERS))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--numel", type=int, default=2**22, help="parameters of a block")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="forward of a block")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--clip", action="store_true", help="gradients, by their norm")
    parser.add_argument("--early", action="store_true", help="updates inside backward")
    parser.add_argument("--share", type=float, default=0.0, help="of the blocks, updated on the device")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the blocks sleep
    results = {tier: measure(args, tier) for tier in args.tiers}
    shape = {"blocks": args.blocks, "parameters": args.blocks * args.numel, "forward_s": args.milliseconds / 1e3}
    shape |= {"clip": args.clip, "early": args.early, "share": args.share}
    print(json.dumps({"benchmark": "saving", **shape, "every": args.every, "results": results, **context()}))


if __name__ == "__main__":
    main()
