"""Layouts: their sizes, and which part of them a rank has."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from outcore.core.quantities import ALIAS_BYTES
from outcore.spec.layout import lay_out_states
from outcore.spec.model import ParamSpec, StateForm, UnitSpec


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_that_need_no_cast_fit_where_they_rest(dtype):
    """The padding of these vectors differs between 256 and 512 bytes."""
    params = [
        ParamSpec(name=str(i), shape=(32,), dtype=dtype, update_dtype=dtype, requires_grad=True) for i in range(16)
    ]
    spec = UnitSpec(name="unit", params=tuple(params))
    assert spec.bucket_bytes <= spec.update_bytes


NUMELS = (4093, 100, 70_001, 5248, 12_800, 1, 0, 9000)


def of_ranks(num_ranks: int, rank: int, *states: StateForm, is_whole: bool = False) -> UnitSpec:
    params = (
        replace(param, states=states, is_whole=is_whole and not i) for i, param in enumerate(unit(*NUMELS).params)
    )
    return UnitSpec(name="unit", params=tuple(params), num_ranks=num_ranks, rank=rank)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_have_every_block_of_a_state_once(num_ranks):
    """A scale serves 256 elements, and the last one serves the remainder."""
    form = StateForm("a", "uint8", format="8bit")
    scales = [StateForm("scale", "float32", (-(-numel // 256),), shared_by=256) for numel in NUMELS]
    specs = [of_ranks(num_ranks, rank, form, scales[1]) for rank in range(num_ranks)]
    for i, numel in enumerate(NUMELS):
        cuts = [spec.own_ranges[i] for spec in specs]
        assert all(first % 256 == 0 for first, count in cuts if count)
        assert sum(count for _, count in cuts) == numel
        laid = [lay_out_states(spec, ("a", "scale")) for spec in specs]
        assert sum(states["scale"].parts[i].numel for states in laid) == -(-numel // 256)
        assert len({states["scale"].nbytes for states in laid}) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("is_whole", [True, False])
def test_parameters_that_are_not_cut_have_one_rank(num_ranks, is_whole):
    number = () if is_whole else (StateForm("number", "float32", ()),)
    specs = [of_ranks(num_ranks, rank, *number, is_whole=is_whole) for rank in range(num_ranks)]
    for i, numel in enumerate(NUMELS):
        assert sorted(spec.own_ranges[i][1] for spec in specs) == [0] * (num_ranks - 1) + [numel]
        if number:
            parts = [lay_out_states(spec, ("number",))["number"].parts[i] for spec in specs]
            assert sorted(part.numel for part in parts) == [0] * (num_ranks - 1) + [1]
    ends = sorted((part.offset, part.offset + part.nbytes) for part in specs[0].weight_parts if part.numel)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= specs[0].trainable_bytes == num_ranks * specs[0].run_bytes
