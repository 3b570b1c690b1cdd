"""Any model, any plan, any precision, any way of training: the bits of the plain loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from . import zoo
from .cases import CHOICES, KINDS, PRECISIONS, Case, pairs, pairwise, run_checked
from .loops import assert_equal, plain_loop

MATRIX = list(pairwise())


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_streamed_training_equals_the_plain_loop(case: Case, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path))


def test_every_pair_of_choices_is_covered() -> None:
    choices = {"name": zoo.MODELS, "kind": KINDS, "precision": PRECISIONS, **CHOICES}
    choices.pop("offset")
    want = {
        (a, x, b, y)
        for a, b in itertools.combinations(sorted(choices), 2)
        for x, y in itertools.product(choices[a], choices[b])
    }
    got = set().union(*(pairs(vars(case.setting) | vars(case)) for case in MATRIX))
    assert not want - got
