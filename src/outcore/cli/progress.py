"""How a run looks while it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outcore.core.quantities import format_bytes

LINES = 10  # how many lines a whole run prints where there is no terminal
WORTH_SAYING = 0.01  # of the time: a lane that is waited for less is not mentioned


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    loss: float
    tokens: int
    moved_bytes: int
    """Bytes given to all lanes since the run began."""
    exposed_s: Mapping[str, float]
    """Lane -> seconds that the run has waited for it since it began."""


Show = Callable[[StepReport], None]


@contextmanager
def progress(console: Console, steps: int, *, done: int = 0) -> Iterator[Show]:
    """Show loss, tokens/s, what the run waits for, bytes moved and time left of every step that is reported.

    Args:
        console: A terminal gets a bar, anything else plain lines.
        steps: Of the whole run.
        done: How many of them an earlier run did.
    """
    start_s, step, tokens = time.perf_counter(), done, 0

    def status(report: StepReport) -> str:
        nonlocal step, tokens
        step, tokens = step + 1, tokens + report.tokens
        return _status(report, tokens, time.perf_counter() - start_s)

    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("train", total=steps, completed=done, status="")
            yield lambda report: bar.update(task, advance=1, status=status(report))
        return

    def line(report: StepReport) -> None:
        text = status(report)
        if step in (done + 1, steps) or step % max(1, steps // LINES) == 0:
            left_s = (time.perf_counter() - start_s) / (step - done) * (steps - step)
            console.print(f"step {step}/{steps}  {text}  {left_s:.0f} s left", soft_wrap=True)

    yield line


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _status(report: StepReport, tokens: int, elapsed_s: float) -> str:
    said = (f"loss {report.loss:.3f}", f"{tokens / elapsed_s:,.0f} tokens/s", _waiting(report.exposed_s, elapsed_s))
    return "  ".join(part for part in (*said, f"{format_bytes(report.moved_bytes)} moved") if part)


def _waiting(exposed_s: Mapping[str, float], elapsed_s: float) -> str:
    lane, seconds = max(exposed_s.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{seconds / elapsed_s:.0%} waiting for {lane}" if seconds > WORTH_SAYING * elapsed_s else ""
