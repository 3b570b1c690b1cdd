"""Measures the memory that ranks take together: ``python research/outside/ranks_memory.py``.

Shared pages count once (PSS). Each way of keeping weights is compared with the homes of a single rank. Ranks are fresh
interpreters, which share no pages that one of them writes later. The C library is told to return freed memory
(``MALLOC_MMAP_THRESHOLD_``): otherwise it keeps the gradient of a block that autograd has made and dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(TESTS)]
os.environ.setdefault("OUTCORE_HARDWARE", "none")

WAYS = (("replicate", "link"), ("world", "link"), ("node", "host"))
CODE = """
import json, sys
sys.path.insert(0, {folder!r})
from outside.ranks_memory import run
print(json.dumps(run(*json.loads(sys.argv[1]))))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=24)
    options = parser.parse_args()
    from ranks.conftest import launch

    def taken(num_ranks: int, partition: str, gather: str) -> tuple[float, float, float]:
        """MiB of all ranks: measured, homes, and slots of the plan."""
        how: dict[str, Any] = {"is_fresh": True, "limit_s": 600, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        arguments = [json.dumps([options.width, options.blocks, num_ranks, partition, gather])]
        said = [json.loads(text) for text in launch(CODE.format(folder=str(TESTS)), num_ranks, arguments, **how)]
        return tuple(sum(one) / 2**20 for one in zip(*said, strict=True))  # type: ignore[return-value]

    alone = taken(1, "replicate", "link")
    print(f"1 rank: measured {alone[0]:.0f} MiB; homes {alone[1]:.0f}, slots {alone[2]:.0f}", flush=True)
    for way in WAYS:
        measured, homes, slots = taken(options.ranks, *way)
        print(
            f"{options.ranks} ranks, {' '.join(way)}: measured {measured:.0f} MiB; homes {homes:.0f}, slots "
            f"{slots:.0f}; homes are {homes / alone[1]:.3f} of one rank's, measured without slots "
            f"{(measured - slots) / (alone[0] - alone[2]):.3f}",
            flush=True,
        )


def run(width: int, num_blocks: int, num_ranks: int, partition: str, gather: str) -> list[int]:
    """Bytes of this rank: taken since before ``prepare``, homes, and slots. All but the root is in host memory."""
    import torch
    from plans import forced
    from torch import distributed, nn

    import outcore
    from outcore.planner.homes.pools import LEAST
    from outcore.spec.budget import reservations

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"units": [nn.Sequential], "num_ranks": num_ranks, "comfort": LEAST}
    spec, plan = forced(model, optimizer, "host", **options, partition=partition, gather=gather)  # type: ignore[arg-type]
    before = pss()
    with outcore.prepare(model, optimizer, plan=plan, units=[nn.Sequential], device="cpu") as (model, optimizer):
        model(torch.randn(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(1, width)).sum().backward()
        after = pss()
        if num_ranks > 1:
            distributed.barrier()
    if num_ranks > 1:
        distributed.destroy_process_group()
    slots = sum(r.nbytes for r in reservations(spec, plan) if r.kind == "slot")
    homes = sum(r.nbytes for r in reservations(spec, plan) if r.kind != "slot")
    return [after - before, homes, slots]


def pss() -> int:
    """Bytes of this process, with its share of the pages that others have, too."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
