"""What is shown while a run goes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outcore.cli.progress import StepReport, follow

REPORTS = [StepReport(loss=5.0 - step, tokens=512, moved_bytes=2**20 * step) for step in range(4)]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_reports_pass_through(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    assert list(follow(console, REPORTS, steps=4)) == REPORTS


def test_plain_lines_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=120)
    list(follow(console, REPORTS, steps=4))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("step 1/4  loss 5.000")
    assert "tokens/s" in lines[-1]
    assert "3.00 MiB moved" in lines[-1]
    assert lines[-1].endswith("0 s left")
    assert "\x1b" not in console.file.getvalue()


def test_a_long_run_prints_few_lines():
    console = Console(file=io.StringIO(), width=120)
    list(follow(console, (REPORTS[0] for _ in range(1000)), steps=1000))
    assert len(console.file.getvalue().splitlines()) == 11


def test_a_terminal_shows_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    for _ in follow(console, REPORTS, steps=4):
        pass
    assert "━" in console.file.getvalue()
    assert "loss 2.000" in console.file.getvalue()
