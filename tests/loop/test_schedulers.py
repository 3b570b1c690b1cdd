"""Schedulers and param groups."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup

import outcore

from .rig import ADAMW, adamw, agrees, batch, make, prepared, same, train

KINDS = pytest.mark.parametrize("kind", ["device", "disk"])
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: (step + 1) / 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6),
    "warmup and cosine": lambda o: get_cosine_schedule_with_warmup(o, num_warmup_steps=2, num_training_steps=6),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
}


def steps(model, optimizer, scheduler):
    rates = []
    for step in range(4):
        loss = model.loss(batch(step))
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        optimizer.zero_grad()
        rates.append([(float(g["lr"]), [float(b) for b in g["betas"]]) for g in optimizer.param_groups])
    return rates


@KINDS
@pytest.mark.parametrize("name", SCHEDULERS)
def test_built_after(kind, name, tmp_path):
    same(lambda m, o: steps(m, o, SCHEDULERS[name](o)), kind, tmp_path)


@KINDS
@pytest.mark.parametrize("name", SCHEDULERS)
def test_built_before(kind, name, tmp_path):
    schedulers = {}

    def optimizer(model):
        made = adamw(model)
        schedulers[id(made.param_groups)] = SCHEDULERS[name](made)
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no scheduler may warn that scheduler.step() came first
        same(lambda m, o: steps(m, o, schedulers[id(o.param_groups)]), kind, tmp_path, optimizer=optimizer)


@agrees("device", "disk", optimizer=lambda m: adamw(m, lr=torch.tensor(0.013)))
def test_rate_as_a_tensor(model, optimizer):
    for step in range(3):
        model.loss(batch(step)).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(0.7)
        optimizer.zero_grad()


@KINDS
def test_groups_changed_by_hand(kind, tmp_path):
    def drive(model, optimizer):
        for step in range(3):
            model.loss(batch(step)).backward()
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.param_groups[1]["weight_decay"] = 0.3 * step
            optimizer.param_groups[1]["betas"] = (0.8, 0.9)
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = 123.0  # after step() nothing may reach the update that is under way
            optimizer.zero_grad()
            optimizer.param_groups[1]["lr"] = 0.02

    def optimizer(model):
        blocks = list(model.blocks.parameters())
        return torch.optim.AdamW(
            [{"params": blocks}, {"params": [*model.embed.parameters(), *model.head.parameters()]}], **ADAMW
        )

    same(drive, kind, tmp_path, optimizer=optimizer)


@KINDS
def test_added_group_is_refused(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (_, optimizer):
        with pytest.raises(outcore.UnsupportedError, match="that is not in the model; prepare with everything"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        assert len(optimizer.param_groups) == 1


def some_of(model):
    return [*model.blocks[0].parameters(), *model.blocks[1].up.parameters(), model.head.bias]


@agrees("device", "disk", optimizer=lambda m: torch.optim.AdamW(some_of(m), **ADAMW))
def test_parameters_without_a_group_keep_their_gradients(model, optimizer):
    norms = []
    for step in range(3):
        model.loss(batch(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()  # only of its own parameters: other gradients grow
    return norms


@agrees("device", "disk")
def test_parameters_taken_out_of_their_group(model, optimizer):
    for step in range(3):
        train(model, optimizer, 1, step)
        if step == 0:
            taken = {id(p) for p in model.blocks[1].parameters()}
            group = optimizer.param_groups[0]
            everything = group["params"]
            group["params"] = [p for p in everything if id(p) not in taken]
    group["params"] = everything


@agrees("device", "disk")
def test_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model.loss(batch())
        loss.backward()
        return loss

    return [optimizer.step(closure).detach() for _ in range(2)]
