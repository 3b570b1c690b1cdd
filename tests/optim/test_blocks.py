"""Blocked updates equal torch's fused step over whole parameters, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.optim.blocks import update_blocks
from outcore.optim.piece import CUT_NUMEL, Piece, split
from outcore.optim.rules import SgdHyper

from .update_cases import OPTIMIZERS, Blocked, PlainLoop, assert_same_bits, random

pytestmark = pytest.mark.filterwarnings("ignore:torch._fused_sgd_ .*torch.optim with fused=True:RuntimeWarning")

NUMELS = (1, 63, 64, 65, 199, 4097)


def scratch_of(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return poisoned scratch, so that a read before a write shows."""
    return torch.full((numel * dtype.itemsize,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "pure_bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_and_option(name, dtype):
    plain, blocked = PlainLoop(OPTIMIZERS[name], NUMELS, dtype), Blocked(OPTIMIZERS[name], NUMELS, dtype)
    for step in range(1, 5):
        grads = [random(n, 100 * step + n, dtype) for n in NUMELS]
        before = [g.clone() for g in grads]
        plain.step(grads)
        update_blocks(blocked.pieces(step, grads), scratch_of(1024, dtype))
        assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))
        assert_same_bits(grads, before)  # gradients are only read


@pytest.mark.parametrize("name", ["adamw", "sgd nesterov", "adagrad decay"])
def test_bf16_recipe(name):
    """The recipe: bf16 gradients, two factors, fp32 masters and states, bf16 weights out."""
    plain, blocked = (
        PlainLoop(OPTIMIZERS[name], NUMELS),
        Blocked(OPTIMIZERS[name], NUMELS, weights_dtype=torch.bfloat16),
    )
    factors = (torch.tensor(0.3), torch.tensor(1.7))
    for step in range(1, 4):
        grads = [random(n, 100 * step + n, torch.bfloat16) for n in NUMELS]
        plain.step(grads, factors)
        update_blocks(blocked.pieces(step, grads, factors=factors), scratch_of(1024, torch.float32))
        assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))
        assert_same_bits(blocked.weights, [p.detach().bfloat16() for p in plain.params])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "pure_bf16"])
def test_factors_are_those_of_clip_grad_norm(dtype):
    numels = (199, 4097)
    plain, blocked = PlainLoop(OPTIMIZERS["adamw"], numels, dtype), Blocked(OPTIMIZERS["adamw"], numels, dtype)
    grads = [random(n, n, dtype) for n in numels]
    for param, grad in zip(plain.params, grads, strict=True):
        param.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(plain.params, 0.5)
    plain.optimizer.step()
    factor = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
    update_blocks(blocked.pieces(1, grads, factors=(factor,)), scratch_of(1024, dtype))
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


@pytest.mark.parametrize("numel", [(1 << 20) + 17])
def test_large_parameter_in_blocks_of_many_sizes(numel):
    plain = PlainLoop(OPTIMIZERS["adamw"], [numel])
    grads = [random(numel, step, torch.bfloat16) for step in (1, 2)]
    for grad in grads:
        plain.step([grad])
    for block in (4096 + 64, 1 << 18, 1 << 19, 1 << 22):
        blocked = Blocked(OPTIMIZERS["adamw"], [numel])
        for step, grad in enumerate(grads, 1):
            update_blocks(blocked.pieces(step, [grad]), scratch_of(block, torch.float32))
        assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


def test_place_in_memory_does_not_matter():
    """Tensors are parts of one arena, each at an offset that is no multiple of a cache line."""
    plain, blocked = PlainLoop(OPTIMIZERS["adamw"], NUMELS), Blocked(OPTIMIZERS["adamw"], NUMELS)
    arena, taken = torch.zeros(100_000), 1

    def moved(tensor):
        nonlocal taken
        place = arena[taken : taken + tensor.numel()]
        taken += tensor.numel() + 3
        return place.copy_(tensor)

    blocked.targets = [moved(t) for t in blocked.targets]
    blocked.states = [{name: moved(t) for name, t in state.items()} for state in blocked.states]
    grads = [random(n, n) for n in NUMELS]
    plain.step(grads)
    update_blocks(blocked.pieces(1, [moved(g) for g in grads]), scratch_of(1024, torch.float32))
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


def test_zeroed_gradients_keep_what_a_factor_does_to_them():
    """Equal to p.grad.zero_().mul_(factor): an infinite factor gives NaN, and the old gradient is not read."""
    for factor in (torch.tensor(2.0), torch.tensor(torch.inf)):
        plain, blocked = PlainLoop(OPTIMIZERS["adamw"], NUMELS), Blocked(OPTIMIZERS["adamw"], NUMELS)
        plain.step([torch.zeros(n) for n in NUMELS], (factor,))
        pieces = blocked.pieces(1, [None] * len(NUMELS), factors=(factor,), zero=True)
        update_blocks(pieces, scratch_of(1024, torch.float32))
        assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


def test_two_groups_of_one_optimizer():
    """The groups are interleaved and differ in one number only."""
    fast, slow = Blocked(OPTIMIZERS["adamw"], (199, 65)), Blocked(OPTIMIZERS["adamw"], (64, 77))
    slow.groups[0]["lr"] = 1e-5
    want = [PlainLoop(OPTIMIZERS["adamw"], (199, 65)), PlainLoop(OPTIMIZERS["adamw"], (64, 77))]
    want[1].optimizer.param_groups[0]["lr"] = 1e-5
    pieces = []
    for plain, mine in zip(want, (fast, slow), strict=True):
        grads = [random(t.numel(), 3) for t in mine.targets]
        plain.step(grads)
        pieces.append(mine.pieces(1, grads))
    update_blocks([piece for pair in zip(*pieces, strict=True) for piece in pair], scratch_of(1024, torch.float32))
    for plain, mine in zip(want, (fast, slow), strict=True):
        assert_same_bits(mine.tensors(), plain.tensors(mine.names))


def test_settings_steps_and_dtypes_may_differ_from_piece_to_piece():
    """Two groups, interleaved; one parameter makes its first step beside another that is already at its second."""
    makes = [OPTIMIZERS["sgd dampening"], OPTIMIZERS["adam decay amsgrad"], OPTIMIZERS["sgd dampening"]]
    plains = [PlainLoop(makes[0], [199]), PlainLoop(makes[1], [65], torch.bfloat16), PlainLoop(makes[2], [77])]
    blocked = [Blocked(makes[0], [199]), Blocked(makes[1], [65], torch.bfloat16), Blocked(makes[2], [77])]
    for step in (1, 2, 3):
        pieces = []
        for i, (plain, mine) in enumerate(zip(plains, blocked, strict=True)):
            if i == 2 and step == 1:
                continue  # no gradient yet: its own first step comes later
            grad = random(mine.targets[0].numel(), step, mine.targets[0].dtype)
            plain.step([grad])
            pieces += mine.pieces(step - (i == 2), [grad])
        update_blocks(pieces, scratch_of(1024, torch.float32))
    for plain, mine in zip(plains, blocked, strict=True):
        assert_same_bits(mine.tensors(), plain.tensors(mine.names))


def test_small_parameters_share_a_kernel_call(monkeypatch):
    calls = []
    note = lambda step: calls.append([t.numel() for t in step.targets])  # noqa: E731
    monkeypatch.setattr("outcore.optim.blocks.bound", lambda *_: note)
    blocked = Blocked(OPTIMIZERS["adamw"], (10, 64, 65, 300))
    update_blocks(blocked.pieces(1, [random(n, n) for n in (10, 64, 65, 300)]), scratch_of(256, torch.float32))
    assert calls == [[256], [44], [10, 64, 65]]  # 64 + 64 + 128 fill the scratch


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    numels=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    block=st.integers(64, 5000),
    workers=st.integers(1, 5),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    factors=st.sampled_from([(), (0.3,), (0.3, 0.7)]),
)
def test_any_cut_gives_the_same_bits(numels, block, workers, name, dtype, factors):
    plain = PlainLoop(OPTIMIZERS[name], numels)
    blocked = Blocked(OPTIMIZERS[name], numels, weights_dtype=torch.bfloat16)
    factors = tuple(torch.tensor(factor) for factor in factors)
    for step in (1, 2):
        grads = [random(n, step * 7 + n, dtype) for n in numels]
        plain.step(grads, factors)
        for share in split(blocked.pieces(step, grads, factors=factors), [1] * workers):
            update_blocks(share, scratch_of(block, torch.float32))
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))
    assert_same_bits(blocked.weights, [p.detach().bfloat16() for p in plain.params])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(numels=st.lists(st.integers(0, 5000), max_size=8), workers=st.integers(1, 9))
def test_split_covers_everything_once_and_evenly(numels, workers):
    hyper = SgdHyper(lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False)
    targets = [torch.zeros(n) for n in numels]
    pieces = [Piece(target=t, grad=t, states={}, weights=None, step=1, hyper=hyper) for t in targets]
    shares = split(pieces, [1] * workers)
    assert len(shares) == workers
    for piece in (piece for share in shares for piece in share):
        assert piece.target.storage_offset() % CUT_NUMEL == 0
        piece.target.add_(1)
    assert all(bool((t == 1).all()) for t in targets)
    sizes = [sum(piece.target.numel() for piece in share) for share in shares]
    assert max(sizes) <= sum(numels) / workers + CUT_NUMEL


def test_a_scratch_without_room_and_a_missing_gradient_are_refused():
    blocked = Blocked(OPTIMIZERS["adamw"], [10])
    with pytest.raises(AssertionError, match="scratch of an update holds less than 64 elements"):
        update_blocks(blocked.pieces(1, [random(10, 0)]), scratch_of(63, torch.float32))
    with pytest.raises(AssertionError, match="must be marked zero"):
        update_blocks(blocked.pieces(1, [None]), scratch_of(64, torch.float32))
