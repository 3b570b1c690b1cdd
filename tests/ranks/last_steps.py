"""Runs of several ranks that do not end at the same moment, as those of the command: rank 0 still reads the weights of
the last step while the others close. Late lanes put off what one rank needs of another. Run as a program on all ranks.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plans import forced
from torch import nn

import outcore
from outcore.api import prepare_for_test
from outcore.device.faults import DELAYABLE, NO_FAULTS, Faults
from outcore.planning.homes.pools import Comfort

from .cases import DEVICE, Block, Case, digest, made, micro_batches

LENGTHS = (1, 2, 3, 5)
LONGEST_S = 0.04
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Run(NamedTuple):
    """A run. Whether rank 0 reads weights alone depends on whether they are cut."""

    steps: int
    homes: str
    partition: str
    gather: str
    share: float
    clips: bool
    lane: str
    """The lane that is late around the last step and around ``close``; empty: none."""
    seed: int = 0


def runs(seed: int, count: int) -> Iterator[Run]:
    """Draw runs whose lanes are late in turn."""
    chance = random.Random(seed)
    for number in range(count):
        partition, gather = chance.choice([("replicate", "link"), ("node", "host"), ("world", "link")])
        yield Run(
            steps=LENGTHS[number % len(LENGTHS)],
            homes=chance.choice(["host", "disk", "device"]),
            partition=partition,
            gather=gather,
            share=chance.choice([0.0, 0.0, 1.0]),
            clips=chance.random() < 0.5,
            lane=DELAYABLE[number % len(DELAYABLE)],
            seed=seed + number,
        )


def trained(run: Run, folder: str) -> str | None:
    """Train, read all weights on rank 0 (on all ranks if they are cut), and close. Returns a digest of the weights."""
    model, optimizer = made(Case())
    how: dict[str, Any] = {"num_ranks": NUM_RANKS, "per_node": NUM_RANKS, "share": run.share}
    comfort = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
    how |= {"partition": run.partition, "gather": run.gather, "comfort": comfort}
    homes = run.homes if run.share == 0.0 else "host"
    _, plan = forced(model, optimizer, homes, units=[Block], **how)
    late = Faults(delays={run.lane: LONGEST_S}, seed=run.seed + 1000 * RANK) if run.lane else NO_FAULTS
    budget = outcore.Budget(disk=folder)
    model, optimizer = prepare_for_test(
        model, optimizer, plan=plan, units=[Block], budget=budget, device=DEVICE, faults=late
    )
    for step in range(run.steps):
        batches = micro_batches(step)
        for number in range(RANK, len(batches) // NUM_RANKS * NUM_RANKS, NUM_RANKS):
            model(batches[number], number).square().sum().backward()
        if run.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    pause_s = random.Random(f"{run.seed} {RANK}").choice([0.0, 0.0, LONGEST_S]) if run.lane else 0.0
    time.sleep(pause_s)
    reads = RANK == 0 or optimizer.engine.has_cut_weights
    found = digest(model) if reads else None
    outcore.close(model, keep_weights=False)
    return found if RANK == 0 else None


def main(arguments: list[str]) -> None:
    """Args: arguments: The first seed, the number of runs, and a folder for the disk tier."""
    seed, count, folder = int(arguments[0]), int(arguments[1]), arguments[2]
    undisturbed: dict[Run, str | None] = {}
    for run in runs(seed, count):
        plain = run._replace(lane="", seed=0)
        if plain not in undisturbed:
            undisturbed[plain] = trained(plain, folder)
        found = trained(run, folder)
        assert found == undisturbed[plain], run
        assert not list(Path(folder).iterdir()) or NUM_RANKS > 1, run
    print(count)
