"""Gaps between states, states of other sizes, and parameters without elements change nothing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from plans import forced, prepare_for_test
from torch import nn
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.device.race import RaceChecker
from outcore.spec.layout import StateSpec
from outcore.spec.model import StateForm, UnitSpec

from .rig import DEVICE, KINDS, WIDTH, Block, Tower, adamw, assert_same, batch, make, prepared, same, seen, train


@pytest.mark.parametrize("kind", KINDS)
def test_states_with_a_gap(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.core.quantities.ALIAS_BYTES", 4096)
    same(train, kind, tmp_path)


def unequal(spec: UnitSpec, names: Iterable[str], **_: bool) -> dict[str, StateSpec]:
    """Lay out states so that each is a page larger than the one before, and its parts begin further inside."""
    states, start = {}, 0
    for i, name in enumerate(names if spec.trainable else ()):
        parts = tuple(part._replace(offset=part.offset + 512 * i) for part in spec.update_parts)
        forms = tuple(StateForm(name, param.update_dtype) for param in spec.trainable)
        states[name] = StateSpec(name, start, spec.update_bytes + 4096 * i, parts, forms)
        start = states[name].stop
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_unequal_sizes(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.spec.layout.lay_out_states", unequal)
    same(train, kind, tmp_path)


class WithoutElements(nn.Module):
    """All that it trains has no elements."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH, bias=False)
        self.shift = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x):
        return x + self.back(self.there(x)) + self.shift


UNITS = [Block, WithoutElements]


def tower():
    model = Tower()
    model.blocks[1] = WithoutElements()
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def all_that_a_loop_does(model, optimizer):
    found = train(model, optimizer)
    for step in range(2):
        for micro in range(2):
            model.loss(batch(step + micro)).backward()
        found.append(clip_grad_norm_(model.parameters(), 0.1))
        for param in (p for p in model.blocks[1].parameters() if p.requires_grad):
            param.grad.mul_(2).add_(1)
            found += [param.grad.norm(), param.grad.clone()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step))
    optimizer.load_state_dict(optimizer.state_dict())
    return found + train(model, optimizer)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("kind", [*KINDS, "host keep"])
def test_a_unit_whose_trained_parameters_have_no_elements(kind, optimizer, tmp_path):
    same(all_that_a_loop_does, kind, tmp_path, build=tower, optimizer=optimizer, units=UNITS)
    model = make(tower)
    with prepared(model, optimizer(model), kind, tmp_path, units=UNITS) as (model, streamed):
        train(model, streamed)
        outcore.save_checkpoint(model, streamed, tmp_path / "c", step=1, wait=True)
        want = seen(train(model, streamed), model, streamed)
        outcore.load_checkpoint(model, streamed, tmp_path / "c")
        assert_same(want, seen(train(model, streamed), model, streamed))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "homes",
    [
        lambda _: ("host", "host", "host"),
        lambda _: ("host", "disk", "disk"),
        lambda _: ("device", "device", "host"),
        lambda i: ("disk" if i == 2 else "device",) * 3,
    ],
    ids=["staged", "disk", "resident and staged", "it alone"],
)
def test_a_unit_without_elements_under_other_plans(homes, tmp_path):
    model, twin = make(tower), make(tower)
    plain, optimizer = adamw(model, fused=True), adamw(twin)
    torch.manual_seed(5)
    want = seen(all_that_a_loop_does(model, plain), model, plain)
    _, plan = forced(twin, optimizer, homes, units=UNITS, share=1.0)
    options = {"plan": plan, "budget": outcore.Budget(disk=tmp_path), "device": DEVICE, "units": UNITS}
    with prepare_for_test(twin, optimizer, race_checker=RaceChecker(), **options) as (twin, streamed):
        torch.manual_seed(5)
        assert_same(want, seen(all_that_a_loop_does(twin, streamed), twin, streamed))
