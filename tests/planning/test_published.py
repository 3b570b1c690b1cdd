"""Steps that others measured: the simulator is near them where its inputs are fixed on other rows."""

from __future__ import annotations

import itertools

import pytest

from outcore.planning.paper.weight_cache import Cache, Use, belady

from .published import lohan


def test_two_and_three_drives_and_other_batches():
    rows = {row.what: row for row in lohan(layers=12) if not row.is_fixed}
    assert len(rows) == 6
    for what, row in rows.items():
        assert row.ratio == pytest.approx(1, abs=0.2), what


def test_elixir_moves_as_many_blocks():
    """hpcaitech/Elixir, test/src/test_move.py: two blocks take twelve moves, a load and an eviction for each miss."""
    steps = [[0], [1, 2], [3], [3], [1, 2], [0]]
    uses = [Use(i, block, 0) for i, block in enumerate(itertools.chain(*steps))]
    assert 2 * len(list(belady(uses, Cache(dict.fromkeys(range(4), range(2)), frozenset()), [None, None]))) == 12
