"""What is shown while a run is under way."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from outcore.cli import progress as shown
from outcore.cli.progress import StepReport, progress

REPORTS = [
    StepReport(loss=5.0 - step, tokens=512, moved_bytes=2**20 * step, exposed_s={"h2d": 0.0, "states_read": 0.0})
    for step in range(4)
]


def show(reports: list[StepReport], steps: int, *, is_terminal: bool = False, done: int = 0, width: int = 120) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width)
    with progress(console, steps, done=done) as report:
        for one in reports:
            report(one)
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


def test_a_long_run_prints_few_lines():
    assert len(show([REPORTS[0]] * 1000, 1000).splitlines()) == 11


def test_a_resumed_run_goes_on_counting():
    lines = show(REPORTS, 14, done=10).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 11/14", "step 12/14", "step 13/14", "step 14/14"]


def test_a_terminal_shows_a_bar():
    text = show(REPORTS, 4, is_terminal=True)
    assert "━" in text
    assert "loss 2.000" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_keeps_to_its_line_and_stays_at_the_end(width):
    report = StepReport(loss=2.345, tokens=10**9, moved_bytes=2**40, exposed_s={"states_read": 1e3})
    text = show([report] * 4, 10_000, is_terminal=True, done=9_996, width=width)
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    last = next(line for line in reversed(lines) if line.strip())
    assert last.startswith("step 10000/10000 ")
    assert "loss 2.345  " in last
    assert re.search(r" 0:00:0\d$", last.rstrip())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_it_says_what_is_waited_for_most(monkeypatch, is_terminal):
    clock_s = iter(range(0, 100, 10))  # one reading at the start, then one for each step's status
    monkeypatch.setattr(shown, "time", type("Clock", (), {"perf_counter": lambda: next(clock_s)}))
    exposed_s = {"h2d": 1.0, "states_read": 3.0, "d2h": 0.0}
    text = show([StepReport(loss=1.0, tokens=10, moved_bytes=0, exposed_s=exposed_s)], 1, is_terminal=is_terminal)
    assert "30% waiting for states_read" in text
    assert "1 tokens/s" in text


def test_time_left_counts_the_steps_of_this_run_only(monkeypatch):
    clock_s = iter([0.0, *([8.0] * 4)])
    monkeypatch.setattr(shown, "time", type("Clock", (), {"perf_counter": lambda: next(clock_s)}))
    assert show(REPORTS[:1], 12, done=9).rstrip().endswith("16 s left")
