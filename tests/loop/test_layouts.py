"""Two pages between states, as large units of certain sizes have them, change nothing."""

from __future__ import annotations

import pytest

from .rig import KINDS, same, train


@pytest.mark.parametrize("kind", KINDS)
def test_states_with_a_gap(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.spec.model.ALIAS_BYTES", 4096)
    same(train, kind, tmp_path)
