"""Parameters frozen after ``prepare``, and trained again."""

from __future__ import annotations

import pytest
import torch

import outcore

from .rig import KINDS, adamw, agrees, batch, same, tower_on, train

KIND = pytest.mark.parametrize("kind", KINDS)
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.pairs
@KIND
@POLICY
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_gradual_unfreezing(kind, policy, make_optimizer, tmp_path):
    def drive(model, optimizer):
        parts = [model.embed, *model.blocks, model.head]
        flags = {p: p.requires_grad for p in model.parameters()}
        seen = train(model, optimizer, 1)
        for number in range(len(parts), -1, -2):
            for i, part in enumerate(parts):
                for param in part.parameters():
                    param.requires_grad_(flags[param] and i >= number)
            if number < len(parts):
                seen += train(model, optimizer, 2, seed=number)
            seen.append([p.grad is None for p in model.parameters()])
        return seen

    same(drive, kind, tmp_path, policy=policy, optimizer=make_optimizer)


@agrees(*KINDS, "host keep")
def test_some_of_a_block_frozen_for_one_pass(model, optimizer):
    for step in range(3):
        model.loss(batch(step)).backward()
        some = [model.blocks[0].up.weight, model.blocks[2].norm.bias, model.head.bias]
        for param in some:
            param.requires_grad_(False)
        loss = model.loss(batch(step + 5))
        loss.backward()
        for param in some:
            param.requires_grad_(True)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return norm


@pytest.mark.pairs
@KIND
@POLICY
@pytest.mark.parametrize("frozen_first", [False, True])
def test_frozen_between_forward_and_backward(kind, policy, frozen_first, tmp_path):
    def drive(model, optimizer):
        param = model.blocks[1].down.weight
        param.requires_grad_(not frozen_first)
        loss = model.loss(batch())
        param.requires_grad_(frozen_first)
        loss.backward()
        assert param.requires_grad is frozen_first
        optimizer.step()
        optimizer.zero_grad()
        param.requires_grad_(True)
        return train(model, optimizer)

    same(drive, kind, tmp_path, policy=policy)


@pytest.mark.parametrize("kind", ["device", "host"])
def test_unfreezing_what_has_no_memory_is_refused(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer)
        model.blocks[1].shift.requires_grad_(True)
        with pytest.raises(outcore.UnsupportedError, match="'blocks.1.shift' to stay frozen.*and freeze"):
            model.loss(batch()).backward()
        model.blocks[1].shift.requires_grad_(False)
        train(model, optimizer)


@KIND
def test_adapters_that_come_later_are_refused_though_some_go_on_training(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        model.blocks[1].up.weight.requires_grad_(False)
        model.blocks[1].adapter = torch.nn.Linear(3, 3)
        model.loss(batch()).backward()
        with pytest.raises(outcore.UnsupportedError, match=r"'blocks.1.adapter.weight' was added .*before prepare"):
            optimizer.step()
        model.blocks[1].adapter.requires_grad_(False)
        optimizer.step()
