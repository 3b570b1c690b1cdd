"""Bytes between ranks: what the plan lists, what the lanes count, and what the network interface has seen.

Weights are whole on each rank, cut over all of them, or one copy in host memory.

    unshare --net sh -c "ip link set lo up; python research/outside/ranks_wire.py"

``unshare`` gives the ranks a loopback interface of their own, whose counters nothing else moves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(TESTS)]
os.environ.setdefault("OUTCORE_HARDWARE", "none")

STEPS, MICRO_BATCHES = 10, 2
LANES = ("reduce", "gather", "link")
WAYS = (("replicate", "link"), ("world", "link"), ("node", "host"))
RUN = "from outside.ranks_wire import rank; rank(*sys.argv[1:])"


def received_bytes() -> int:
    """Bytes received by the loopback interface."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def rank(folder: str, partition: str, gather: str) -> None:
    """Run one rank."""
    import torch
    from plans import forced
    from ranks.cases import Block, Net

    import outcore
    from outcore.planner.paper.paper_schedule import schedule
    from outcore.spec.schedule import usual_visits

    torch.set_num_threads(1)
    num_ranks = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Net("plain", width=384, num_blocks=4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ways = {"num_ranks": num_ranks, "partition": partition, "gather": gather}
    spec, plan = forced(model, optimizer, "host", units=[Block], **ways)
    listed = schedule(spec, plan, usual_visits(spec, MICRO_BATCHES)).moved_bytes()
    budget = outcore.Budget(disk=folder)
    model, optimizer = outcore.prepare(model, optimizer, plan=plan, units=[Block], budget=budget, device="cpu")
    ids = torch.randint(29, (2, 5))

    def steps(count: int) -> None:
        for _ in range(count):
            for number in range(MICRO_BATCHES):
                model(ids, number).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.barrier()

    steps(2)
    counted, seen = optimizer.traffic(), received_bytes()
    steps(STEPS)
    found = {"interface": (received_bytes() - seen) / STEPS}
    for lane in LANES:
        found[lane] = (optimizer.traffic().get(lane, 0) - counted.get(lane, 0)) / STEPS
        found[f"{lane} of the plan"] = listed.get(lane, 0)
    outcore.close(model)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    options = parser.parse_args()
    from ranks.conftest import launch

    for num_ranks, way in itertools.product(options.ranks, WAYS):
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
            found = json.loads(launch(RUN, num_ranks, [folder, *way], timeout_s=240)[0])
        of_plan = num_ranks * sum(found[f"{lane} of the plan"] for lane in LANES)
        facts = {"ranks": num_ranks, "weights": " ".join(way), **found}
        print(json.dumps({**facts, "interface over plan": found["interface"] / of_plan}), flush=True)


if __name__ == "__main__":
    main()
