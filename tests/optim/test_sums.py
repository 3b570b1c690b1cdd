"""Sums of gradients by block: the bits of torch's own operations, whichever worker runs a block, in any order."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.engine.updates.workers import UpdateWorkers
from outcore.optim import sums
from outcore.optim.sums import Sum, Work, add_works, run_here, widen_rounds

NUMELS = st.integers(0, 1000)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCK_NUMEL", 64)


def run_shuffled(works: list[Work]) -> None:
    run_here(random.Random(0).sample(works, len(works)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factors", [(), (0.3,), (0.3, 1.7)])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_sum_has_the_bits_of_torch(dtype: torch.dtype, factors: tuple[float, ...], is_first: bool):
    target, source = torch.randn(1003), torch.randn(1003).to(dtype)
    scales = tuple(torch.tensor(f) for f in factors)
    want = target.clone()
    if is_first:
        want.copy_(source)
    else:
        for scale in scales:
            want.mul_(scale)
        want.add_(source)
    with UpdateWorkers(3) as workers:
        workers.run_all(add_works([Sum(target, source, scales, is_first)]))
    assert torch.equal(target, want)


@given(numel=NUMELS, apart=st.integers(0, 600))
def test_a_tensor_is_widened_where_it_lies(numel: int, apart: int):
    memory = torch.zeros(4 * (numel + apart) + 4, dtype=torch.uint8)
    source = memory[: 2 * numel].view(torch.bfloat16)
    target = memory[4 * apart : 4 * (apart + numel)].view(torch.float32)
    values = torch.randn(numel).bfloat16()
    source.copy_(values)
    rounds = 0
    for works in widen_rounds(target, source):
        run_shuffled(works)
        rounds += 1
    assert torch.equal(target, values.float())
    assert rounds <= 8


def test_an_error_in_a_work_comes_out_and_workers_go_on():
    def fail(_: torch.Tensor) -> None:
        raise ValueError("no")

    with UpdateWorkers(2) as workers:
        with pytest.raises(ValueError, match="no"):
            workers.run_all([fail, fail, fail])
        target = torch.zeros(7)
        workers.run_all(add_works([Sum(target, torch.ones(7))]))
        assert (target == 1).all()
