"""Waits that are dropped, one at a time. Run as a program on all ranks. Prints for each whether its race was found."""

from __future__ import annotations

import json
import os
import sys

from plans import forced
from torch import distributed

import outcore
from outcore.core.errors import RaceError
from outcore.device.faults import Faults
from outcore.planner.homes.pools import LEAST

from .cases import Block, Case, begin, checked, made, train

_ALWAYS = {"bucket free", "gradients exchanged", "gradients made", "slot free", "weights updated"}
BETWEEN_RANKS = {
    2: {*_ALWAYS, "gradients landed", "landing free"},
    3: {*_ALWAYS, "gradients added up", "sums there"},
}
"""Number of ranks -> labels of waits around what the ranks do together."""
SCENARIOS = [
    Case(homes="host", clip=0.3),
    Case("absent", homes="device", clip=0.3),
    Case("plain", "bfloat16", homes="disk"),
    Case("tied", share=1.0),
]
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def run(case: Case, folder: str, skip: frozenset[str] = frozenset()) -> set[str] | None:
    """Return the labels that were seen, or None if a race was found."""
    model, optimizer = made(case)
    options = {"homes": case.homes, "units": [Block], "share": case.share, "comfort": LEAST, "num_ranks": NUM_RANKS}
    _, plan = forced(model, optimizer, **options)
    model, optimizer = checked(model, optimizer, plan, folder, Faults(skip=skip))
    try:
        train(model, optimizer, case, num_ranks=NUM_RANKS, rank=RANK, own_norm=False)
        return set(optimizer.engine.device.labels_seen)
    except RaceError:
        return None
    finally:
        outcore.close(model, keep_weights=False)


def main() -> None:
    begin()
    folder = sys.argv[1]
    seen = {number: run(case, folder) for number, case in enumerate(SCENARIOS)}
    found = {}
    for label in sorted(BETWEEN_RANKS[NUM_RANKS]):
        using = [SCENARIOS[number] for number, labels in seen.items() if label in labels]
        found[label] = any(run(case, folder, frozenset({label})) is None for case in using)
    print(json.dumps(found), flush=True)
    distributed.destroy_process_group()
