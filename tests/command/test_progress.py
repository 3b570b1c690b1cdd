"""What is shown while a run is under way."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from outcore.command.progress import StepReport, progress

REPORTS = [
    StepReport(
        step=step + 1,
        seconds=0.5,
        loss=5.0 - step,
        tokens=512,
        moved_bytes=2**20 * step,
        exposed_s={"h2d": 0.0, "states_read": 0.0},
    )
    for step in range(4)
]


def at(step: int, report: StepReport = REPORTS[0]) -> StepReport:
    return dataclasses.replace(report, step=step)


def show(reports: list[StepReport], steps: int, *, is_terminal: bool = False, done: int = 0, width: int = 120) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width)
    with progress(console, steps, done=done) as shown:
        for one in reports:
            shown.report(one)
    return console.file.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    text = show(REPORTS, 4)
    lines = text.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("step 1/4  loss 5.000")
    assert "tokens/s" in lines[-1]
    assert "3.00 MiB moved" in lines[-1]
    assert lines[-1].endswith("0 s left")
    assert "\x1b" not in text
    assert "waiting" not in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_else_is_measured_stands_beside_the_loss(is_terminal):
    one = dataclasses.replace(REPORTS[0], judged={"margin": 0.25, "accuracy": 0.75})
    assert "loss 5.000  margin 0.250  accuracy 0.750" in show([one], 1, is_terminal=is_terminal)


def test_a_long_run_prints_few_lines():
    assert len(show([at(step) for step in range(1, 1001)], 1000).splitlines()) == 11


def test_a_resumed_run_goes_on_counting():
    lines = show([at(11), at(12), at(13), at(14)], 14, done=10).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 11/14", "step 12/14", "step 13/14", "step 14/14"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_reports_of_several_steps_count_them_all(is_terminal):
    """512 tokens in 0.5 s each time, whatever happens in between."""
    text = show([at(12), at(16), at(18)], 18, done=8, is_terminal=is_terminal)
    assert "18/18" in text
    assert "1,024 tokens/s" in text
    if not is_terminal:
        lines = [line.split("  ") for line in text.splitlines()]
        assert [line[0] for line in lines] == ["step 12/18", "step 16/18", "step 18/18"]
        assert [line[-1] for line in lines] == ["1 s left", "0 s left", "0 s left"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_steps_that_are_not_reported_count_on_the_bar(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    with progress(console, 25) as shown:
        shown.report(at(20))
        shown.move_to(25)
    assert ("25/25" in console.file.getvalue()) == is_terminal


def test_a_terminal_shows_a_bar():
    text = show(REPORTS, 4, is_terminal=True)
    assert "━" in text
    assert "loss 2.000" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_keeps_to_its_line_and_stays_at_the_end(width):
    exposed_s = {"states_read": 1e3}
    report = StepReport(step=0, seconds=1.0, loss=2.345, tokens=10**9, moved_bytes=2**40, exposed_s=exposed_s)
    text = show([at(step, report) for step in range(9_997, 10_001)], 10_000, is_terminal=True, done=9_996, width=width)
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    last = next(line for line in reversed(lines) if line.strip())
    assert last.startswith("step 10000/10000 ")
    assert "loss 2.345  " in last
    assert re.search(r" 0:00:0\d$", last.rstrip())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_it_says_what_is_waited_for_most(is_terminal):
    exposed_s = {"h2d": 1.0, "states_read": 3.0, "d2h": 0.0}
    report = StepReport(step=1, seconds=10.0, loss=1.0, tokens=10, moved_bytes=0, exposed_s=exposed_s)
    waits_less = dataclasses.replace(report, step=2, exposed_s={"h2d": 2.0, "states_read": 1.0})
    text = show([report, waits_less], 2, is_terminal=is_terminal)
    assert ("30% waiting for states_read" in text) or is_terminal, "a bar may show the last state alone"
    assert "20% waiting for states_read" in text, "4 of 20 s; the counts are those of each report"
    assert "1 tokens/s" in text


def test_time_left_counts_the_steps_of_this_run_only():
    report = dataclasses.replace(REPORTS[0], step=10, seconds=8.0)
    assert show([report], 12, done=9).rstrip().endswith("16 s left")
