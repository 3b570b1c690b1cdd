"""Steps that others measured: the simulator is close to them if its inputs are fixed on other rows."""

from __future__ import annotations

import itertools

import pytest
from planning.published import deep_optimizer_states, lazy_train, lohan

from outcore.order.weight_cache import Cache, Use, belady


def test_most_rows_are_predicted():
    """Near are LoHan's rows, also with two and three drives, and as many others as the report counts and explains."""
    free = [row for row in [*lohan(), *deep_optimizer_states(), *lazy_train()] if not row.is_fixed]
    near = [row for row in free if row.ratio == pytest.approx(1, abs=0.2)]
    assert [row.what for row in free if row.source == near[0].source] == [row.what for row in near[:7]]
    assert {row.what for row in near[:7]} >= {"batch 32, 2 drives", "batch 32, 3 drives"}
    assert (len(near), len(free)) == (17, 26)


def test_elixir_moves_as_many_blocks():
    """hpcaitech/Elixir, test/src/test_move.py: two blocks take twelve moves, a load and an eviction for each miss."""
    steps = [[0], [1, 2], [3], [3], [1, 2], [0]]
    uses = [Use(i, block, 0) for i, block in enumerate(itertools.chain(*steps))]
    assert 2 * len(list(belady(uses, Cache(dict.fromkeys(range(4), range(2)), frozenset()), [None, None]))) == 12
