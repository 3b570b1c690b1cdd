"""Loads of single links, run alone or beside one another, and the speed of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import quantiles
from typing import NamedTuple

_LEAST_TURNS = 3


@dataclass(frozen=True)
class ProbeLoad:
    """Work for one link, to be repeated."""

    link: str
    amount: float
    """Bytes, parameters or operations of one turn."""
    turn: Callable[[], object]
    """Does the work of one turn; returns when that is over."""
    is_compute: bool = False
    """Only the calling thread can do it."""


class SampledRate(NamedTuple):
    """Amount per second by the median of turns, and by their slow and fast quartiles."""

    per_s: float
    slow: float
    fast: float


@dataclass
class _LoadTurns:
    """The turns of one load."""

    load: ProbeLoad
    turns: list[tuple[float, float]] = field(default_factory=list)
    error: BaseException | None = None

    def go(self, is_over: Callable[[], bool]) -> None:
        try:
            while not is_over():
                start_s = time.perf_counter()
                self.load.turn()
                self.turns.append((start_s, time.perf_counter()))
        except BaseException as error:
            self.error = error

    def number(self, start_s: float, end_s: float) -> float:
        """Count turns between two moments; a turn that lies partly between them counts in part."""
        return sum(max(min(end, end_s) - max(start, start_s), 0.0) / (end - start) for start, end in self.turns)


def rate_of(load: ProbeLoad, window_s: float) -> SampledRate:
    """Measure a load that runs alone, after a turn that is not counted: kernels are chosen in it, and memory touched.

    Args:
        load: The load.
        window_s: How long to run it at least; it also gets a few turns at least.
    """
    load.turn()
    (run,) = _run([load], window_s)
    fast_s, middle_s, slow_s = quantiles((end - start for start, end in run.turns), n=4, method="inclusive")
    return SampledRate(load.amount / middle_s, load.amount / slow_s, load.amount / fast_s)


def speeds(loads: Sequence[ProbeLoad], window_s: float) -> dict[str, float]:
    """Measure the amount per second of each load while all of them run.

    Args:
        loads: At most one of them is compute.
        window_s: How long to run them at least; each also gets a few turns at least.
    """
    runs = _run(loads, window_s)
    start_s, end_s = max(run.turns[0][0] for run in runs), min(run.turns[-1][1] for run in runs)
    return {run.load.link: run.load.amount * run.number(start_s, end_s) / (end_s - start_s) for run in runs}


def _run(loads: Sequence[ProbeLoad], window_s: float) -> list[_LoadTurns]:
    runs = [_LoadTurns(load) for load in loads]
    until_s = time.perf_counter() + window_s

    def is_over() -> bool:
        is_late = time.perf_counter() >= until_s
        return any(run.error for run in runs) or (is_late and all(len(run.turns) >= _LEAST_TURNS for run in runs))

    with ExitStack() as threads:
        try:
            for run in runs:
                if not run.load.is_compute:
                    thread = threading.Thread(target=partial(run.go, is_over), name=f"outcore-probe-{run.load.link}")
                    thread.start()
                    threads.callback(thread.join)
            for run in runs:
                if run.load.is_compute:
                    run.go(is_over)
        except BaseException as error:  # a thread cannot be started: those that were wait for its turns
            runs[0].error = error
            raise
    for run in runs:
        if run.error is not None:
            raise run.error
    return runs
