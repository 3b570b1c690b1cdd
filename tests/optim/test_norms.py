"""The norm over several ranks has the same bits however a parameter is cut."""

from __future__ import annotations

import math
import random

import pytest
import torch

from outcore.optim.norms import block_sums, node_sums, norm_of, num_blocks, whole_nodes
from outcore.optim.piece import CUT_NUMEL


def norm(values: torch.Tensor, cuts: list[int], factors: tuple[torch.Tensor, ...] = ()) -> float:
    """Compute the norm as ranks do that have the blocks between these cuts."""
    count, nodes = num_blocks(values.numel()), {}
    for first, stop in zip([0, *cuts], [*cuts, count], strict=True):
        sums = block_sums(values[first * CUT_NUMEL : stop * CUT_NUMEL], factors)
        found = node_sums(sums, first, stop, count)
        names = whole_nodes(first, stop, count)
        assert len(names) == len(found)
        assert not nodes.keys() & set(names)
        nodes |= dict(zip(names, found.tolist(), strict=True))
    return norm_of(nodes, count)


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_gives_the_same_bits(seed):
    draw = random.Random(seed)
    values = torch.randn(draw.randint(1, 70 * CUT_NUMEL), generator=torch.Generator().manual_seed(seed))
    count = num_blocks(values.numel())
    whole = norm(values, [])
    for num_cuts in (1, 2, 4, 11):
        assert norm(values, sorted(draw.randint(0, count) for _ in range(num_cuts))) == whole
    assert whole == pytest.approx(float(values.double().norm()), rel=1e-14)


def test_every_single_cut():
    values = torch.randn(23 * CUT_NUMEL + 5)
    assert {norm(values, [cut]) for cut in range(num_blocks(values.numel()) + 1)} == {norm(values, [])}


def test_few_numbers_are_sent():
    assert max(len(whole_nodes(first, 2**20 - 1, 2**20)) for first in (0, 1, 12345, 2**19 + 1)) <= 40


def test_factors_round_in_the_dtype_of_the_values():
    values, factor = torch.full((100,), 1 + 2**-20), torch.tensor(1 / 3, dtype=torch.float64)
    assert norm(values, [1], (factor,)) == pytest.approx(float((values * (1 / 3)).double().norm()), rel=1e-15)


@pytest.mark.parametrize(("value", "expected"), [(math.inf, math.inf), (0.0, 0.0), (3e38, 3e38)])
def test_extremes(value, expected):
    assert norm(torch.tensor([0.0] * 70 + [value]), [1]) == pytest.approx(expected)
    assert norm(torch.zeros(0), []) == 0
    assert math.isnan(norm(torch.tensor([math.nan, 1.0]), []))
