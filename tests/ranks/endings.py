"""Runs that end while ranks are apart: one still reads weights, another has closed. Run as a program on all ranks.

Delays on each lane lie around the last step and around ``close``, and differ from rank to rank. Each rank prints for
each run what it read: a digest of the weights, nothing if it closed at once, or how it lost the other ranks.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from plans import forced, prepare_for_test

import outcore
from outcore.core.errors import OutcoreError
from outcore.device import threads
from outcore.device.faults import DELAYABLE, Faults
from outcore.planner.homes.pools import Comfort

from .cases import DEVICE, Block, Case, begin, digest, made, micro_batches, plain, train
from .conftest import launch

STEPS = (1, 2, 3, 5)
WAYS = ("replicate", "link"), ("node", "host"), ("world", "link"), ("node", "link")
LATE_S = 0.04


class Ending(NamedTuple):
    """How a run ends. All ranks but the reader close as soon as they may."""

    case: Case
    num_steps: int
    kind: str
    """See ``KINDS``."""
    lanes: tuple[str, ...]
    """Lanes with long pauses around the last step and ``close``."""
    slow: int
    """The rank with these pauses; from the number of ranks on, all."""
    late: tuple[float, ...]
    """Pauses in seconds of each rank before it closes."""
    reader: int
    """The rank that reads weights before it closes, modulo the number of ranks."""


def endings(seed: int, count: int) -> Iterator[Ending]:
    """Draw endings: all lengths, kinds, lanes and ways to hold weights in turn, and random mixtures of them."""
    draw = random.Random(seed)
    for number in range(count):
        partition, gather = WAYS[number // 2 % 4]
        case = Case(
            homes=draw.choice(["device", "host", "disk", "mixed"]) if gather == "link" else "host",
            share=draw.choice([0.0, 0.0, 1.0]),
            depth=draw.randrange(3),
            permute=draw.choice([0, 0, 0, draw.randrange(1, 1000)]),
            delays=number + 1,
            partition=partition,
            gather=gather,
        )
        lanes = (("update", "gather", "link", *DELAYABLE)[number % (len(DELAYABLE) + 3)], draw.choice(DELAYABLE))
        late = tuple(draw.choice([0.0, 0.0, draw.uniform(0.0, LATE_S)]) for _ in range(3))
        kind = list(KINDS)[number % len(KINDS)]
        yield Ending(case, STEPS[number % 4], kind, lanes, draw.randrange(4), late, draw.randrange(6))


class Run:
    """One run of one rank, up to its last step."""

    def __init__(self, ending: Ending, folder: Path, num_ranks: int, rank: int) -> None:
        self.ending, self.folder, self.num_ranks, self.rank = ending, folder, num_ranks, rank
        case = ending.case
        comfort = Comfort(prefetch_depth=case.depth, num_buckets=case.depth + 1, max_slots_host=case.depth + 1)
        homes: Any = case.homes
        if homes == "mixed":
            homes = lambda i: (["host", "disk"][i % 2], "host", ["disk", "host"][i % 2])  # noqa: E731
        model, optimizer = made(case)
        how: Any = {"share": case.share, "comfort": comfort, "partition": case.partition, "gather": case.gather}
        _, plan = forced(model, optimizer, homes, units=[Block], num_ranks=num_ranks, **how)
        permute = case.permute + rank if case.permute else None
        faults = Faults(delays=dict.fromkeys(DELAYABLE, 1e-4), seed=case.delays + rank, permute=permute)
        budget = outcore.Budget(disk=str(folder))
        options: Any = {"plan": plan, "units": [Block], "budget": budget, "device": DEVICE, "faults": faults}
        self.model, self.optimizer = self.prepared = prepare_for_test(model, optimizer, **options)
        self.is_joint = self.optimizer.engine.has_cut_weights  # then weights are read by all ranks or none
        self.reads = self.is_joint or ending.reader % num_ranks == rank

    def train(self, steps: Sequence[int]) -> None:
        """Train some steps."""
        how: Any = {"num_ranks": self.num_ranks, "rank": self.rank, "own_norm": False, "steps": steps}
        train(self.model, self.optimizer, self.ending.case, **how)

    def end(self) -> str:
        """Train to the last step and end. Returns what this rank has read."""
        ending, engine = self.ending, self.optimizer.engine
        said, is_kept = "", ending.reader % 2 == 0 if self.is_joint else self.reads
        with suppress(_OverError), self.prepared:
            self.train(range(ending.num_steps - 1))
            if self.rank == ending.slow or ending.slow >= self.num_ranks:
                engine.device._delays._longest_s |= dict.fromkeys(ending.lanes, LATE_S)
            self.train(range(ending.num_steps - 1, ending.num_steps))
            said = KINDS[ending.kind](self)
            time.sleep(ending.late[self.rank])
            if not is_kept:
                outcore.close(self.model, keep_weights=False)
        if engine.access.world.failure is not None:
            raise engine.access.world.failure
        return said

    def read(self) -> str:
        """Read all weights, if this rank reads."""
        return digest(self.model) if self.reads else ""


# Kinds: what happens between the last step and the end. Each returns what this rank has read.


def _reads(run: Run) -> str:
    return run.read()


def _evaluates(run: Run) -> str:
    if run.reads:
        with torch.no_grad():
            run.model(micro_batches(0)[0], 0)
    return run.read()


def _begins_a_step(run: Run) -> str:
    """One more forward and no backward, as in a loop that notices only then that it is over."""
    run.model(micro_batches(0)[run.rank], run.rank)
    return run.read()


def _saves(run: Run) -> str:
    outcore.save_checkpoint(run.model, run.optimizer, run.folder / "checkpoints", step=1)
    return run.read()


def _loads(run: Run) -> str:
    outcore.save_checkpoint(run.model, run.optimizer, run.folder / "checkpoints", step=1, wait=True)
    run.train(range(1))
    outcore.load_checkpoint(run.model, run.optimizer, run.folder / "checkpoints")
    return run.read()


def _gathers(run: Run) -> str:
    if run.reads:
        with outcore.gathered(run.model):
            return digest(run.model)
    return ""


def _raises(run: Run) -> str:
    """The others leave their block by an error."""
    if not run.reads:
        raise _OverError
    return run.read()


def _exits(run: Run) -> str:
    """The others reach the end of their process without ``close``."""
    if not run.reads:
        threads._end()
    return run.read()


KINDS: dict[str, Callable[[Run], str]] = {
    "reads": _reads,
    "evaluates": _evaluates,
    "begins a step": _begins_a_step,
    "saves": _saves,
    "loads": _loads,
    "gathers": _gathers,
    "raises": _raises,
    "exits": _exits,
}


class _OverError(Exception):
    """The program of this rank is over."""


def main(arguments: Sequence[str]) -> None:
    """Run one rank. Args: arguments: Seed and number of endings, and a folder."""
    rank, num_ranks = begin()
    seed, count, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    for number, ending in enumerate(endings(seed, count)):
        here = folder / str(number)
        here.mkdir(exist_ok=True)
        try:
            said = Run(ending, here, num_ranks, rank).end()
        except OutcoreError as error:
            said = f"lost: {error}"
        print(json.dumps(said), flush=True)
    torch.distributed.destroy_process_group()


# In the process that starts the ranks.


def run(seed: int, count: int, num_ranks: int, folder: str | Path) -> list[list[str]]:
    """Run all endings of a seed. Returns for each what each rank has printed."""
    code = "from ranks.endings import main; main(sys.argv[1:])"
    said = launch(code, num_ranks, [str(seed), str(count), str(folder)])
    return [[json.loads(line) for line in of_ranks] for of_ranks in zip(*map(str.splitlines, said), strict=True)]


def lost(found: Sequence[Sequence[str]], seed: int, count: int) -> list[str]:
    """Say of each run that was lost how it was. Args: found: What ``run`` returned for this seed and number."""
    torch.set_num_threads(1)  # as in the ranks
    wanted = {num_steps: plain(Case(), num_steps) for num_steps in STEPS}
    wrong = []
    for said, ending in zip(found, endings(seed, count), strict=True):
        read = {text for text in said if text}
        if read != {wanted[ending.num_steps]}:
            wrong.append(f"{len(said)} ranks, {ending}: expected {wanted[ending.num_steps]}, but got {said}")
    return wrong
