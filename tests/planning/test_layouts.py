"""Sizes of the update layout."""

from __future__ import annotations

import pytest

from outcore.spec.model import ALIAS_BYTES, ParamSpec, UnitSpec


def unit(*numels, update_dtype="float32"):
    params = [
        ParamSpec(name=str(i), shape=(n,), dtype="bfloat16", update_dtype=update_dtype, requires_grad=True)
        for i, n in enumerate(numels)
    ]
    return UnitSpec(name="unit", params=tuple(params))


@pytest.mark.parametrize(
    ("numels", "nbytes"),
    [
        ((), 0),
        ((1,), 4096),
        ((1024, 1), 8192),
        ((ALIAS_BYTES // 4,), ALIAS_BYTES + 8192),
        ((ALIAS_BYTES // 2, ALIAS_BYTES // 2), 4 * ALIAS_BYTES + 8192),
        ((ALIAS_BYTES // 4 + 1,), ALIAS_BYTES + 4096),
        ((ALIAS_BYTES // 8,), ALIAS_BYTES // 2),
    ],
)
def test_states_never_lie_at_distances_that_alias_in_the_cache(numels, nbytes):
    assert unit(*numels).update_bytes == nbytes
