"""``GradScaler``: unscaling, infinities, skipped steps."""

from __future__ import annotations

import pytest
import torch
from torch.nn import utils

from outcore.engine.gradients.unit_gradients import UnitGradients

from .rig import DEVICE, KINDS, adamw, agrees, batch, make, prepared, same, train

pytestmark = pytest.mark.parametrize("kind", KINDS)


def scaled_steps(model, optimizer, scale, *, clip, infinite_at=(), unscale=True):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, growth_interval=2)
    seen = []
    for step in range(5):
        loss = model.loss(batch(step))
        if step in infinite_at:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.scale(model.loss(batch(step + 9))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            seen.append(utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.pairs
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scale", [2.0**12, 1000.0])
def test_scaled(kind, tmp_path, scale, clip):
    same(lambda m, o: scaled_steps(m, o, scale, clip=clip), kind, tmp_path)


@agrees()
def test_gradients_whose_squares_vanish(model, optimizer):
    """Their norm cannot be scaled; the gradients can."""
    scaler, seen = torch.amp.GradScaler(DEVICE, init_scale=2.0**16), []
    for step, size in enumerate([2.0**-40, 2.0**-70, 0.0]):
        scaler.scale(model.loss(batch(step)) * size).backward()
        scaler.unscale_(optimizer)
        seen += [*(p.grad.norm() for p in model.parameters() if p.requires_grad)]
        seen.append(utils.clip_grad_norm_(model.parameters(), 2.0**-45))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


def test_clipping_after_unscaling_fetches_nothing(kind, tmp_path, monkeypatch):
    model, fetched = make(), []
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12)
        scaler.scale(model.loss(batch())).backward()
        if kind == "device":
            utils.get_total_norm([p.grad for p in model.parameters() if p.requires_grad])
        value = UnitGradients._value
        monkeypatch.setattr(UnitGradients, "_value", lambda *args: fetched.append(args[1]) or value(*args))
        scaler.unscale_(optimizer)
        utils.clip_grad_norm_(model.parameters(), 0.1)
    assert not fetched


def test_step_unscales_by_itself(kind, tmp_path):
    # The fused kernel divides by the scale; here gradients are multiplied by its inverse: equal for powers of two.
    same(lambda m, o: scaled_steps(m, o, 2.0**10, clip=False, unscale=False), kind, tmp_path)


@pytest.mark.parametrize(("infinite_at", "promise"), [((0,), None), ((1, 2), 2)])
def test_infinite_gradients_skip_the_step(kind, tmp_path, infinite_at, promise):
    same(
        lambda m, o: scaled_steps(m, o, 2.0**12, clip=True, infinite_at=infinite_at),
        kind,
        tmp_path,
        accumulation_steps=promise,
    )


@pytest.mark.parametrize("unscale", [True, False])
def test_a_step_that_is_skipped_calls_hooks_as_one_of_a_fused_optimizer(kind, tmp_path, unscale):
    def drive(model, optimizer):
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return scaled_steps(model, optimizer, 2.0**12, clip=unscale, infinite_at=(1, 3), unscale=unscale), calls

    same(drive, kind, tmp_path, optimizer=lambda model: adamw(model, fused=True))


@agrees()
def test_overflow_of_a_norm_is_no_infinity(model, optimizer):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**100)
    scaler.scale(model.loss(batch())).backward()
    scaler.unscale_(optimizer)
    norm = utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler.get_scale()


@agrees(optimizer=adamw)
def test_one_infinite_element(model, optimizer):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**5)
    for step in range(2):
        scaler.scale(model.loss(batch(step))).backward()
        if step == 0:
            model.blocks[1].up.bias.grad.mul_(float("nan"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


@agrees()
def test_a_norm_that_is_made_printable_hides_no_infinity(model, optimizer):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    (scaler.scale(model.loss(batch())) * float("inf")).backward()
    printed = [p.grad.norm().nan_to_num_(1.0, 1.0) for p in model.parameters() if p.grad is not None]
    scaler.step(optimizer)
    scaler.update()
    return printed, scaler.get_scale()


@pytest.mark.parametrize("infinite", [False, True])
def test_unscaling_reads_the_device_once_at_most(kind, tmp_path, infinite, monkeypatch):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)  # the first step reads more, once
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12)
        scaler.scale(model.loss(batch()) * (float("inf") if infinite else 1.0)).backward()
        asked = {}  # with a default device torch calls again, for the same tensor

        def count() -> int:
            return sum(t.device.type == DEVICE for t in asked.values())

        with monkeypatch.context() as patch:
            for name in ("__bool__", "__float__", "item", "tolist"):
                known = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, lambda t, k=known: asked.setdefault(id(t), t) is None or k(t))
            scaler.unscale_(optimizer)
            assert count() <= 1
            scaler.step(optimizer)
            scaler.update()
        assert count() <= 1 + infinite, "what the host learned is enough for the step"
        assert (scaler.get_scale() < 2.0**12) is infinite
