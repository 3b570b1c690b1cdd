"""What a device can do to a run: it has no memory left, an operation fails, or the host waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import simulator
import torch
from parity import zoo
from parity.cases import Case
from parity.loops import Setting, assert_equal, build_optimizer, plain_loop, streamed_loop
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.core.errors import MemoryBudgetError

pytestmark = pytest.mark.gpu
MIB = 2**20
KINDS = ("device", "host", "disk", "mixed")
STEPS = 4


@contextmanager
def no_memory_left(spare_bytes: int = 0) -> Iterator[None]:
    """Leave no free memory, as if another program had taken the rest of the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with simulator.knobs(capacity_bytes=torch.cuda.memory_reserved() + spare_bytes):
        yield


def test_prepare_says_what_is_missing_and_changes_nothing(tmp_path, monkeypatch):
    case = Case("llama", "device", Setting(steps=STEPS))
    model = zoo.make("llama")
    optimizer = build_optimizer(case.setting, dict(model.named_parameters()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"device": "cuda", "precision": "fp32", "plan": case.plan(model, optimizer), **case.options(tmp_path)}
    known = MIB * 64  # as if another program took the memory between the question and the allocation
    with monkeypatch.context() as patch, no_memory_left():
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (known, known))
        with pytest.raises(MemoryBudgetError, match="device memory: expected .* in one piece on cuda"):
            outcore.prepare(model, optimizer, **options)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with outcore.prepare(model, optimizer, **options) as (model, optimizer):
        zoo.loss(model, zoo.batches("llama")[0]).backward()
        optimizer.step()


def steps_with_one_lost(where: str, model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Take steps; the second batch meets a full device, and a plain loop leaves it out."""
    losses = []
    for step, batch in enumerate(zoo.batches("llama", steps=STEPS)):
        torch.manual_seed(step)
        if step == 1:
            if where:
                lose(where, model, batch)
            optimizer.zero_grad()
            continue
        loss = zoo.loss(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def lose(where: str, model: Any, batch: zoo.Batch) -> None:
    if where == "forward":
        with no_memory_left(), pytest.raises(torch.OutOfMemoryError):
            zoo.loss(model, batch)
        return
    loss = zoo.loss(model, batch)
    with no_memory_left(), pytest.raises(torch.OutOfMemoryError):
        loss.backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_memory_is_lost_and_no_other(kind, where, tmp_path):
    case = Case("llama", kind, Setting(steps=STEPS))
    plain = zoo.make("llama").to("cuda")
    want = steps_with_one_lost("", plain, build_optimizer(case.setting, dict(plain.named_parameters()), is_fused=True))
    model = zoo.make("llama")
    optimizer = build_optimizer(case.setting, dict(model.named_parameters()))
    options = {"device": "cuda", "precision": "fp32", "plan": case.plan(model, optimizer), **case.options(tmp_path)}
    with outcore.prepare(model, optimizer, **options) as (model, optimizer):
        got = steps_with_one_lost(where, model, optimizer)
        weights = {name: tensor.clone() for name, tensor in outcore.named_tensors(model)}
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert all(torch.equal(tensor.cpu(), weights[name].cpu()) for name, tensor in plain.named_parameters())


@pytest.mark.parametrize("kind", ["host", "mixed"])
def test_refused_registrations_change_nothing_but_speed(kind, tmp_path):
    case = Case("llama", kind, Setting(steps=STEPS))
    with simulator.knobs(refuse_registration=100):
        got = streamed_loop("llama", case.setting, make_plan=case.plan, **case.options(tmp_path))
    assert_equal(plain_loop("llama", case.setting), got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscales", [True, False])
def test_a_scaler_makes_a_step_wait_once(kind, unscales, tmp_path):
    case = Case("llama", kind, Setting(steps=STEPS))
    model = zoo.make("llama")
    optimizer = build_optimizer(case.setting, dict(model.named_parameters()))
    plan = case.plan(model, optimizer)
    waits = []
    with outcore.prepare(model, optimizer, device="cuda", precision="fp32", plan=plan, **case.options(tmp_path)) as (
        model,
        optimizer,
    ):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for batch in zoo.batches("llama", steps=STEPS):
            loss = zoo.loss(model, batch)
            before = simulator.num_syncs()
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            waits.append(simulator.num_syncs() - before)
    assert max(waits[1:]) <= 1, f"to learn whether all is finite, but {waits}"
