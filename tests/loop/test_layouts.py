"""One function lays out states: gaps between them, and states of other sizes, change nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from outcore.spec.layout import StateSpec
from outcore.spec.model import StateForm, UnitSpec

from .rig import KINDS, same, train


@pytest.mark.parametrize("kind", KINDS)
def test_states_with_a_gap(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.spec.model.ALIAS_BYTES", 4096)
    same(train, kind, tmp_path)


def unequal(spec: UnitSpec, names: Iterable[str], **_: bool) -> dict[str, StateSpec]:
    """Lay out states so that each is a page larger than the one before, and its parts begin further inside."""
    states, start = {}, 0
    for i, name in enumerate(names if spec.trainable else ()):
        parts = tuple(part._replace(offset=part.offset + 512 * i) for part in spec.update_parts)
        forms = tuple(StateForm(name, param.update_dtype) for param in spec.trainable)
        states[name] = StateSpec(name, start, spec.update_bytes + 4096 * i, parts, forms)
        start = states[name].stop
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_unequal_sizes(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.spec.layout.lay_out_states", unequal)
    same(train, kind, tmp_path)
