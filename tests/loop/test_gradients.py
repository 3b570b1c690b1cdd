"""Gradients that loops change between backward and step."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch.nn import utils

import outcore
from outcore.engine.gradients import passes

from . import rig
from .rig import DEVICE, KINDS, Block, Tower, adamw, agrees, assert_same, batch, make, prepared, same, tower_on, train

pytestmark = pytest.mark.parametrize("kind", KINDS)

BLOCK_WEIGHT = "blocks.1.up.weight"


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
def test_clip_grad_norm(kind, tmp_path, norm_type):
    def drive(model, optimizer):
        norms = []
        for step, foreach in enumerate((None, False, True)):
            model.loss(batch(step)).backward()
            model.loss(batch(step + 7)).backward()
            norms.append(utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type, foreach=foreach))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    same(drive, kind, tmp_path)


@agrees()
def test_clip_subset_and_total_norm(model, optimizer):
    model.loss(batch()).backward()
    some = [model.head.weight, *model.blocks[1].parameters()]
    norms = [utils.clip_grad_norm_(some, 0.05)]
    norms.append(utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    utils.clip_grads_with_norm_(model.parameters(), 0.02, norms[-1])
    norms.append(utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=True))
    optimizer.step()
    return norms


@agrees()
def test_clip_error_if_nonfinite(model, optimizer):
    (model.loss(batch()) * float("inf")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    return train(model, optimizer)


@agrees()
def test_clip_grad_value(model, optimizer):
    for step, foreach in enumerate((None, False, True)):
        model.loss(batch(step)).backward()
        model.loss(batch(step + 7)).backward()
        utils.clip_grad_norm_(model.parameters(), 3.0)
        utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_every_way_of_zeroing(kind, tmp_path, make_optimizer):
    ways = {
        "model": lambda m, o: m.zero_grad(),
        "model zeros": lambda m, o: m.zero_grad(set_to_none=False),
        "optimizer": lambda m, o: o.zero_grad(set_to_none=True),
        "optimizer zeros": lambda m, o: o.zero_grad(set_to_none=False),
        "zero_": lambda m, o: [p.grad.zero_() for p in m.parameters() if p.grad is not None],
    }

    def drive(model, optimizer):
        norms = []
        for zero in ways.values():
            model.loss(batch(len(norms))).backward()
            optimizer.step()
            zero(model, optimizer)
            norms.append(utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            optimizer.step()  # gradients of zero still take a step: momentum and decay act
            model.loss(batch(9)).backward()
            optimizer.step()
        return norms

    same(drive, kind, tmp_path, optimizer=make_optimizer)


@pytest.mark.parametrize(
    "zero", [lambda m, o: o.zero_grad(False), lambda m, o: m.zero_grad(False)], ids=["optimizer", "model"]
)
@pytest.mark.parametrize("is_late", [False, True])
def test_zeroing_in_place_after_a_backward_that_failed(kind, tmp_path, zero, is_late, monkeypatch):
    """Autograd may let go of the backward that failed only after the zeroing, as its own thread does on a GPU."""
    held, at_end = [], passes.at_end_of_task
    if is_late:
        monkeypatch.setattr(passes, "at_end_of_task", lambda end: (held.append(end), at_end(end)))

    def fail(_):
        raise ZeroDivisionError

    def drive(model, optimizer):
        losses = train(model, optimizer)
        model.head.bias.requires_grad_(False)
        handle = model.blocks[0].register_forward_hook(lambda module, args, result: result.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            model.loss(batch()).backward()
        handle.remove()
        zero(model, optimizer)
        held.clear()
        zeros = [p.grad.sum() for p in model.blocks[2].parameters() if p.grad is not None]
        train(model, optimizer, 1, 3)
        return losses, zeros, train(model, optimizer)

    same(drive, kind, tmp_path)


@agrees()
def test_one_gradient_dropped(model, optimizer):
    for step in range(3):
        model.loss(batch(step)).backward()
        model.loss(batch(step + 5)).backward()
        model.get_parameter(BLOCK_WEIGHT).grad = None
        model.head.bias.grad = None
        norm = utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step == 1:
            optimizer.zero_grad()
    return norm


@agrees()
def test_zeroed_one_then_accumulated(model, optimizer):
    model.loss(batch(0)).backward()
    model.get_parameter(BLOCK_WEIGHT).grad.zero_()
    model.blocks[0].norm.weight.grad = None
    model.loss(batch(1)).backward()
    optimizer.step()


@agrees()
def test_step_twice_and_accumulate_on_old(model, optimizer):
    norms = []
    for step in range(2):
        model.loss(batch(step)).backward()
        norms.append(utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.step()
    model.loss(batch(3)).backward()
    norms.append(utils.clip_grad_norm_(model.parameters(), 0.05))
    optimizer.step()
    return norms


@agrees()
def test_step_without_gradients(model, optimizer):
    optimizer.step()
    return train(model, optimizer)


@agrees()
def test_scaled_by_hand(model, optimizer):
    for step in range(2):
        model.loss(batch(step)).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.3)
                p.grad.div_(3.0 if DEVICE == "cpu" else 2.0)  # see docs/reference/exceptions.md
                p.grad.div_(4)
                p.grad *= torch.tensor(1.7)
                p.grad /= torch.tensor(0.9 if DEVICE == "cpu" else 0.5)
                p.grad.clamp_(-0.01, 0.02)
                p.grad.nan_to_num_()
        optimizer.step()
        optimizer.zero_grad()


@agrees()
def test_norm_by_hand(model, optimizer):
    model.loss(batch()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.norm() for g in grads] + [g.norm(2) for g in grads] + [torch.linalg.vector_norm(g) for g in grads]


@agrees()
def test_an_edited_norm_changes_no_other_norm(model, optimizer):
    seen = []
    for step in range(2):
        model.loss(batch(step)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        total = grads[0].norm()
        for norm in (*(g.norm() for g in grads), *torch._foreach_norm(grads)):
            total += norm.pow_(2)
        seen += [total, utils.clip_grad_norm_(model.parameters(), 0.05)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@agrees()
def test_norms_in_another_dtype(model, optimizer):
    model.loss(batch()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*torch._foreach_norm(grads, 2, dtype=torch.float64), *torch._foreach_norm(grads, 1, torch.float64)]


@agrees()
def test_a_factor_that_changes_through_data(model, optimizer):
    model.loss(batch()).backward()
    factor = torch.tensor(0.5, device="cpu")  # on an accelerator the host does not look at a factor
    for p in model.parameters():
        if p.grad is not None:
            factor.data.mul_(0.9)
            p.grad.mul_(factor)
    optimizer.step()


@agrees()
def test_clipping_in_inference_mode(model, optimizer):
    seen = []
    for step in range(2):
        model.loss(batch(step)).backward()
        with torch.inference_mode():
            seen.append(utils.clip_grad_norm_(model.parameters(), 0.05).item())
        seen.append(utils.clip_grad_norm_(model.parameters(), 0.02))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_a_change_that_fails_leaves_the_gradient(kind, tmp_path, monkeypatch):
    def drive(model, optimizer):
        model.loss(batch()).backward()
        gradient, seen = model.get_parameter(BLOCK_WEIGHT).grad, []
        for change in (torch.clamp_, lambda g: g.div_(torch.ones(2)), torch.clamp_):
            gradient.mul_(0.5)
            with pytest.raises(RuntimeError):
                change(gradient)
            seen.append(gradient.clone())
        optimizer.step()
        return [*seen, model.blocks[1].down.weight.grad.clone()]

    same(drive, kind, tmp_path)
    monkeypatch.setattr(rig, "plan_for", functools.partial(rig.plan_for, precision="bf16"))
    model = make(dtype=torch.bfloat16)
    with prepared(model, adamw(model), kind, tmp_path, precision="bf16") as (model, optimizer):
        model.loss(batch()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        before, gradient = [g.clone() for g in grads], model.get_parameter(BLOCK_WEIGHT).grad
        with pytest.raises(RuntimeError, match="At least one"):
            torch.clamp_(gradient.mul_(0.5))
        after = [g.clone() for g in grads]
        assert_same([b * 0.5 if g is gradient else b for b, g in zip(before, grads, strict=True)], after)


def test_own_tensor_as_gradient(kind, tmp_path):
    with tower_on(kind if kind != "plain" else "device", tmp_path) as (model, optimizer):
        model.loss(batch()).backward()
        param = model.get_parameter(BLOCK_WEIGHT)
        param.grad = torch.ones(param.shape)
        with pytest.raises(outcore.UnsupportedError, match=f"p.grad of '{BLOCK_WEIGHT}'.*replaced"):
            optimizer.step()

    def drive(model, optimizer):
        for step in range(3):
            for name in (BLOCK_WEIGHT, "head.weight"):
                param = model.get_parameter(name)
                param.grad = torch.full(param.shape, 0.01)
            model.loss(batch(step)).backward()  # adds to it, as usual
            if step == 2 and kind == "plain":
                param.grad = torch.full(param.shape, 0.02)
            optimizer.step()
            optimizer.zero_grad()

    same(drive, kind, tmp_path)


class Sometimes(Block):
    """Uses its weights only when told to."""

    uses = True

    def forward(self, x):
        return super().forward(x) if self.uses else x * self.norm.weight


def take_away_and_put_back(model):
    model.loss(batch()).backward()
    param = model.get_parameter(BLOCK_WEIGHT)
    old, param.grad = param.grad, None
    model.blocks[1].uses = False
    model.loss(batch(1)).backward()
    assert param.grad is None
    param.grad = old  # unless it is a tensor of its own, its bytes may be overwritten by now


def test_taken_away_and_put_back_is_refused(kind, tmp_path):
    def drive(model, optimizer):
        for _ in range(2):
            take_away_and_put_back(model)
            optimizer.step()
            optimizer.zero_grad()
            model.blocks[1].uses = True

    if kind == "plain":
        same(drive, kind, tmp_path, build=lambda: Tower(Sometimes))
        return
    model = make(lambda: Tower(Sometimes))
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        take_away_and_put_back(model)
        with pytest.raises(outcore.UnsupportedError, match="replaced"):
            optimizer.step()


READS = (
    torch.sum,
    torch.clone,
    torch.isnan,
    lambda g: g.abs().mean().item(),
    lambda g: g + 1,
    lambda g: g.norm(dim=0),
    lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    lambda g: g.cpu().numpy().tolist(),
    *([lambda g: g.numpy().tolist()] if DEVICE == "cpu" else []),
    lambda g: g.data.tolist(),
    lambda g: g.to(torch.float64),
    lambda g: torch.histc(g, bins=5),
    lambda g: g.flatten()[1:3].sum(),
    lambda g: [part.sum() for part in g.split(4)],
    lambda g: copy.deepcopy(g),
    lambda g: pickle.loads(pickle.dumps(g)),
    lambda g: torch.stack([g, g]).max(),
    lambda g: torch.einsum("i...,i...->i", g, g),
    lambda g: g.sum().item() < 100 and bool((g == g).all()),
)
CHANGES = (
    lambda g: g.add_(1e-3),
    lambda g: g.add_(torch.full(g.shape, 1e-3)),
    lambda g: g.data.sub_(1e-3 * torch.ones(g.shape), alpha=2),
    lambda g: g.mul_(torch.linspace(0.5, 1, g.shape[-1])),
    lambda g: g.__setitem__(0, 0.01),
    lambda g: g.view(-1)[2:5].mul_(3),
    lambda g: g[g.abs() < 1e-3].zero_(),
    lambda g: g.masked_fill_(g.abs() < 1e-3, 1e-4),
    lambda g: g.sign_().mul_(1e-2),
    lambda g: g.copy_(g.flip(0)),
    lambda g: g.zero_().add_(1e-3),
    lambda g: torch.add(g, g, out=g),
    lambda g: torch._foreach_add_([g, torch.zeros(1)], 1e-4),
    lambda g: setattr(g, "data", torch.full(g.shape, 1e-3)),
    lambda g: g.div_(torch.full(g.shape, 3.0)),
    lambda g: g.zero_().clamp_(min=1e-3),
    lambda g: g.mul_(torch.tensor([0.1], dtype=torch.float64)),
)


def touched(model):
    return [model.get_parameter(name).grad for name in (BLOCK_WEIGHT, "blocks.0.norm.bias", "head.weight")]


@agrees()
def test_reading_a_gradient_is_reading_its_value(model, optimizer):
    model.loss(batch()).backward()
    model.loss(batch(1)).backward()
    seen = [read(g) for g in touched(model) for read in READS]
    utils.clip_grad_norm_(model.parameters(), 0.1)
    seen += [read(g) for g in touched(model) for read in READS]
    optimizer.step()
    return seen + [g.clone() for g in touched(model)]


@pytest.mark.parametrize("when", ["first", "accumulated"])
def test_changing_a_gradient_in_place_changes_what_the_step_takes(kind, when, tmp_path):
    def drive(model, optimizer):
        seen = []
        for number, change in enumerate(CHANGES):
            model.loss(batch(number)).backward()
            if when == "accumulated":
                model.loss(batch(number + 1)).backward()
            if number % 2:
                seen.append(utils.clip_grad_norm_(model.parameters(), 0.1))
            for gradient in touched(model):
                change(gradient)
            if number % 3 == 0:
                model.loss(batch(number + 2)).backward()
            seen.append(utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 4 != 0)
        return seen

    same(drive, kind, tmp_path)


def test_a_copy_says_that_it_is_none(kind, tmp_path):
    if kind == "plain":
        pytest.skip("gradients are autograd's own tensors, no copies")
    with tower_on(kind, tmp_path) as (model, optimizer):
        model.loss(batch()).backward()
        param = model.get_parameter(BLOCK_WEIGHT)
        old = param.grad
        assert BLOCK_WEIGHT in repr(old)
        assert (old.shape, old.dtype, old.requires_grad) == (param.shape, torch.float32, False)
        optimizer.zero_grad()
        for use in (torch.sum, torch.norm, lambda g: g.clamp_(0, 1), lambda g: g.add_(1.0)):
            with pytest.raises(outcore.UnsupportedError, match=f"on p.grad of '{BLOCK_WEIGHT}' now.*clone"):
                use(old)


@pytest.mark.skipif(DEVICE != "cpu", reason="a tensor of an accelerator has no numpy()")
def test_a_copy_in_numpy_is_read_only(kind, tmp_path):
    if kind == "plain":
        pytest.skip("gradients are autograd's own tensors, no copies")
    with tower_on(kind, tmp_path) as (model, _):
        model.loss(batch()).backward()
        with pytest.raises(ValueError, match="read-only"):
            model.get_parameter(BLOCK_WEIGHT).grad.numpy()[0] = 1.0


@agrees(accumulation_steps=1)
def test_promised_accumulation_begins_anew_after_zeroing(model, optimizer):
    model.loss(batch(8)).backward()
    optimizer.zero_grad()  # as after a step that GradScaler skipped
    return train(model, optimizer)


def test_more_passes_than_promised_are_refused(kind, tmp_path):
    with tower_on(kind, tmp_path, accumulation_steps=1) as (model, optimizer):
        model.loss(batch()).backward()
        with pytest.raises(outcore.UnsupportedError, match="accumulation_steps promised"):
            model.loss(batch()).backward()
