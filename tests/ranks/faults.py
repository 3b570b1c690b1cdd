"""A rank that dies, stalls, fails, or does not do what the others do. Run as a program on all ranks.

Each rank prints what happens as lines of JSON with the time: ``reached`` (the fault), ``error``, ``interrupted``, or
``went on``.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from plans import forced, prepare_for_test
from torch import distributed, nn

import outcore
from outcore.core.ranks import TIMEOUT
from outcore.planner.homes.pools import LEAST

from .cases import DEVICE, Block, Case, begin, made, micro_batches

TIMEOUT_S = float(os.environ.get("OUTCORE_TEST_TIMEOUT_S", "4"))
STALL_S = 3 * TIMEOUT_S
STEPS, MICRO_BATCHES = 3, 2
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
POINTS = {
    "forward": "torch.nn.modules.normalization:LayerNorm.forward",  # inside of a block, also when it is recomputed
    "backward": "outcore.engine.gradients.passes:BackwardGradients.deposit",
    "exchange": "outcore.ranks.world:World.exchange",
    "addition": "outcore.engine.gradients.rank_exchange:add_works",
    "norm": "outcore.engine.gradients.rank_exchange:RankNorms._take_all",
    "step": "outcore.engine.engine:Engine.step",
    "update": "outcore.engine.updates.unit_update:run_on",
    "gather": "outcore.ranks.world:World.gather",
    "link": "outcore.ranks.world:World.all_gather",
    "save": "outcore.checkpoint.shared_checkpoint:SharedCheckpoint.meet",
}
"""Places where a rank dies or stalls."""
IN_PREPARE = {
    "model": "outcore.api:cut_model",
    "device": "outcore.api:open_device",
    "values": "outcore.api:FirstValues",
    "limits": "outcore.preparation.with_ranks:limits_of",
    "homes": "outcore.engine.opened:Tiers",
    "states": "outcore.api:FirstValues.take_over",
    "first value": "outcore.ranks.world:World.copy_first",
    "hooks": "outcore.engine.opened:Attached.take_calls",
}
"""Places in ``prepare`` where a rank fails."""
NUM_SAVED_WRITES = 8
"""Approximate number of writes of one rank in a save."""
WRITE = "outcore.memory.files.checkpoint_file:CheckpointFile.write"


class Fault(NamedTuple):
    """A fault on one rank. Args: kind: See ``KINDS``."""

    kind: str
    point: str = "backward"
    count: int = 0
    """How often the point is passed before the fault."""
    rank: int = 1
    homes: str = "host"
    partition: str = "replicate"


def say(what: str, text: str = "") -> None:
    line = {"what": what, "rank": RANK, "at": time.monotonic(), "text": text}
    os.write(1, (json.dumps(line) + "\n").encode())


class At:
    """Makes something happen when a point is passed for the n-th time, on the rank that has the fault."""

    def __init__(self, where: str, count: int, happens: Callable[[], Any]) -> None:
        module, _, path = where.partition(":")
        *owners, self._name = path.split(".")
        self._owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        self._whole, self._left, self._happens = getattr(self._owner, self._name), count, happens

    def __enter__(self) -> None:
        def passed(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                say("reached")
                self._happens()
            return self._whole(*args, **options)

        if RANK == FAULT.rank:
            setattr(self._owner, self._name, passed)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._whole)


def prepared(folder: str) -> tuple[Any, Any]:
    case = Case()
    model, optimizer = made(case)
    cut = {"num_ranks": NUM_RANKS, "partition": FAULT.partition}
    _, plan = forced(model, optimizer, FAULT.homes, units=[Block], comfort=LEAST, **cut)
    budget = outcore.Budget(disk=folder)
    return prepare_for_test(model, optimizer, plan=plan, units=[Block], budget=budget, device=DEVICE)


def no(_: str) -> bool:
    """Return False: this rank does what the others do."""
    return False


def train(model: Any, optimizer: Any, folder: str, *, steps: int = STEPS, odd: Callable[[str], bool] = no) -> None:
    """Train. Args: odd: Asked before a joint operation; True if this rank leaves it out."""
    for step in range(steps):
        batches = micro_batches(step)
        for number in range(MICRO_BATCHES):
            if not odd("backward"):
                mine = number * NUM_RANKS + RANK
                model(batches[mine], mine).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not odd("step"):
            optimizer.step()
        optimizer.zero_grad()
        if _saves():
            saving = outcore.save_checkpoint(model, optimizer, f"{folder}/checkpoints", step=step, keep=1)
            if FAULT.kind == "fills_the_drive":  # the second save must be the one that fails
                saving.wait()


def _saves() -> bool:
    """Whether each step is followed by a save, which takes as long as the step. An interrupt would wait for a save."""
    if FAULT.kind in ("dies", "stalls"):
        return FAULT.point == "save" or FAULT.homes == "disk"
    return FAULT.kind != "is_interrupted"


def wait_less(optimizer: Any) -> None:
    """Shorten the timeout only once all ranks have begun, which may take long on a busy machine."""
    os.environ[TIMEOUT] = str(TIMEOUT_S)
    for group in optimizer.engine.access.world._groups._of_host:
        distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)


def ends(model: Any, work: Callable[[], None]) -> None:
    """Run ``work`` and report what a user's program would see."""
    try:
        work()
        outcore.close(model)
    except outcore.OutcoreError as error:
        say("error", str(error))
        with suppress(outcore.OutcoreError):  # the last checkpoint was not written
            outcore.close(model, keep_weights=False)
    except KeyboardInterrupt:
        say("interrupted")
        outcore.close(model, keep_weights=False)
    else:
        say("went on")


# Kinds of faults.


def dies(folder: str) -> None:
    _at_a_point(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stalls(folder: str) -> None:
    _at_a_point(folder, lambda: time.sleep(STALL_S))


def is_interrupted(folder: str) -> None:
    """One rank stalls, the others wait for it, and Ctrl-C is pressed there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    _at_a_point(folder, lambda: time.sleep(STALL_S))


def _at_a_point(folder: str, happens: Callable[[], Any]) -> None:
    model, optimizer = prepared(folder)
    train(model, optimizer, folder, steps=1)
    if FAULT.kind != "is_interrupted":
        wait_less(optimizer)
    with At(POINTS[FAULT.point], FAULT.count, happens):
        ends(model, lambda: train(model, optimizer, folder))


def skips(folder: str) -> None:
    """One rank skips a backward or a step."""
    model, optimizer = prepared(folder)
    wait_less(optimizer)
    left = FAULT.count

    def odd(what: str) -> bool:
        nonlocal left
        if RANK != FAULT.rank or what != FAULT.point:
            return False
        left -= 1
        if left == -1:
            say("reached")
        return left == -1

    ends(model, lambda: train(model, optimizer, folder, odd=odd))


def asks(folder: str) -> None:
    """One rank alone asks for a norm, a gradient or the states."""
    model, optimizer = prepared(folder)
    wait_less(optimizer)
    left = FAULT.count

    def odd(what: str) -> bool:
        nonlocal left
        if RANK == FAULT.rank and what == "backward":
            left -= 1
            if left == -1:
                say("reached")
                _ask(model, optimizer)
        return False

    def work() -> None:
        train(model, optimizer, folder, steps=1)
        model(micro_batches(9)[RANK], RANK).square().sum().backward()
        train(model, optimizer, folder, odd=odd)

    ends(model, work)


def _ask(model: Any, optimizer: Any) -> None:
    held = [param for param in model.parameters() if param.grad is not None]
    if FAULT.point == "norm":
        nn.utils.clip_grad_norm_(held, 1.0)
    elif FAULT.point == "gradient":
        print(held[0].grad.sum(), file=sys.stderr)
    else:
        optimizer.state_dict()


def stays_away(folder: str) -> None:
    """One rank does not come to the first joint operation, while its process lives on."""
    distributed.init_process_group("gloo")
    os.environ[TIMEOUT] = str(TIMEOUT_S)
    distributed.barrier()
    if RANK == FAULT.rank:
        say("reached")
        time.sleep(2 * TIMEOUT_S)
    try:
        prepared(folder)
    except outcore.OutcoreError as error:
        say("error", str(error))


def fails_in_prepare(folder: str) -> None:
    """``prepare`` fails on one rank; all ranks get the error, and may begin again."""
    with At(IN_PREPARE[FAULT.point], FAULT.count, _full):
        try:
            prepared(folder)
        except (outcore.OutcoreError, OSError) as error:
            say("error", str(error))
    model, optimizer = prepared(folder)
    ends(model, lambda: train(model, optimizer, folder, steps=1))


def fills_the_drive(folder: str) -> None:
    """The drive of one rank is full during a save; all ranks get the error, and go on."""
    model, optimizer = prepared(folder)

    def work() -> None:
        train(model, optimizer, folder, steps=1)
        wanted = ["step-00000000", "step-00000007"]  # if the rank made too few writes to reach the fault
        with At(WRITE, FAULT.count, _full):
            try:
                outcore.save_checkpoint(model, optimizer, f"{folder}/checkpoints", step=7).wait()
            except outcore.OutcoreError as error:
                say("error", str(error))
                wanted.pop()
        distributed.barrier()
        left = sorted(os.listdir(f"{folder}/checkpoints"))
        assert left == wanted, left
        train(model, optimizer, folder, steps=1)

    ends(model, work)


def _full() -> NoReturn:
    raise OSError(28, "No space left on device")


def does_alone(folder: str) -> None:
    """One rank does something that would give all ranks the same wrong result."""
    model, optimizer = prepared(folder)
    train(model, optimizer, folder, steps=1)

    def work() -> None:
        model(micro_batches(9)[RANK], RANK).square().sum().backward()
        if RANK == FAULT.rank:
            say("reached")
            if FAULT.point == "zero":
                optimizer.zero_grad()
            elif FAULT.point == "factor":
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.mul_(0.5)
            else:
                optimizer.param_groups[0]["lr"] /= 2
        if FAULT.point == "zero":
            model(micro_batches(9)[RANK], RANK).square().sum().backward()
        for _ in range(3):
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    ends(model, work)


KINDS = (dies, stalls, is_interrupted, skips, asks, stays_away, fails_in_prepare, fills_the_drive, does_alone)
FAULT = Fault("dies")


def main() -> None:
    global FAULT
    begin()
    FAULT = Fault(*json.loads(sys.argv[1]))
    {kind.__name__: kind for kind in KINDS}[FAULT.kind](str(Path(sys.argv[2])))
    if FAULT.kind in ("fails_in_prepare", "fills_the_drive"):
        distributed.destroy_process_group()
    elif RANK == 0 and FAULT.kind != "is_interrupted":
        time.sleep(2.0)  # it hosts the store in which the others look
