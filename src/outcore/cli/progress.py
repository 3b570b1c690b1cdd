"""How a run looks while it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outcore.core.quantities import format_bytes

LINES = 10  # how many lines a whole run prints where there is no terminal


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    loss: float
    tokens: int
    moved_bytes: int
    """Bytes given to all lanes since the run began."""


def follow(console: Console, reports: Iterable[StepReport], steps: int) -> Iterator[StepReport]:
    """Pass the reports on and show loss, tokens/s, time left and bytes moved."""
    shown = _bar(console, reports, steps) if console.is_terminal else _lines(console, reports, steps)
    yield from shown


def _bar(console: Console, reports: Iterable[StepReport], steps: int) -> Iterator[StepReport]:
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    start_s, tokens = time.perf_counter(), 0
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("train", total=steps, status="")
        for report in reports:
            tokens += report.tokens
            progress.update(task, advance=1, status=_status(report, tokens / (time.perf_counter() - start_s)))
            yield report


def _lines(console: Console, reports: Iterable[StepReport], steps: int) -> Iterator[StepReport]:
    start_s, tokens = time.perf_counter(), 0
    for step, report in enumerate(reports, start=1):
        tokens += report.tokens
        if step in (1, steps) or step % max(1, steps // LINES) == 0:
            elapsed_s = time.perf_counter() - start_s
            left_s = elapsed_s / step * (steps - step)
            console.print(f"step {step}/{steps}  {_status(report, tokens / elapsed_s)}  {left_s:.0f} s left")
        yield report


def _status(report: StepReport, tokens_per_s: float) -> str:
    return f"loss {report.loss:.3f}  {tokens_per_s:,.0f} tokens/s  {format_bytes(report.moved_bytes)} moved"
