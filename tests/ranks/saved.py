"""Checkpoints of several ranks. Run as ``save FOLDER``, ``load FOLDER`` or ``fail FOLDER`` on all of them."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced, prepare_for_test

import outcore
from outcore.checkpoint.shared_checkpoint import SharedCheckpoint
from outcore.memory.files.checkpoint_file import CheckpointFile
from outcore.planner.homes.pools import LEAST

from .cases import DEVICE, Block, Case, begin, digest, made, states_digest, train

CASES = [
    Case("tied", "bfloat16", homes="disk"),
    Case("frozen", homes="device", partition="world"),
    Case("lora", "bfloat16", partition="node", gather="host"),
    Case("plain", "bfloat16", homes="disk", states="8bit", masters="compact"),
    Case("tied", "bfloat16", optim="Muon"),
]
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def begun(case: Case, folder: Path, **options: Any) -> Any:
    model, optimizer = made(case)
    model.register_buffer("own", torch.zeros(3))
    # Two or five ranks load what three ranks save, with weights cut in another way.
    partition, gather = {2: ("node", "host"), 5: ("world", "link")}.get(NUM_RANKS, (case.partition, case.gather))
    how: Any = {"num_ranks": NUM_RANKS, "comfort": LEAST, "partition": partition, "gather": gather}
    _, plan = forced(model, optimizer, case.homes, units=[Block], **how)
    budget = outcore.Budget(disk=str(folder))
    return prepare_for_test(model, optimizer, plan=plan, units=[Block], budget=budget, device=DEVICE, **options)


def seen(model: Any, optimizer: Any) -> list[str]:
    return [digest(model), states_digest(optimizer)]


def save(folder: Path) -> list[Any]:
    found = []
    for number, case in enumerate(CASES):
        with begun(case, folder) as (model, optimizer):
            train(model, optimizer, case, num_ranks=NUM_RANKS, rank=RANK, own_norm=False)
            before = seen(model, optimizer)
            torch.manual_seed(1000 + RANK)
            model.own.fill_(RANK)
            saving = outcore.save_checkpoint(model, optimizer, folder / str(number), step=3, extra={"said": 1})
            model.own.zero_()
            train(model, optimizer, case, num_ranks=NUM_RANKS, rank=RANK, own_norm=False)
            saving.wait()
            found.append([before, seen(model, optimizer)])
            assert before != found[-1][1]
    return found


def load(folder: Path) -> list[Any]:
    found = []
    for number, case in enumerate(CASES):
        with begun(case, folder, checkpoint=folder / str(number)) as (model, optimizer):
            assert optimizer.resumed == {"said": 1, "step": 3}
            if NUM_RANKS == 3:
                assert torch.initial_seed() == 1000 + RANK
            assert model.own.tolist() == [RANK if NUM_RANKS == 3 else 0] * 3
            model.own.zero_()
            found.append([seen(model, optimizer)])
            if NUM_RANKS != 5:  # six micro-batches cannot be shared by five
                train(model, optimizer, case, num_ranks=NUM_RANKS, rank=RANK, own_norm=False)
                found[-1].append(seen(model, optimizer))
    return found


def fail(folder: Path) -> list[Any]:
    """The drive of one rank is full, at once or later; all ranks get the error, and go on."""
    write, case = CheckpointFile.write, CASES[1]
    with begun(case, folder) as (model, optimizer):
        train(model, optimizer, case, num_ranks=NUM_RANKS, rank=RANK, own_norm=False)
        for first in (0, 3):
            calls = itertools.count()

            def full(self: CheckpointFile, nbytes: int, fill: Any, first: int = first, calls: Any = calls) -> None:
                if RANK == 1 and next(calls) >= first:
                    raise OSError(28, "No space left on device")
                write(self, nbytes, fill)

            CheckpointFile.write = full  # type: ignore[method-assign]
            with pytest.raises(outcore.OutcoreError, match="No space left on device"):
                outcore.save_checkpoint(model, optimizer, folder / "full", step=1, wait=True)
            assert RANK or list((folder / "full").iterdir()) == []
        CheckpointFile.write = write  # type: ignore[method-assign]
        with pytest.raises(outcore.OutcoreError, match="/proc/none"):
            outcore.save_checkpoint(model, optimizer, "/proc/none", step=1, wait=True)
        gives_up_late(model, optimizer, folder)
        outcore.save_checkpoint(model, optimizer, folder / "full", step=2, wait=True)
        train(model, optimizer, case, num_ranks=NUM_RANKS, rank=RANK, own_norm=False)
        with pytest.raises(outcore.ConfigError, match="there is none"):
            outcore.load_checkpoint(model, optimizer, folder / "none")
        assert outcore.load_checkpoint(model, optimizer, folder / "full")["step"] == 2
        refuses_what_differs(model, optimizer, folder)
    with pytest.raises(outcore.OutcoreError, match="expected a checkpoint in '.*/1', but there is none"):
        begun(case, folder, checkpoint=folder / ("1" if RANK else "full"))
    return []


def gives_up_late(model: Any, optimizer: Any, folder: Path) -> None:
    """Rank 0 gives up when all have written and none has committed."""
    meet = SharedCheckpoint.meet

    def meet_and_fail(self: SharedCheckpoint, save: Any) -> None:
        meet(self, save)
        if RANK == 0:
            save.fail(outcore.OutcoreError("given up late"))

    SharedCheckpoint.meet = meet_and_fail  # type: ignore[method-assign]
    with pytest.raises(outcore.OutcoreError, match="given up late"):
        outcore.save_checkpoint(model, optimizer, folder / "full", step=1).wait()
    SharedCheckpoint.meet = meet  # type: ignore[method-assign]


def refuses_what_differs(model: Any, optimizer: Any, folder: Path) -> None:
    """A mistake on rank 1 alone is reported on both ranks, and neither waits."""
    for name, value in {"step": RANK, "keep": 1 + RANK, "directory": folder / str(RANK)}.items():
        asked = {"directory": folder / "full", "step": 1, name: value}
        with pytest.raises(outcore.ConfigError, match=f"^save_checkpoint: .* but {name}=.* of rank 1 differs"):
            outcore.save_checkpoint(model, optimizer, **asked)
    for wrong, said in (({"step": -RANK}, "but got -1"), ({"extra": {"it": {1} if RANK else 1}}, "is a builtins.set")):
        with pytest.raises(outcore.OutcoreError, match=said):
            outcore.save_checkpoint(model, optimizer, folder / "full", **{"step": 1, **wrong})
    with pytest.raises(outcore.OutcoreError, match="expected a checkpoint in '.*/1', but there is none"):
        outcore.load_checkpoint(model, optimizer, folder / ("1" if RANK else "full"))


def main() -> None:
    begin()
    what, folder = sys.argv[1:]
    print(json.dumps(globals()[what](Path(folder))), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
