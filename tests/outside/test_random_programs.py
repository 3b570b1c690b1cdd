"""A few random programs; ``random_programs.py`` runs thousands."""

from __future__ import annotations

import json

import pytest

from .driver import run_program
from .program import make_program

SEEDS = range(30_001, 30_026)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_program(seed: int) -> None:
    program = make_program(seed)
    result = run_program(program)
    assert result["verdict"] in ("equal", "rounding", "refused"), f"{json.dumps(result)}\n{json.dumps(program)}"
