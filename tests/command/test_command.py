"""The command line itself: an option that is given twice is refused by every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from outcore.command.command import Command
from outcore.command.main import app

from .conftest import Run


def commands(group: Any, path: str = "outcore") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_every_command_refuses_an_option_given_twice():
    found = dict(commands(typer.main.get_command(app)))
    assert {"outcore train", "outcore plan", "outcore checkpoint prune"} <= found.keys()
    assert not [name for name, command in found.items() if not isinstance(command, Command)]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("train --steps 3 --lr 1 --steps=5", "train: --steps is given twice; give it once"),
        ("train --packing --no-packing", "train: --packing is given twice; give it once"),
        ("train --resume --resume auto", "train: --resume is given twice"),
        ("checkpoint prune x --keep 1 --keep 2 --keep 2", "checkpoint prune: --keep is given 3 times; give it once"),
        ("train --set a=1 --set b=1 --set a=1", "--set: expected a once, but got a=1 and a=1; give it once"),
    ],
)
def test_an_option_given_twice(command: Run, typed: str, says: str):
    outcome = command(*typed.split())
    assert (outcome.status, outcome.out) == (2, "")
    assert says in outcome.err


def test_lists_may_be_given_twice_and_help_goes_before_all(command: Run):
    assert command(*"train --steps 3 --steps 5 --help".split()).status == 0
    assert "twice" not in command(*"train --data a --data b --disk c --disk d --set x=1 --set y=1".split()).err
