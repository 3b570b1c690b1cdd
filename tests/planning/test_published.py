"""Steps that others measured: the simulator is near them where its inputs are fixed on other rows."""

from __future__ import annotations

import pytest

from .published import lohan


def test_two_and_three_drives_and_other_batches():
    rows = {row.what: row for row in lohan(layers=12) if not row.is_fixed}
    assert len(rows) == 6
    for what, row in rows.items():
        assert row.ratio == pytest.approx(1, abs=0.2), what
