"""A few random programs; ``random_programs.py`` runs thousands."""

from __future__ import annotations

import itertools
import json

import pytest
from outside.driver import run_program
from outside.program import Program, make_program

NUM_PROGRAMS = 8


def _is_steady(program: Program) -> bool:
    """Whether a program has no interrupts, whose lines move with every change of the code."""
    faults = [m["fault"] for s in program["loop"]["steps"] for m in s["micros"] if m["fault"]]
    return all(f["where"] != "interrupt" for f in faults)


SEEDS = list(itertools.islice((s for s in itertools.count(30_001) if _is_steady(make_program(s))), NUM_PROGRAMS))


ONCE_WRONG = [
    (400_092, False),  # a forward after backward still read weights that an early update was replacing
    (700_089, True),  # an early update read old weights from disk into a home that was still being poisoned
]


@pytest.mark.parametrize(("seed", "edits"), [*itertools.product(SEEDS, (False, True)), *ONCE_WRONG])
def test_random_program(seed: int, edits: bool) -> None:
    program = make_program(seed, edits=edits)
    result = run_program(program)
    assert result["verdict"] in ("equal", "refused", "rounding"), f"{json.dumps(result)}\n{json.dumps(program)}"
