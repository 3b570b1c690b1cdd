"""The contestants of large.py: a streamed model, the plain loop, DeepSpeed; all share model, tokens and kernels."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llama import config_of, materialised, on_meta
from measuring import spread
from rates import Marks, Passes, free_cached
from step import HYPER, Contestant, Plain, deepspeed
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.core.quantities import format_bytes
from outcore.engine.optimizer import StreamedOptimizer
from outcore.engine.recompute.checks import FIRST_CALLS
from outcore.memory.machine import host_free_bytes
from outcore.spec.plan import Plan
from outcore.spec.timeline import COMPUTE, Timeline

WARM_UP = FIRST_CALLS
"""Warm-up steps of all contestants; during ours, recomputes are compared with forward."""
DEEPSPEED_HOST_BYTES = 20
"""Bytes per parameter: fp32 master, two moments and gradients, bf16 weights and gradients."""


@dataclass(frozen=True)
class Layout:
    """How the tokens of a step are cut, and what computing a micro-batch takes."""

    tokens: int
    sequences: int
    """Sequences per micro-batch."""
    micro_batches: int
    passes: Passes


class Streamed:
    """A prepared model that takes steps of any number of tokens."""

    def __init__(self, args: argparse.Namespace, plan: Plan, budget: outcore.Budget) -> None:
        """Prepare it: allocate and pin memory, and make first values."""
        self._args = args
        start_s = time.perf_counter()
        model = on_meta(config_of(args))
        optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
        self.model, prepared = outcore.prepare(model, optimizer, plan=plan, budget=budget, device=args.device)
        if prepared is None:
            raise AssertionError("no optimizer")
        self.optimizer: StreamedOptimizer = prepared
        self.engine = prepared.engine
        self.prepare_s = time.perf_counter() - start_s

    @property
    def host_is_pinned(self) -> bool | None:
        """Whether copies go directly to and from host memory; None: the plan has none."""
        return self.engine.opened.tiers.host_is_pinned if self.engine.opened.plan.tier_bytes.get("host") else None

    def step(self, layout: Layout) -> None:
        """Make one training step."""
        batch = batch_of(self._args, layout.sequences)
        for _ in range(layout.micro_batches):
            (self.model(**batch).loss / layout.micro_batches).backward()
        if not self._args.early:
            clip_grad_norm_(self.model.parameters(), self._args.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, layout: Layout) -> tuple[list[float], Timeline]:
        """Return the seconds of each step, and the timeline of some more steps."""
        args = self._args
        free_cached(args.device)
        warm_up(functools.partial(self.step, layout), args.device)
        seconds = timed(functools.partial(self.step, layout), args.steps, args.device)
        with self.optimizer.recording(num_steps=args.recorded_steps + 1) as recorder:
            for _ in range(args.recorded_steps + 1):
                self.step(layout)
            self.engine.device.synchronize()
            timeline = recorder.timeline()
        ends = [s.end_s for s in timeline.spans if (s.lane, s.name) == (COMPUTE, "step")]
        return seconds, timeline.between(ends[0], ends[-1])

    def measure_serial(self, layout: Layout) -> list[float]:
        """Return the same seconds with overlap off."""
        device = self.engine.device
        faults, device.faults = device.faults, dataclasses.replace(device.faults, serial=True)
        try:
            return timed(functools.partial(self.step, layout), self._args.serial_steps, self._args.device)
        finally:
            device.faults = faults

    def close(self) -> None:
        """Give back all memory."""
        outcore.close(self.model, keep_weights=False)


def warm_up(step: Callable[[], None], device: str) -> None:
    """Make steps that are not measured."""
    for _ in range(1 if device == "cpu" else WARM_UP):
        step()


def timed(step: Callable[[], None], steps: int, device: str) -> list[float]:
    """Seconds of each step after the first one."""
    marks = Marks(device)
    for _ in range(1 + steps):
        step()
        marks.mark()
    return marks.between()


@functools.cache
def _tokens(device: str, vocabulary: int, sequences: int, seq_len: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (sequences, seq_len), generator=generator).to(device)


def batch_of(args: argparse.Namespace, sequences: int) -> dict[str, torch.Tensor]:
    """Return the same tokens every time."""
    tokens = _tokens(args.device, args.vocabulary, sequences, args.seq_len)
    return {"input_ids": tokens, "labels": tokens}


def cap_device(device: str, cap_bytes: int | None) -> None:
    """Limit what the allocator gives."""
    if device != "cpu":
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        fraction = 1.0 if cap_bytes is None else min(1.0, cap_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction)


def device_memory(device: str) -> dict[str, int] | None:
    """Peaks since the last case, and how often the allocator had to give back cached memory to go on."""
    if device == "cpu":
        return None
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def run_rival(args: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    """Measure steps of another loop under the largest cap.

    Args:
        args: The command line.
        name: ``plain`` or ``deepspeed``.
        found: Receives the steps by number of tokens as soon as they are known, or why there are none.
    """
    config = config_of(args)
    numel = sum(p.numel() for p in on_meta(config).parameters())
    if name == "deepspeed" and (need := DEEPSPEED_HOST_BYTES * numel) > host_free_bytes():
        free = format_bytes(host_free_bytes())
        found["not_run"] = f"takes about {format_bytes(need)} of host memory; {free} are free"
        return
    cap_device(args.device, max(args.device_memory))
    batch = batch_of(args, 1)
    try:
        build: Callable[[], Contestant | str] = {
            "plain": lambda: Plain(materialised(config, args.device), batch).contestant("plain", "checkpointing"),
            "deepspeed": lambda: deepspeed(materialised(config, "cpu"), batch),
        }[name]
        with contextlib.redirect_stdout(sys.stderr):  # libraries print to standard output
            rival = build()
            if isinstance(rival, str):
                found["not_run"] = rival
                return
            found["step_s"] = {}
            for tokens in args.tokens:
                found["step_s"][str(tokens)] = _rival_case(args, rival, batch, tokens)
    except Exception as error:  # out of memory, or any error of another library
        found["not_run"] = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        rival = None
        free_cached(args.device)


def _rival_case(args: argparse.Namespace, rival: Contestant, batch: dict[str, torch.Tensor], tokens: int) -> object:
    """Measure the whole step as one micro-batch."""
    batch.update(batch_of(args, tokens // args.seq_len))
    try:
        warm_up(rival.step, args.device)
        found = spread(timed(rival.step, args.steps, args.device))
    except torch.OutOfMemoryError as error:
        free_cached(args.device)
        return f"{error}".splitlines()[0]
    say(f"{rival.name}, {tokens} tokens: {json.dumps(found)}")
    return found


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)
