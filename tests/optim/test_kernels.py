"""The private kernels, the check at first use, and what replaces a kernel that fails it."""

from __future__ import annotations

import warnings

import pytest
import torch

from outcore.optim import kernels
from outcore.optim.blocks import update_blocks

from .update_cases import FUSED, OPTIMIZERS, Blocked, PlainLoop, assert_same_bits, fused_sgd_is_broken, random

KERNELS = {"adamw": "_fused_adamw_", "adam": "_fused_adam_", "sgd": "_fused_sgd_", "adagrad": "_fused_adagrad_"}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Make each test the first to use every kernel. One thread: the fused kernels wake all threads for one element."""
    monkeypatch.setattr(kernels, "_steppers", {})
    monkeypatch.setattr(kernels, "_norm_takers", {})
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def train(name, dtype, numels=(199, 64)):
    plain, blocked = PlainLoop(OPTIMIZERS[name], numels, dtype), Blocked(OPTIMIZERS[name], numels, dtype)
    for step in (1, 2, 3):
        grads = [random(n, step, dtype) for n in numels]
        plain.step(grads)
        update_blocks(blocked.pieces(step, grads), torch.empty(1 << 16, dtype=torch.uint8))
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", sorted(KERNELS.values()))
def test_this_torch_passes_the_check(kernel, dtype):
    if kernel == "_fused_sgd_" and dtype == torch.bfloat16 and fused_sgd_is_broken():
        with pytest.warns(RuntimeWarning, match="torch.optim with fused=True, other results"):
            assert kernels._choose_stepper(kernel, torch.device("cpu"), dtype) is kernels._public_plain
    else:
        assert kernels._choose_stepper(kernel, torch.device("cpu"), dtype) is kernels._private_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_without_the_private_kernel_public_torch_gives_the_same(name, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "_private_step", lambda _: torch._fused_gone_)
    with pytest.warns(RuntimeWarning, match="of torch .* cannot be used for torch.(float32|bfloat16) on cpu"):
        train(name, dtype)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_with_another_signature_is_not_used(name, monkeypatch):
    real = getattr(torch, KERNELS[name])

    def changed(*args, **kwargs):
        if "found_inf" not in kwargs:  # torch.optim of that version knows the new signature
            raise TypeError("missing argument: brand_new")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, KERNELS[name], changed)
    with pytest.warns(RuntimeWarning, match="TypeError: missing argument: brand_new"):
        train(name, torch.float32)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_with_other_bits_is_not_used(name, monkeypatch):
    real = getattr(torch, KERNELS[name])

    def drifted(params, *args, **kwargs):
        real(params, *args, **kwargs)
        if "found_inf" not in kwargs:
            params[0][-1] += 1e-6

    monkeypatch.setattr(torch, KERNELS[name], drifted)
    with pytest.warns(RuntimeWarning, match="other results than the reference"):
        train(name, torch.float32)


def test_the_warning_comes_once(monkeypatch):
    monkeypatch.setattr(kernels, "_private_step", lambda _: torch._fused_gone_)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train("adamw", torch.float32)
    assert len(seen) == 1


def test_the_check_takes_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train("adamw", torch.float32, numels=(8,))
    kernels.norms([torch.ones(3)])
    assert torch.equal(torch.get_rng_state(), before)


def test_step_numbers_stand_still_where_those_of_torch_do():
    """torch counts steps in fp32 by adding one; Adagrad's rate decays with the count."""
    plain, blocked = PlainLoop(OPTIMIZERS["adagrad decay"], [199]), Blocked(OPTIMIZERS["adagrad decay"], [199])
    plain.optimizer.state[plain.params[0]]["step"].fill_(2.0**24)
    plain.step([random(199, 0)])
    update_blocks(blocked.pieces(2**25, [random(199, 0)]), torch.empty(4096, dtype=torch.uint8))
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


def clipped_norm(tensors):
    params = [torch.nn.Parameter(torch.zeros_like(t)) for t in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor.clone()
    return torch.nn.utils.clip_grad_norm_(params, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_clip_grad_norm(dtype):
    tensors = [random(n, n, dtype) for n in (1, 63, 199, 4097, 100_003)]
    tensors.append(random(65 * 33, 5, dtype).view(65, 33))
    arena = torch.zeros(1 << 18, dtype=dtype)
    flat, start = [], 3
    for tensor in tensors:  # flat, at any offset, like gradients in a bucket
        flat.append(arena[start : start + tensor.numel()].copy_(tensor.reshape(-1)))
        start += tensor.numel() + 5
    taken = kernels.norms(flat)
    assert all(norm.dtype == dtype and norm.ndim == 0 for norm in taken)
    assert_same_bits([torch.linalg.vector_norm(torch.stack(taken))], [clipped_norm(tensors)])
    assert_same_bits(taken, kernels.norms(tensors))


def test_norms_of_mixed_dtypes_keep_their_order():
    taken = kernels.norms([torch.full((4,), 1.0), torch.full((4,), 2.0).bfloat16(), torch.full((4,), 3.0)])
    assert [(norm.item(), norm.dtype) for norm in taken] == [
        (2.0, torch.float32),
        (4.0, torch.bfloat16),
        (6.0, torch.float32),
    ]
    assert kernels.norms([]) == []


@pytest.mark.parametrize(
    "changed",
    [lambda _: torch._foreach_gone, lambda tensors: [t.sum() for t in tensors]],
    ids=["missing", "other bits"],
)
def test_norms_without_the_private_kernel(changed, monkeypatch):
    tensors = [random(n, n) for n in (199, 4097)]
    want = clipped_norm(tensors)
    monkeypatch.setattr(kernels, "_private_norms", changed)
    with pytest.warns(RuntimeWarning, match="torch._foreach_norm .* cannot be used for torch.float32 on cpu"):
        taken = kernels.norms(tensors)
    assert_same_bits([torch.linalg.vector_norm(torch.stack(taken))], [want])


@pytest.mark.parametrize(
    "changed", [None, lambda targets, _: [t.zero_() for t in targets]], ids=["missing", "other bits"]
)
def test_copies_without_the_private_kernel(changed, monkeypatch):
    kernels._copies_together.cache_clear()
    monkeypatch.setattr(torch, "_foreach_copy_", changed)
    origins = [random(n, n) for n in (199, 4097)]
    targets = [torch.zeros_like(origin, dtype=torch.bfloat16) for origin in origins]
    try:
        with pytest.warns(RuntimeWarning, match="torch._foreach_copy_ .* cannot be used for torch.float32 on cpu"):
            kernels.copy_all(targets, origins)
    finally:
        kernels._copies_together.cache_clear()
    assert_same_bits(targets, [origin.bfloat16() for origin in origins])
