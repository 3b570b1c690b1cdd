"""What lies beneath parameters: in calls and between, in a state dict, gathered, and after a call was cut short."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import outcore
import outcore.engine.module_guard
from outcore.engine.unit.absent import AbsentParameter
from outcore.engine.unit.unit import LEGAL, Beneath, Presence
from outcore.spec.model import ParamSpec

from .rig import KINDS, WIDTH, Block, Tower, agrees, batch, train


class Biased(Tower):
    """The root has a parameter of its own, beside those of its modules."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.bias = nn.Parameter(torch.rand(WIDTH))

    def forward(self, ids):
        x = self.embed(ids) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_prepared(model):
    return outcore.engine.engine.attachment_of(model) is not None


def raise_(*_):
    raise RuntimeError("cut short")


@agrees(*KINDS, build=Biased)
def test_a_state_dict_that_was_cut_short(model, optimizer):
    losses = train(model, optimizer, 1)
    hook = model.blocks[1].norm.register_state_dict_post_hook(raise_)
    with pytest.raises(RuntimeError, match="cut short"):
        model.state_dict()
    hook.remove()
    return losses + train(model, optimizer, 3)


@agrees(*KINDS, "device keep", "host keep", "disk keep")
def test_a_state_dict_between_forward_and_backward(model, optimizer):
    """The graph still ends at the same parameters."""
    losses = []
    for step in range(3):
        loss = model.loss(batch(step))
        losses += [loss.detach(), {name: value.clone() for name, value in model.state_dict().items()}]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


class LooksAtItself(Block):
    """Reads its own parameters in the middle of forward, after it has changed a weight."""

    look = staticmethod(nn.Module.state_dict)

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.up.bias.add_(0.01)
            self.down.bias.data.mul_(0.5)
        return super().forward(y) + sum(float(value.abs().max()) for value in type(self).look(self).values())


class Gathers(LooksAtItself):
    @staticmethod
    def look(block):
        with outcore.gathered(block) if is_prepared(block.tower[0]) else nullcontext():
            return {name: param.detach().clone() for name, param in block.named_parameters()}


def towers(block):
    def build():
        model = Tower(block)
        for each in model.blocks:
            each.tower = [model]
        return model

    return build


INSIDE = [*KINDS, "host keep", "disk keep"]


def forwards(model, optimizer):
    with torch.no_grad():
        return [model.loss(batch(i)) for i in range(3)]


test_a_state_dict_inside_of_a_call = agrees(*INSIDE, build=towers(LooksAtItself))(forwards)
test_gathered_inside_of_a_call = agrees(*INSIDE, build=towers(Gathers))(forwards)


@agrees(*KINDS, build=Biased, depth=3)  # as many slots as units
def test_gathered_while_a_call_is_cut_short(model, optimizer):
    model.eval()
    losses = [model.blocks[0](torch.ones(2, WIDTH)).detach()]
    with outcore.gathered(model.blocks[0]) if is_prepared(model) else nullcontext():
        hook = model.blocks[1].norm.register_forward_pre_hook(raise_)
        with pytest.raises(RuntimeError, match="cut short"):
            model.loss(batch())
        hook.remove()
        with torch.no_grad():
            losses += [block(losses[0]) for block in model.blocks[1:]]  # they take all slots
    with torch.no_grad():
        losses += [model.blocks[0](losses[-1]), model.loss(batch())]
    return losses + train(model, optimizer, 2)


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("was", Beneath)
def test_changes_are_those_of_the_table(was, is_resident):
    spec = ParamSpec(name="w", shape=(3,), dtype="float32", update_dtype="float32", requires_grad=True)
    changes = {
        Beneath.ABSENT: lambda p: p.hide(device=torch.device("cpu")),
        Beneath.AT_HOME if is_resident else Beneath.BOUND: lambda p: p.show([torch.zeros(3)]),
        Beneath.GATHERED: lambda p: p.gather([torch.zeros(3)]),
    }
    for becomes, change in changes.items():
        param = nn.Parameter(torch.ones(3))
        presence = Presence("u", [param], [spec], AbsentParameter, is_resident=is_resident, has_master=False)
        presence.now = was
        if becomes in LEGAL[was]:
            change(presence)
            assert presence.now is becomes
        else:
            sentence = f"unit 'u': expected .* {becomes.value}, but they are {was.value}"
            with pytest.raises(AssertionError, match=sentence):
                change(presence)
            assert presence.now is was
            assert param.tolist() == [1, 1, 1]
