"""Parameters side by side in memory are updated as one, with the bits of a step over each."""

from __future__ import annotations

import dataclasses
import random as chance_of
from unittest import mock

import pytest
import torch
from torch import nn

import outcore
from outcore.engine.updates.workers import UpdateWorkers
from outcore.optim.blocks import update_blocks
from outcore.optim.piece import join_neighbours

from .update_cases import OPTIMIZERS, Blocked, PlainLoop, assert_same_bits, random

FUSED = ("adamw", "adamw amsgrad", "sgd nesterov", "adagrad decay")
OTHERS = ("rmsprop centered", "lion", "sgd foreach")
pytestmark = pytest.mark.filterwarnings("ignore:torch._fused_sgd_ .*torch.optim with fused=True:RuntimeWarning")


class Arena:
    """Moves columns of tensors into memory, each tensor behind the one before."""

    def __init__(self, gaps):
        self.gaps = gaps

    def column(self, tensors):
        if any(t is None for t in tensors):
            return tensors
        memory, start, moved = torch.full((2**18,), torch.nan, dtype=tensors[0].dtype), 64, []
        for tensor, gap in zip(tensors, self.gaps, strict=True):
            start += gap
            moved.append(memory[start : start + tensor.numel()].copy_(tensor))
            start += tensor.numel()
        return moved


def placed(blocked, gaps):
    arena = Arena(gaps)
    blocked.targets = arena.column(blocked.targets)
    columns = {name: arena.column([state[name] for state in blocked.states]) for name in blocked.states[0]}
    blocked.states = [{name: column[i] for name, column in columns.items()} for i in range(len(blocked.targets))]
    if blocked.weights is not None:
        blocked.weights = arena.column(blocked.weights)
    return arena


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "pure_bf16"])
@pytest.mark.parametrize("name", FUSED)
def test_bits_are_those_of_each_parameter_alone(name, dtype):
    numels, gaps = (64, 192, 1024, 199, 128, 64, 4096), (0, 0, 0, 0, 0, 64, 0)
    plain, blocked = PlainLoop(OPTIMIZERS[name], numels, dtype), Blocked(OPTIMIZERS[name], numels, dtype)
    arena = placed(blocked, gaps)
    for step in (1, 2, 3):
        grads = [random(n, 100 * step + n, dtype) for n in numels]
        plain.step(grads)
        pieces = join_neighbours(blocked.pieces(step, arena.column(grads)))
        if all(piece.is_fused for piece in pieces):  # SGD in bf16 is not, in torch 2.13
            assert [piece.target.numel() for piece in pieces] == [64 + 192 + 1024 + 199, 128, 64 + 4096]
        update_blocks(pieces, torch.full((dtype.itemsize * 512,), 0xFF, dtype=torch.uint8))
        assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_fused_kernel_updates_has_the_bits_of_each_with_several_threads(name):
    """ATen cuts such an update between its threads anywhere: ends of vectors would fall where they did not before."""
    numels, dtype, count = (128 * 151,) * 7, torch.bfloat16, torch.get_num_threads()
    plain, blocked = PlainLoop(OPTIMIZERS[name], numels, dtype), Blocked(OPTIMIZERS[name], numels, dtype)
    arena = placed(blocked, [0] * len(numels))
    torch.set_num_threads(3)
    try:
        for step in (1, 2, 3):
            grads = [random(n, 100 * step + i, dtype) for i, n in enumerate(numels)]
            plain.step(grads)
            update_blocks(
                join_neighbours(blocked.pieces(step, arena.column(grads))), torch.empty(2**23).view(torch.uint8)
            )
            assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize("seed", range(30))
def test_any_layout(seed):
    """Mixed sizes and gaps, zeroed gradients, factors, steps and settings, with fp32 masters of bf16 weights."""
    chance = chance_of.Random(seed)
    numels = [chance.choice([64, 128, 640, 65, 1]) for _ in range(chance.randint(2, 9))]
    alone, together = (Blocked(OPTIMIZERS["adamw"], numels, weights_dtype=torch.bfloat16) for _ in range(2))
    arena = placed(together, [chance.choice([0, 0, 0, 64, 3]) for _ in numels])
    factors = [(), (torch.tensor(0.3),), (torch.tensor(0.3), torch.tensor(1.7))]
    grads = [random(n, seed + n, torch.bfloat16) for n in numels]
    changes = [{"factors": chance.choice(factors[:2]), "zero": chance.random() < 0.2, "step": 1} for _ in numels]
    slower = dataclasses.replace(alone.pieces(1, grads)[0].hyper, lr=1e-5)

    def pieces(blocked, grads):
        found = blocked.pieces(1, grads)
        for i, change in enumerate(changes):
            hyper = slower if i >= len(numels) // 2 else found[i].hyper
            found[i] = dataclasses.replace(found[i], **change, hyper=hyper)
        return found

    scratch = torch.full((4 * 256,), 0xFF, dtype=torch.uint8)
    update_blocks(pieces(alone, grads), scratch)
    update_blocks(join_neighbours(pieces(together, arena.column(grads))), scratch)
    assert_same_bits(together.tensors(), alone.tensors())
    assert_same_bits(together.weights, alone.weights)


def test_a_unit_is_updated_as_one_piece():
    counts, run = [], UpdateWorkers.run

    def counted(self, pieces):
        counts.append(len(pieces))
        run(self, pieces)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)) for _ in range(3)))
    budget, adamw = outcore.Budget(device="144KiB", host="1GiB"), torch.optim.AdamW(model.parameters())
    with (
        mock.patch.object(UpdateWorkers, "run", counted),
        outcore.prepare(model, adamw, units=["0", "1", "2"], budget=budget, device="cpu") as (model, optimizer),
    ):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    assert counts == [1, 1, 1]


def test_gradients_of_several_dtypes_side_by_side():
    """The second gradient is in fp32, behind a bf16 one and before another, without a gap."""
    numels = (64, 128, 64)
    grads = [
        random(n, n, dtype) for n, dtype in zip(numels, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True)
    ]
    alone, together = (Blocked(OPTIMIZERS["adamw"], numels) for _ in range(2))
    placed(together, (0, 0, 0))
    memory = torch.cat([grad.view(torch.uint8) for grad in grads]).split([grad.nbytes for grad in grads])
    side_by_side = [part.view(grad.dtype) for part, grad in zip(memory, grads, strict=True)]
    update_blocks(alone.pieces(1, grads), torch.empty(4096, dtype=torch.uint8))
    update_blocks(join_neighbours(together.pieces(1, side_by_side)), torch.empty(4096, dtype=torch.uint8))
    assert_same_bits(together.tensors(), alone.tensors())
