"""Graphs that are walked twice, in part, in another mode, or not at all."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import outcore

from .rig import BLOCKS, DEVICE, WIDTH, Block, Tower, adamw, agrees, batch, make, prepared, same, tower_on, train

KIND = pytest.mark.parametrize("kind", ["device", "host"])
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])


@agrees(*BLOCKS)
def test_eval_between_forward_and_backward(model, optimizer):
    losses = []
    for step in range(2):
        loss = model.loss(batch(step))
        model.eval()
        losses.append(model.loss(batch(step + 3)).detach())
        loss.backward()
        assert not model.blocks[0].dropout.training
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@KIND
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_comes_first_and_between(kind, mode, tmp_path):
    def drive(model, optimizer):
        seen = []
        for step in range(2):
            with mode():
                seen.append(model(batch(step)).clone())
                model.eval()
                seen.append(model(batch(step)).clone())
                model.train()
            loss = model.loss(batch(step))
            with mode():
                seen.append(model(batch(step)).clone())
            loss.backward()
            with mode():
                seen.append(model(batch(step)).clone())
            optimizer.step()
            with mode():
                seen.append(model(batch(step)).clone())
            optimizer.zero_grad()
        return seen

    same(drive, kind, tmp_path)


class EnablesGrad(Block):
    @torch.enable_grad()
    def forward(self, x):
        return x if x.requires_grad else super().forward(x)


def test_a_graph_that_enable_grad_makes_inside_no_grad(tmp_path):
    def drive(model, optimizer):
        x = torch.ones(2, WIDTH, device=DEVICE)
        leaf = torch.ones(2, WIDTH, device=DEVICE, requires_grad=True)
        given = leaf * 2
        with torch.no_grad():
            assert model.blocks[0](given) is given
            x = model.blocks[0](x)
        given.sum().backward()  # an argument that a unit returns has no weights in its graph
        x.sum().backward()
        return leaf.grad, [p.grad.clone() for p in model.blocks[0].parameters() if p.grad is not None]

    same(drive, "device", tmp_path, build=lambda: Tower(EnablesGrad))
    model = make(lambda: Tower(EnablesGrad))
    with prepared(model, adamw(model), "host", tmp_path) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.0'.* enable_grad\(\) inside of no_grad\(\)"):
            drive(model, optimizer)


@agrees(*BLOCKS)
def test_graphs_without_backward(model, optimizer):
    model.loss(batch(1))
    kept = model.loss(batch(2))
    losses = train(model, optimizer)
    return [*losses, kept.detach()]


@agrees(*BLOCKS)
def test_one_backward_through_two_forwards(model, optimizer):
    (model.loss(batch(1)) + 0.5 * model.loss(batch(2))).backward()
    optimizer.step()


@agrees(*BLOCKS)
def test_retained_graph(model, optimizer):
    loss = model.loss(batch())
    loss.backward(retain_graph=True)
    (loss * 0.3).backward(retain_graph=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm


@KIND
@POLICY
def test_second_backward_without_retaining_is_refused(kind, policy, tmp_path):
    with tower_on(kind, tmp_path, policy=policy) as (model, optimizer):
        loss = model.loss(batch())
        loss.backward()
        with pytest.raises(RuntimeError, match="second time|it is the second"):
            loss.backward()
        optimizer.zero_grad()
        train(model, optimizer)


@KIND
@POLICY
def test_backward_after_the_step_is_refused(kind, policy, tmp_path):
    # The plain loop raises, too: the graph needs weights that are gone.
    with tower_on(kind, tmp_path, policy=policy) as (model, optimizer):
        stale = model.loss(batch(1))
        train(model, optimizer, steps=1)
        with pytest.raises(
            (outcore.UnsupportedError, RuntimeError), match=r"they have changed since|modified by an inplace operation"
        ):
            stale.backward()
    with tower_on(kind, tmp_path, policy=policy) as (model, optimizer):
        inside = model.blocks[0](model.blocks[1](torch.randn(2, 13)))
        train(model, optimizer, steps=1)
        with pytest.raises(outcore.UnsupportedError, match="unit 'blocks.0'.*they have changed since"):
            inside.sum().backward()


@KIND
@POLICY
def test_double_backward_is_refused(kind, policy, tmp_path):
    with tower_on(kind, tmp_path, policy=policy) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match="create_graph=True"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.loss(batch()).backward(create_graph=True)
        x = torch.randn(2, 13, requires_grad=True)
        with pytest.raises(outcore.UnsupportedError, match="create_graph=True"):
            torch.autograd.grad(model.blocks[0](x).sum(), x, create_graph=True)
        with pytest.raises(outcore.UnsupportedError, match="create_graph=True"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.head(x).sum().backward(create_graph=True)
        model.zero_grad()
        train(model, optimizer)


@agrees(*BLOCKS)
def test_gradients_of_inputs_and_parameters_alone(model, optimizer):
    x = torch.randn(2, 5, 13, requires_grad=True)

    def run():
        y = x
        for block in model.blocks:
            y = block(y)
        return functional.mse_loss(model.head(y), torch.ones(2, 5, 31))

    seen = [
        torch.autograd.grad(run(), x),
        torch.autograd.grad(run(), list(model.blocks[1].parameters())[1:], allow_unused=True),
    ]
    some = [model.head.weight, model.blocks[0].up.weight, model.blocks[2].norm.bias]
    seen.append(torch.autograd.grad(run(), some))
    seen.append(torch.autograd.grad(run(), [x, model.embed.weight], allow_unused=True))
    assert [p.grad for p in model.parameters() if p.grad is not None] == []
    assert x.grad is None
    run().backward(inputs=[model.blocks[1].down.weight, model.head.bias, x])
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["blocks.1.down.weight", "head.bias"]
    seen.append(x.grad)
    run().backward(inputs=[model.blocks[1].down.weight])
    optimizer.step()
    model.loss(batch()).backward()
    optimizer.step()
    return seen


@KIND
@POLICY
def test_autograd_functional(kind, policy, tmp_path):
    def drive(model, optimizer):
        model.eval()
        x = torch.randn(2, 13)
        seen = [torch.autograd.functional.jacobian(lambda v: model.blocks[1](v).sum(0), x)]
        seen.append(torch.autograd.functional.vjp(model.blocks[0], x, torch.ones(2, 13)))
        return seen

    same(drive, kind, tmp_path, policy=policy)
    model = make()
    with (
        prepared(model, adamw(model), kind, tmp_path, policy=policy),
        pytest.raises(outcore.UnsupportedError, match="create_graph=True"),
    ):
        torch.autograd.functional.hvp(lambda v: model.blocks[0](v).sum(), torch.randn(2, 13), torch.ones(2, 13))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@KIND
def test_function_transforms_are_refused_in_training(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, _):
        x = torch.randn(4, 2, 13)
        model.eval()
        with torch.no_grad():
            assert torch.allclose(torch.func.vmap(model.blocks[0])(x), model.blocks[0](x), atol=1e-6)
        with pytest.raises(outcore.UnsupportedError, match=r"torch.func transforms"):
            torch.func.vmap(model.blocks[0])(x)
        with pytest.raises(outcore.UnsupportedError, match=r"torch.func transforms"):
            torch.func.grad(lambda v: model.blocks[0](v).sum())(x)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(outcore.UnsupportedError, match="forward-mode AD"):
            model.blocks[0](torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@agrees(*BLOCKS)
def test_functional_call(model, optimizer):
    generator = torch.Generator(DEVICE).manual_seed(3)
    own = {
        n: torch.randn(p.shape, generator=generator, requires_grad=True)
        for n, p in model.named_parameters()
        if "up" in n or "head" in n
    }
    out = torch.func.functional_call(model, own, (batch(),))
    out.square().mean().backward()
    optimizer.step()
    return out, [t.grad for t in own.values()]


@KIND
@POLICY
def test_anomaly_mode(kind, policy, tmp_path):
    def drive(model, optimizer):
        with warnings.catch_warnings(), torch.autograd.detect_anomaly():
            warnings.simplefilter("ignore")
            return train(model, optimizer)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection")
        same(drive, kind, tmp_path, policy=policy)


def storage(tensor):
    return StorageWeakRef(tensor.untyped_storage())


@KIND
@POLICY
def test_a_kept_loss_keeps_no_activations(kind, policy, tmp_path):
    with tower_on(kind, tmp_path, policy=policy) as (model, _):
        made = []
        model.blocks[1].up.register_forward_hook(lambda m, args, out: made.extend([storage(out), storage(args[0])]))
        model.blocks[1].register_forward_hook(lambda m, args, out: made.extend([storage(out), storage(args[0])]))
        losses = [model.loss(batch()) for _ in range(2)]
        losses[0].backward()
        losses[1].backward(retain_graph=True)
        losses[1].backward()
        gc.collect()
        assert len(made) >= 8
        assert [place for place in made if not place.expired()] == []
        assert len(losses) == 2


class Checkpointed(Tower):
    """Checkpoints its blocks itself, in a way that cannot be switched off."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            x = x + self.head.weight.mean(0)  # gets gradients inside and outside of the nested backward
        return checkpoint(self.head, x, use_reentrant=self.use_reentrant)


@KIND
@POLICY
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_own_checkpointing(kind, policy, use_reentrant, tmp_path):
    def drive(model, optimizer):
        return [*train(model, optimizer), model.loss(batch(4)).backward()]

    same(drive, kind, tmp_path, policy=policy, build=lambda: Checkpointed(use_reentrant=use_reentrant))


class Fragile(Block):
    """Fails in its backward when told to."""

    fails = False

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self._maybe_fail)
        return y

    def _maybe_fail(self, grad):
        if self.fails:
            raise ArithmeticError("on purpose")


@agrees(*BLOCKS, build=lambda: Tower(Fragile))
def test_a_failed_backward_leaves_nothing_behind(model, optimizer):
    for again in range(2):
        model.blocks[1].fails = True
        with pytest.raises(ArithmeticError):
            model.loss(batch(again)).backward()
        model.blocks[1].fails = False
        optimizer.zero_grad()
        train(model, optimizer, 1, 3)
    return train(model, optimizer)


@agrees("device", "host")
def test_failed_forward(model, optimizer):
    with pytest.raises(RuntimeError, match="shape"):
        model.blocks[1](torch.randn(3, 5))
    return train(model, optimizer)


@pytest.mark.filterwarnings("ignore")
@agrees(*BLOCKS)
def test_compiled(model, optimizer):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    losses = []
    for step in range(2):
        loss = functional.cross_entropy(compiled(batch(step)).flatten(0, 1), batch(step).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


class Crossing(nn.Module):
    """Uses twice the tensor that all blocks get, like keys and values of one encoder."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        return x + torch.tanh(self.keys(memory)) * self.values(memory)


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Crossing() for _ in range(4))

    def forward(self, memory, *, is_leaf):
        memory = memory if is_leaf else self.first(memory)
        x = torch.zeros_like(memory)
        for block in self.blocks:
            x = block(x, memory)
        return x.square().mean()


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("is_leaf", [False, True], ids=["computed", "leaf"])
def test_what_several_units_get_is_added_use_by_use(policy, is_leaf, tmp_path):
    def drive(model, optimizer):
        seen = []
        for seed in range(2):
            memory = torch.randn(3, 5, WIDTH, generator=torch.Generator(DEVICE).manual_seed(seed))
            memory.requires_grad_(is_leaf)
            loss = model(memory, is_leaf=is_leaf)
            loss.backward(retain_graph=True)
            loss.backward()
            seen += [loss.detach(), memory.grad]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    same(drive, "host", tmp_path, build=Crossed, units=[Crossing], policy=policy)
