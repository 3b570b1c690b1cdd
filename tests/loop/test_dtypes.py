"""Weights in fp16 under ``GradScaler``, in fp64, and in other dtypes: right, or refused with advice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import utils

import outcore

from .rig import DEVICE, KINDS, adamw, assert_same, batch, make, prepared, same

WHERE = (*KINDS, "host keep", "disk keep")


class Masters:
    """The plain fp16 loop: fp32 masters, gradients added in fp32, and fp16 copies that compute."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in model.parameters() if p.requires_grad]

    def take(self) -> None:
        for param, master in self.pairs:
            if param.grad is not None:
                grad, param.grad = param.grad.float(), None
                master.grad = grad if master.grad is None else master.grad.add_(grad)

    @torch.no_grad()
    def write_back(self) -> None:
        for param, master in self.pairs:
            param.copy_(master)


def drive(model, optimizer, masters=None, steps=5, scale=2.0**14):
    """Take two micro-batches a step. The scale begins high and grows until gradients overflow in fp16."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, growth_interval=2)
    params, seen_here = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad], []
    for i in range(steps):
        for j in range(2):
            loss = model.loss(batch(2 * i + j)) * (100 if i == 0 else 1)
            scaler.scale(loss).backward()
            if masters is not None:
                masters.take()
        scaler.unscale_(optimizer)
        seen_here.append(utils.clip_grad_norm_(params, 0.3))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if masters is not None:
            masters.write_back()
        seen_here += [loss.detach(), scaler.get_scale()]
    return seen_here


@pytest.mark.parametrize("where", WHERE)
def test_fp16_with_a_scaler(where, tmp_path):
    model = make(dtype=torch.float16)
    masters = Masters(model)
    plain = torch.optim.AdamW([m for _, m in masters.pairs], lr=1e-2, weight_decay=0.1, fused=True)
    torch.manual_seed(5)
    want = drive(model, plain, masters)
    scales = want[2::3]
    assert scales[0] < 2.0**14, "the first step was skipped"
    assert max(scales[1:]) > scales[0], "the others were not"
    twin = make(dtype=torch.float16)
    with prepared(twin, adamw(twin), where, tmp_path) as (twin, streamed):
        torch.manual_seed(5)
        assert_same(want, drive(twin, streamed))
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
        assert streamed.plan.precision == "fp16"
        states = streamed.state_dict()["state"].values()
        assert_same([master.detach() for _, master in masters.pairs], [state["master"] for state in states])


def test_fp32_models_may_compute_in_fp16(tmp_path):
    model = make()
    plan_of = {"precision": "fp16"}
    with outcore.prepare(model, adamw(model), budget=outcore.Budget(), device=DEVICE, **plan_of) as (model, optimizer):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        drive(model, optimizer, steps=1)


def in_fp64(model, optimizer):
    losses = []
    for i in range(3):
        loss = model(batch(i)).log_softmax(-1).square().mean()
        loss.backward()
        losses += [loss.detach(), utils.clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("where", WHERE)
def test_fp64(where, tmp_path):
    kind, _, policy = where.partition(" ")
    options = {"policy": policy} if policy else {}
    same(in_fp64, kind, tmp_path, dtype=torch.float64, **options)


def test_fp64_beside_fp32(tmp_path):
    """Each is updated in its own dtype."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, dtype=torch.float64)) for _ in range(3))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x.float())

    def step(model, optimizer):
        x = torch.linspace(-1, 1, 32, dtype=torch.float64, device=DEVICE).view(4, 8)
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(11)
    state = Mixed().state_dict()

    def build():
        model = Mixed().to(DEVICE)
        model.load_state_dict(state)
        return model

    for where in ("device", "host", "disk"):
        models = [build(), build()]
        want = step(models[0], adamw(models[0], fused=True))
        with prepared(models[1], adamw(models[1]), where, tmp_path) as (model, optimizer):
            assert_same(want, step(model, optimizer))
            assert_same(dict(models[0].state_dict()), dict(model.state_dict()))


class Counting(nn.Module):
    """A block with small integers and complex numbers in buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8, dtype=torch.int8))
        self.register_buffer("waves", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x):
        turned = torch.view_as_real(self.linear(x) * self.waves)[..., 0]
        return x + turned * self.table.to(x.dtype) / 8


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # torch's warning, in backward
@pytest.mark.skipif(DEVICE != "cpu", reason="the simulated GPU has no complex numbers")
@pytest.mark.parametrize("where", WHERE)
def test_small_integers_and_complex_numbers_in_buffers(where, tmp_path):
    def step(model, optimizer):
        x = torch.linspace(-1, 1, 32, device=DEVICE).view(4, 8)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    kind, _, policy = where.partition(" ")
    options = {"policy": policy} if policy else {}
    options["dtype"] = None  # the dtype stays
    same(step, kind, tmp_path, build=lambda: nn.Sequential(*(Counting() for _ in range(3))), **options)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (torch.ones(4, dtype=torch.complex64), "keep both parts in a real parameter .torch.view_as_real"),
        (torch.ones(4, dtype=torch.int8), "quantized, or nothing to train: load .* or make it a buffer"),
    ],
)
def test_parameters_that_cannot_be_trained(value, advice):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].scale = nn.Parameter(value, requires_grad=False)
    with pytest.raises(
        outcore.ConfigError, match=f"float32 or bfloat16 or float16 or float64, but '0.scale' .*{advice}"
    ):
        outcore.prepare(model, adamw(model))
