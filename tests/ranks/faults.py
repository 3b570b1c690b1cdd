"""A rank that dies, stalls, or does what the others do not: run as a program on all."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from typing import Any

import torch
from plans import forced
from torch import distributed, nn

import outcore
from outcore.api import prepare_for_test
from outcore.core.ranks import TIMEOUT
from outcore.planning.homes.pools import LEAST

from .cases import Block, Case, adamw, build, micro_batches, train

TIMEOUT_S, STALL_S = 4.0, 12.0
_AT_STEP = ("slows", "multiplies")
_WAITED_FOR = ("dies", "stalls", "skips", "asks")


def main() -> None:
    rank, num_ranks, case = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Case()
    model: Any = build(case.kind, case.dtype)
    optimizer: Any = adamw(model)
    _, plan = forced(model, optimizer, case.homes, units=[Block], num_ranks=num_ranks, comfort=LEAST)
    model, optimizer = prepare_for_test(model, optimizer, plan=plan, units=[Block], device="cpu")
    train(model, optimizer, case, num_ranks=num_ranks, rank=rank, own_norm=False)

    if sys.argv[1] in _WAITED_FOR:
        _wait_less(optimizer)

    def backward() -> None:
        model(micro_batches(9)[rank], rank).square().sum().backward()

    backward()
    began_s = time.monotonic()
    try:
        if rank == 1:
            _misbehave(sys.argv[1], model, optimizer)
        if sys.argv[1] == "reads" and rank != 1:
            print(_held(model)[-1].grad.sum(), file=sys.stderr)
        for number in range(3):
            if number or sys.argv[1] not in _AT_STEP:
                backward()
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except outcore.OutcoreError as error:
        outcore.close(model, keep_weights=False)
        print(f"{time.monotonic() - began_s:.1f}", error, flush=True)
        sys.stdout.flush()
        time.sleep(2.0 if rank == 0 else 0.0)  # it has the store in which the others look
        os._exit(3)  # the default group's own end is torch's


def _wait_less(optimizer: Any) -> None:
    """Only from now on, since a busy machine may take long to begin."""
    os.environ[TIMEOUT] = str(TIMEOUT_S)
    for group in optimizer.engine.access.world._groups:
        distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S), group)


def _held(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.grad is not None]


def _misbehave(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stalls":
        time.sleep(STALL_S)
    elif what == "skips":
        optimizer.step()
    elif what == "zeroes":
        optimizer.zero_grad()
    elif what == "multiplies":
        for param in _held(model):
            param.grad.mul_(0.5)
    elif what == "slows":
        optimizer.param_groups[0]["lr"] /= 2
    elif what == "reads":
        print(_held(model)[0].grad.sum(), file=sys.stderr)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
