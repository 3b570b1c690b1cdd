"""How a run looks while it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from outcore.core.quantities import format_bytes

LINES = 10  # how many lines a whole run prints where there is no terminal
_STATUS_WIDTH = 75  # columns of the whole status beside the bar
WORTH_SAYING = 0.01  # of the time: a lane that is waited for less is not mentioned


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the optimizer steps since the report before did."""

    step: int
    """The last of these steps, counted from the beginning of the run."""
    seconds: float
    """Time that they took, without evaluation and saving."""
    loss: float
    tokens: int
    moved_bytes: int
    """Bytes given to all lanes since the run began."""
    exposed_s: Mapping[str, float]
    """Lane -> seconds that these steps waited for that lane."""
    of_predicted: float | None = None
    """The time of steps so far over their predicted time."""
    judged: Mapping[str, float] = field(default_factory=dict)
    """What else the loop measures in these steps: name -> value."""


class ProgressFunctions(NamedTuple):
    """Functions that show how far a run has come."""

    report: Callable[[StepReport], None]
    """Shows steps: loss, tokens/s, the lane most waited for, bytes moved and time left."""
    move_to: Callable[[int], None]
    """Moves the bar to a step of which nothing is reported."""


@contextmanager
def progress(console: Console, steps: int, *, done: int = 0) -> Iterator[ProgressFunctions]:
    """Show how far a run has come while the block runs.

    Args:
        console: A terminal gets a bar, which stays as it was at the end; anything else gets plain lines.
        steps: Steps of the whole run.
        done: How many of them an earlier run did.
    """
    took_s, tokens, before, every = 0.0, 0, done, max(1, steps // LINES)
    waited_s = Counter[str]()

    def parts(report: StepReport) -> Iterator[str]:
        nonlocal took_s, tokens
        took_s, tokens = took_s + report.seconds, tokens + report.tokens
        waited_s.update(report.exposed_s)
        return _parts(report, tokens, took_s, waited_s)

    if console.is_terminal:
        room = console.width - _bar_width(console) - len(f"step {steps}/{steps} 00:00:00   ") - 1
        with _bar(console) as bar:
            task = bar.add_task("train", total=steps, completed=done, status="")
            yield ProgressFunctions(
                lambda report: bar.update(task, completed=report.step, status=_fitting(parts(report), room)),
                lambda step: bar.update(task, completed=step),
            )
        return

    def line(report: StepReport) -> None:
        nonlocal before
        text, step = "  ".join(parts(report)), report.step
        if before == done or step == steps or step // every > before // every:
            left_s = took_s / (step - done) * (steps - step)
            console.print(f"step {step}/{steps}  {text}  {left_s:.0f} s left", soft_wrap=True)
        before = step

    yield ProgressFunctions(line, lambda _: None)


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=_bar_width(console)),
        TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    return Progress(*columns, console=console)


def _bar_width(console: Console) -> int:
    return max(5, min(40, console.width - _STATUS_WIDTH))


def _fitting(parts: Iterator[str], room: int) -> str:
    """Join parts in their order, without those that no longer fit into the room."""
    said = ""
    for part in parts:
        longer = f"{said}  {part}" if said else part
        said = longer if len(longer) <= room else said
    return said


def _parts(report: StepReport, tokens: int, took_s: float, waited_s: Mapping[str, float]) -> Iterator[str]:
    yield f"loss {report.loss:.3f}"
    for name, value in report.judged.items():
        yield f"{name} {value:.3f}"
    yield f"{tokens / took_s:,.0f} tokens/s"
    lane, seconds = max(waited_s.items(), key=lambda item: item[1], default=("", 0.0))
    if seconds > WORTH_SAYING * took_s:
        yield f"{seconds / took_s:.0%} waiting for {lane}"
    if report.of_predicted is not None:
        yield f"{report.of_predicted:.2f} of predicted"
    yield f"{format_bytes(report.moved_bytes)} moved"
