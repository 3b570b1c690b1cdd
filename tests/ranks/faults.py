"""A rank that dies, stalls, skips a backward or asks for a norm alone: run as a program on all."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from plans import forced
from torch import nn

import outcore
from outcore.api import prepare_for_test
from outcore.planning.homes.pools import LEAST

from .cases import Block, Case, adamw, build, micro_batches, train

TIMEOUT_S, STALL_S = 4.0, 12.0


def main() -> None:
    rank, num_ranks, case = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Case()
    model: Any = build(case.kind, case.dtype)
    optimizer: Any = adamw(model)
    _, plan = forced(model, optimizer, case.homes, units=[Block], num_ranks=num_ranks, comfort=LEAST)
    model, optimizer = prepare_for_test(model, optimizer, plan=plan, units=[Block], device="cpu")
    train(model, optimizer, case, num_ranks=num_ranks, rank=rank, own_norm=False)

    def backward() -> None:
        model(micro_batches(9)[rank], rank).square().sum().backward()

    backward()
    began_s = time.monotonic()
    try:
        if rank == 1:
            _misbehave(sys.argv[1], model, optimizer)
        for _ in range(3):
            backward()
            optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    except outcore.OutcoreError as error:
        outcore.close(model, keep_weights=False)
        print(f"{time.monotonic() - began_s:.1f}", error, flush=True)
        sys.stdout.flush()
        os._exit(3)  # the default group's own end is torch's


def _misbehave(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stalls":
        time.sleep(STALL_S)
    elif what == "skips":
        optimizer.step()
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
