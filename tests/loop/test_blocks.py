"""What a block may take, return, capture and change."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import outcore

from .rig import BLOCKS, DEVICE, WIDTH, Tower, adamw, agrees, batch, make, prepared, same, tower_on, train

KIND = pytest.mark.parametrize("kind", ["device", "host"])
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])


@dataclasses.dataclass
class Parts:
    x: Any
    extra: Any = None
    name: str = "parts"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    factor: float


class Pair(NamedTuple):
    x: Any
    y: Any


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def core(self, x):
        return x + torch.tanh(self.up(x)) * self.scale


class TakesEverything(Base):
    def forward(self, parts, pair, mapping, *, frozen, size, nothing=None, flag=True):
        assert nothing is None
        assert isinstance(size, torch.Size)
        assert flag
        assert parts.name == "hello"
        x = self.core(parts.x) * frozen.factor + pair.x * mapping["weights"][0]
        same_twice = pair.y
        return collections.OrderedDict(
            parts=Parts(x, extra=[x * 2, None, 3]),
            pair=Pair(x, same_twice),
            untouched=parts.x,
            size=parts.x.shape,
            view=parts.x[:, 1:],
            detached=x.detach(),
            number=4,
            integers=torch.arange(3),
            unused=(x * 100).sum(),
            frozen=Frozen(x.mean(-1), 0.5),
        )


def everything(model):
    def run(ids):
        x = model.embed(ids)
        for block in model.blocks:
            mapping = {"weights": (torch.ones(()), "no tensor")}
            out = block(Parts(x, name="hello"), Pair(x, x), mapping, frozen=Frozen(x, 0.9), size=x.shape)
            assert out["untouched"] is x
            assert isinstance(out["size"], torch.Size)
            assert out["pair"].x is out["parts"].x
            assert out["pair"].y is x
            assert (out["number"], out["parts"].extra[1:], out["parts"].name) == (4, [None, 3], "parts")
            x = out["parts"].x + 0.1 * out["parts"].extra[0] + out["untouched"] * 0.1 + 0.01 * out["detached"]
            x = x + functional.pad(out["view"], (0, 0, 1, 0)) + out["frozen"].x.unsqueeze(-1) * out["frozen"].factor
        return functional.cross_entropy(model.head(x).flatten(0, 1), ids.flatten())

    return run


@KIND
@POLICY
def test_arguments_and_results_of_every_kind(kind, policy, tmp_path):
    def drive(model, optimizer):
        losses = []
        for step in range(2):
            loss = everything(model)(batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    # SGD, since it passes rounding on as it is: gradients of a tensor that is used inside and outside of a block are
    # added in another order.
    options = {"policy": policy, "units": [TakesEverything], "rounding": 1e-6 if DEVICE == "cpu" else 4e-6}
    same(
        drive,
        kind,
        tmp_path,
        build=lambda: Tower(TakesEverything),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1),
        **options,
    )


class Box:
    """A type that cannot be looked into."""

    def __init__(self, content):
        self.content = content


class Unboxes(Base):
    def forward(self, x, box=None):
        content = 0 if box is None else box.content
        while isinstance(content, list | dict):
            content = next(iter(content.values() if isinstance(content, dict) else content))
        return self.core(x) + content


class Boxes(Base):
    def forward(self, x):
        return Box({"deep": [self.core(x)]})


@KIND
@POLICY
def test_tensors_hidden_in_objects_are_refused(kind, policy, tmp_path):
    x = torch.randn(2, WIDTH, requires_grad=True)
    model = make(lambda: Tower(Unboxes))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, _):
        for content in (x, x * 2, [x], {"a": [x]}):
            with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1'.*inside a Box.*register_pytree_node"):
                model.blocks[1](x, Box(content))
        model.blocks[1](x, Box(x.detach())).sum().backward()
    model = make(lambda: Tower(Boxes))
    with (
        prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, _),
        pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1'.*inside a Box.*register_pytree_node"),
    ):
        model.blocks[1](x)


class ChangesArgument(Base):
    def forward(self, x, mask, log=None, state=None):
        if x.dim() == 3:
            x.mul_(2)
        if mask is not None:
            mask.fill_(1.0)
        if log is not None:
            log.append(x)
        if state is not None:
            state["seen"] = 1
        return self.core(x)


@KIND
@POLICY
def test_changed_arguments_are_refused(kind, policy, tmp_path):
    model = make(lambda: Tower(ChangesArgument))
    x = torch.randn(2, WIDTH, requires_grad=True)
    with prepared(model, adamw(model), kind, tmp_path, policy=policy, units=[ChangesArgument]) as (model, _):
        for args in (
            (torch.randn(1, 2, WIDTH, requires_grad=True), None),
            (torch.randn(1, 2, WIDTH), None),
            (x * 1, torch.zeros(2)),
            ((x * 1).unsqueeze(0), None),
        ):
            with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.0'.* one of its arguments in place"):
                model.blocks[0](*args)
        for more in ({"log": []}, {"state": {}}):
            with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.0' changed a list, dict or dataclass"):
                model.blocks[0](x, None, **more)
        log = []
        with torch.no_grad():
            model.blocks[0](x, None, log=log)  # no work is done twice here
        assert len(log) == 1


def with_changed_results(model):
    x = model.blocks[0](model.embed(batch()))
    x.mul_(1.5)
    x = model.blocks[1](x)
    x += 1
    return functional.cross_entropy(model.head(x).flatten(0, 1), batch().flatten())


@KIND
def test_results_changed_in_place_outside(kind, tmp_path):
    def drive(model, optimizer):
        loss = with_changed_results(model)
        loss.backward()
        optimizer.step()
        return loss

    same(drive, kind, tmp_path)
    model = make(lambda: Tower(EndsInTanh))
    with prepared(model, adamw(model), kind, tmp_path, policy="keep") as (model, _):
        loss = with_changed_results(model)
        with pytest.raises(outcore.UnsupportedError, match="result of unit 'blocks.1' was changed in place"):
            loss.backward()


class EndsInTanh(Base):
    def forward(self, x):
        return torch.tanh(self.core(x))  # tanh's backward needs its result


class ReturnsViews(Base):
    def forward(self, x):
        y = self.core(x)
        return y, y.view(-1), x.view(-1)


@pytest.mark.pairs
@KIND
@POLICY
@pytest.mark.parametrize("which", [0, 1, 2])
def test_views_changed_in_place_outside_are_refused(kind, policy, which, tmp_path):
    model = make(lambda: Tower(ReturnsViews))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy, units=[ReturnsViews]) as (model, _):
        results = model.blocks[0](torch.randn(2, WIDTH, requires_grad=True) * 1)
        results[which].mul_(2)
        with pytest.raises(
            (outcore.UnsupportedError, RuntimeError),
            match=r"unit 'blocks.0' was changed in place|modified by an inplace",
        ):
            sum(r.sum() for r in results).backward()


@KIND
@POLICY
def test_an_argument_changed_in_place_after_the_call_is_refused(kind, policy, tmp_path):
    with tower_on(kind, tmp_path, policy=policy) as (model, _):
        x = torch.randn(2, 3, WIDTH)
        y = model.blocks[0](x)
        x.add_(1)
        with pytest.raises(
            (outcore.UnsupportedError, RuntimeError), match=r"changed in place|modified by an inplace operation"
        ):
            y.sum().backward()


class TakesInference(Base):
    def forward(self, x, shift, rate, factor=None):
        return self.core(x) * (1 if factor is None else factor) + shift + rate


EVERY_POLICY = pytest.mark.parametrize("policy", ["keep", "select", "recompute"])


@KIND
@EVERY_POLICY
def test_inference_tensors_as_arguments(kind, policy, tmp_path):
    """Autograd refuses to save them, and does not see that they change. What saves none runs, as in a plain loop."""

    def drive(model, optimizer):
        with torch.inference_mode():
            shift, rate = torch.rand(WIDTH), torch.zeros(WIDTH).requires_grad_()
        losses = []
        for step in range(2):
            x = model.embed(batch(step))
            for block in model.blocks:
                x = block(x, shift, rate)
            losses.append(model.head(x).square().mean())
            with torch.inference_mode():
                shift.add_(1)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach() for loss in losses], rate.grad

    same(drive, kind, tmp_path, build=lambda: Tower(TakesInference), policy=policy, units=[TakesInference])


@KIND
@EVERY_POLICY
def test_an_inference_tensor_that_a_block_saves_is_refused_by_torch(kind, policy, tmp_path):
    model = make(lambda: Tower(TakesInference))
    with torch.inference_mode():
        factor = torch.rand(WIDTH)
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, _):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            model.blocks[0](model.embed(batch()), 0, 0, factor)


class Captures(Base):
    outside: Any = None

    def forward(self, x):
        return self.core(x) + (0 if self.outside is None else self.outside)


@KIND
@POLICY
def test_captured_leaf_and_captured_result(kind, policy, tmp_path):
    def drive(model, optimizer):
        leaf = torch.full((WIDTH,), 0.3, requires_grad=True)
        for block in list(model.blocks)[:2]:
            block.outside = leaf
        losses = train(model, optimizer)
        return losses, leaf.grad

    same(drive, kind, tmp_path, build=lambda: Tower(Captures), policy=policy)
    model = make(lambda: Tower(Captures))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, optimizer):
        model.blocks[1].outside = torch.ones(WIDTH, requires_grad=True) * 2
        with pytest.raises(
            outcore.UnsupportedError, match=r"unit 'blocks.1' uses a tensor made outside of it \(MulBackward0\)"
        ):
            model.loss(batch())
        leaf = model.blocks[1].outside = torch.ones(WIDTH, requires_grad=True)
        loss = model.loss(batch())
        with torch.no_grad():
            leaf.mul_(2)
        with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1'.*captured was changed in place"):
            loss.backward()


class UsesShared(Base):
    """One linear layer belongs to all blocks, so its weights are the root's."""

    shared: Any = None

    def forward(self, x):
        return self.core(x) + self.shared[0](x)


def shared_tower():
    tower = Tower(UsesShared)
    shared = nn.Linear(WIDTH, WIDTH)
    tower.shared = shared
    for block in tower.blocks:
        block.shared = [shared]
    return tower


@KIND
@POLICY
def test_parameters_of_the_root_used_inside(kind, policy, tmp_path):
    # With two slots for three blocks a block's slot in backward is not that of its forward.
    same(lambda m, o: train(m, o, 3), kind, tmp_path, build=shared_tower, policy=policy, depth=1)


@KIND
def test_a_hook_on_a_parameter_of_the_root_used_inside_is_called_once(kind, tmp_path):
    def build():
        tower = shared_tower()
        tower.shared.weight.register_hook(lambda g: g * 2)
        return tower

    same(lambda m, o: train(m, o, 3), kind, tmp_path, build=build)


class ReadsNeighbour(Base):
    neighbour: Any = None

    def forward(self, x):
        return self.core(x) if self.neighbour is None else self.core(x) + self.neighbour[0].scale


@KIND
@POLICY
def test_parameters_of_another_unit_used_inside(kind, policy, tmp_path):
    def drive(model, optimizer):
        model.blocks[2].neighbour = [model.blocks[0]]
        return train(model, optimizer)

    if kind == "device":
        same(drive, kind, tmp_path, build=lambda: Tower(ReadsNeighbour), policy=policy)
        return
    model = make(lambda: Tower(ReadsNeighbour))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, optimizer):
        with pytest.raises(outcore.AbsentParameterError, match=r"'blocks.0.scale' is in"):
            drive(model, optimizer)


class Leaks(Base):
    def forward(self, x):
        self.penalty = (self.up(x) * x).square().mean()
        self.plain = x.mean()
        self.within = self.up(x)
        return x + torch.tanh(self.within) * self.scale


@pytest.mark.pairs
@KIND
@POLICY
@pytest.mark.parametrize("name", ["penalty", "plain", "within"])
def test_gradients_through_attributes_are_refused(kind, policy, name, tmp_path):
    model = make(lambda: Tower(Leaks))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, _):
        loss = model.loss(batch())
        with pytest.raises(
            outcore.UnsupportedError, match=r"unit 'blocks.1': expected gradients to come through its results"
        ):
            (loss + getattr(model.blocks[1], name).sum()).backward()


@pytest.mark.pairs
@KIND
@POLICY
@pytest.mark.parametrize("ordinary", [True, False])
def test_gradients_through_attributes_that_pass_no_argument_are_refused(kind, policy, ordinary, tmp_path):
    model = make(lambda: Tower(Leaks))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, _):
        block = model.blocks[1]
        loss = block(torch.rand(2, WIDTH, device=DEVICE, requires_grad=not ordinary)).sum() + block.within.sum()
        with pytest.raises(
            outcore.UnsupportedError, match=r"unit 'blocks.1': expected gradients to come through its results"
        ):
            loss.backward(inputs=None if ordinary else [block.up.bias])


def test_gradients_through_attributes_in_a_plain_plan(tmp_path):
    model = make(lambda: Tower(Leaks))
    with prepared(model, adamw(model), "plain", tmp_path) as (model, _):
        loss = model.loss(batch())  # the first call: what it saves is not known yet
        with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1': expected gradients to come through its"):
            (loss + model.blocks[1].within.sum()).backward()
        model.loss(batch()).backward()


class ReturnsWeight(Base):
    def forward(self, x):
        return self.core(x), self.scale, self.up.weight.t()


@KIND
@POLICY
def test_a_returned_weight(kind, policy, tmp_path):
    def drive(model, optimizer):
        x, scale, weight = model.blocks[0](model.embed(batch()))
        (x.mean() + scale.sum() * 0.1 + weight.square().mean()).backward()
        optimizer.step()

    options = {"policy": policy, "units": [ReturnsWeight]}
    if kind == "device":
        same(drive, kind, tmp_path, build=lambda: Tower(ReturnsWeight), **options)
        return
    model = make(lambda: Tower(ReturnsWeight))
    with prepared(model, adamw(model), kind, tmp_path, **options) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match="unit 'blocks.0' returns one of its weights"):
            drive(model, optimizer)


class WithBuffers(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.slow = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("added", torch.zeros(3))
        self.register_buffer("unused", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.replaced = self.replaced + 1
            self.added += x.detach().mean()
        y = self.slow(self.norm(x.flatten(0, -2))).view_as(x) * self.replaced
        return self.core(y + self.added.sum())


@agrees(*BLOCKS, build=lambda: Tower(WithBuffers))
def test_buffers_change_once(model, optimizer):
    losses = train(model, optimizer)
    loss = model.loss(batch(7))
    model.loss(batch(8))  # changes them again before the recompute
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return losses


@agrees(*BLOCKS)
def test_called_twice_skipped_and_out_of_order(model, optimizer):
    losses = []
    for order in ([0, 1, 1, 2], [2, 0], [1, 2, 1, 0, 1], [0, 1, 2]):
        x = model.embed(batch())
        for i in order:
            x = model.blocks[i](x)
        loss = functional.cross_entropy(model.head(x).flatten(0, 1), batch().flatten())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def partly_frozen():
    tower = Tower()
    tower.embed.requires_grad_(False)
    tower.blocks[0].requires_grad_(False)
    tower.blocks[2].requires_grad_(False)
    return tower


@agrees(*BLOCKS, build=partly_frozen)
def test_frozen_units(model, optimizer):
    losses = train(model, optimizer)
    assert not model.blocks[0](model.embed(batch())).requires_grad
    assert model.blocks[1](model.embed(batch())).requires_grad
    return losses


@agrees(*BLOCKS)
def test_one_block_in_eval_mode(model, optimizer):
    model.blocks[1].eval()
    losses = train(model, optimizer)
    model.blocks[1].dropout.train()
    return [*losses, *train(model, optimizer)]


class Unpredictable(Base):
    count = 0

    def forward(self, x):
        Unpredictable.count += 1  # state that no check sees
        return self.core(x)[: Unpredictable.count]


def test_a_block_that_depends_on_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Unpredictable, "count", 0)
    model = make(lambda: Tower(Unpredictable))
    with prepared(model, adamw(model), "disk", tmp_path) as (model, _):
        y = model.blocks[0](torch.randn(5, WIDTH))
        with pytest.raises(
            outcore.UnsupportedError, match=r"unit 'blocks.0': recompute gave results of shapes \[\(2, 13\)\]"
        ):
            y.sum().backward()


class InPlaceInside(Base):
    wrong = False

    def forward(self, x):
        y = torch.sigmoid(self.up(x))
        if self.wrong:
            y.mul_(2)  # sigmoid's backward needs its result
        return functional.relu_(self.up(y)).neg().add_(x)


@KIND
@POLICY
def test_in_place_inside(kind, policy, tmp_path):
    same(lambda m, o: train(m, o), kind, tmp_path, build=lambda: Tower(InPlaceInside), policy=policy)
    model = make(lambda: Tower(InPlaceInside))
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, _):
        model.blocks[1].wrong = True
        loss = model.loss(batch())
        with pytest.raises(
            (outcore.UnsupportedError, RuntimeError), match=r"changed in place|modified by an inplace operation"
        ):
            loss.backward()
