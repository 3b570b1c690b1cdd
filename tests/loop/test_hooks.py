"""Hooks on parameters and modules."""

from __future__ import annotations

import pytest
import torch

import outcore

from .rig import BLOCKS, DEVICE, WIDTH, Block, Tower, adamw, agrees, batch, make, prepared, same, train

KIND = pytest.mark.parametrize("kind", ["device", "host"])
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])
NAMES = ("blocks.1.up.weight", "blocks.0.norm.bias", "head.weight")


@KIND
@POLICY
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_hooks_on_parameters(kind, policy, when, tmp_path):
    seen = []

    def register(model):
        return [
            model.get_parameter(n).register_hook(lambda g: seen.append(g.clone()) or g.clamp(-1e-3, 1e-3))
            for n in NAMES
        ]

    def optimizer(model):
        if when == "before":
            register(model)
        return adamw(model)

    def drive(model, optimizer):
        seen.clear()
        handles = register(model) if when == "after" else []
        for step in range(2):
            x = model.embed(batch(step))
            for i in (0, 1, 1, 2):  # called twice, a block still has one gradient, and its hook is called once
                x = model.blocks[i](x)
            torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), batch(step).flatten()).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        return norm, list(seen), train(model, optimizer)

    same(drive, kind, tmp_path, optimizer=optimizer, policy=policy)


@KIND
@pytest.mark.parametrize("name", NAMES)
def test_post_accumulate_hooks_are_refused(kind, name, tmp_path):
    model = make()
    model.get_parameter(name).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        outcore.OutcoreError, match=f"post-accumulate-grad hook.*'{name}'|'{name}'.*post-accumulate-grad hook"
    ):
        outcore.prepare(model, adamw(model))
    model = make()
    called = []
    with prepared(model, adamw(model), kind, tmp_path) as (model, _):
        with pytest.raises(outcore.UnsupportedError, match=f"'{name}'"):
            model.get_parameter(name).register_post_accumulate_grad_hook(called.append)
            model.loss(batch()).backward()
        assert called == []


@agrees(*BLOCKS)
def test_hooks_on_modules(model, optimizer):
    seen = []
    block = model.blocks[1]
    handles = [
        block.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,)),
        block.register_forward_hook(lambda m, args, out: seen.append(out.detach()) or out + 0.5),
        block.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,)),
        block.register_full_backward_hook(
            lambda m, before, after: seen.extend([before[0], after[0]]) or (before[0] * 0.5,)
        ),
        block.up.register_forward_pre_hook(lambda m, args: (args[0] + 0.25,)),
        block.up.register_forward_hook(lambda m, args, out: out * m.weight.mean()),
        block.up.register_full_backward_hook(lambda m, before, after: seen.append(before[0])),
    ]
    losses = train(model, optimizer)
    for handle in handles:
        handle.remove()
    return losses, train(model, optimizer), seen


@KIND
def test_hooks_inside_are_called_again_by_recompute(kind, tmp_path):
    # Activation checkpointing always does so; hooks see the same both times.
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, _):
        seen = []
        model.blocks[1].up.register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
        loss = model.loss(batch())
        assert len(seen) == 1
        loss.backward()
        assert len(seen) == 2
        assert torch.equal(*seen)


@KIND
def test_a_weight_read_by_a_hook_outside_of_the_call(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, _):
        handle = model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] + m.up.weight.sum() * 0,))
        if kind == "device":
            model.loss(batch()).backward()
            return
        with pytest.raises(outcore.AbsentParameterError, match=r"'blocks.1.up.weight' is in"):
            model.loss(batch())
        handle.remove()
        model.loss(batch()).backward()


@agrees(*BLOCKS)
def test_hooks_on_results(model, optimizer):
    x = model.blocks[0](model.embed(batch()))
    x.register_hook(lambda g: g * 3)
    x.retain_grad()
    y = model.blocks[1](x)
    model.head(y).square().mean().backward()
    optimizer.step()
    return x.grad


class HooksArgument(torch.nn.Module):
    """Changes the gradient of its argument, which others use as well."""

    def __init__(self):
        super().__init__()
        self.up, self.hook = torch.nn.Linear(WIDTH, WIDTH), "halves"

    def forward(self, x):
        if x.requires_grad:
            bias = self.up.bias.detach()
            hooks = {"halves": lambda g: g * 0.5, "weight": lambda g: g * bias}
            x.register_hook(hooks[self.hook])
            x.register_hook(lambda g: g * 100).remove()
            handle = x.register_hook(lambda g: g * 10)
            x = torch.tanh(x)
            handle.remove()
        return self.up(x)


class Residual(Tower):
    def __init__(self):
        super().__init__(HooksArgument)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@agrees(*BLOCKS, build=Residual)
def test_a_block_s_hook_on_its_argument_sees_the_whole_gradient(model, optimizer):
    losses = train(model, optimizer)
    x = torch.randn(2, WIDTH, device=DEVICE, requires_grad=True)
    (model.blocks[0](x) + x * x).sum().backward()
    return losses, x.grad


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_hook_on_an_argument_that_holds_a_weight_is_refused(policy, tmp_path):
    model = make(Residual)
    with prepared(model, adamw(model), "host", tmp_path, policy=policy) as (model, _):
        model.blocks[1].hook = "weight"
        with pytest.raises(outcore.UnsupportedError, match=r"unit 'blocks.1'.* hook on an argument .* view of a"):
            model.loss(batch())


class Choosy(Block):
    """Runs one of its two parts, and takes an argument that it ignores."""

    def __init__(self):
        super().__init__()
        self.spare, self.use_spare = torch.nn.Linear(WIDTH, WIDTH), False

    def forward(self, x, other=None):
        return self.spare(x) if self.use_spare else super().forward(x)


@KIND
@POLICY
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_is_not_called_where_its_parameter_took_no_part(kind, policy, when, tmp_path):
    """It is not lost if only one of several calls used the parameter, and it can be removed."""
    seen = []

    def register(model):
        return [b.spare.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2) for b in model.blocks]

    def optimizer(model):
        if when == "before":
            register(model)
        return adamw(model)

    def drive(model, optimizer):
        seen.clear()
        handles = register(model) if when == "after" else []
        for step, spare in enumerate(((), (0,), (0, 1))):
            x = model.embed(batch(step))
            for call in range(2):
                for block in model.blocks:
                    block.use_spare = call in spare
                    x = block(x)
            model.head(x).square().mean().backward()
            seen.append([p.grad is None for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        for block in model.blocks:
            block.use_spare = True
        return list(seen), train(model, optimizer), len(seen)

    same(drive, kind, tmp_path, build=lambda: Tower(Choosy), optimizer=optimizer, policy=policy)


class Shown(torch.autograd.Function):
    """Gets zeros if autograd comes to it without a gradient."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(grad.abs().sum())
        return grad, None


def with_aside(block):
    tower = Tower(block)
    tower.aside = torch.nn.Linear(WIDTH, WIDTH)
    return tower


@KIND
@POLICY
def test_an_argument_that_is_not_used_gets_no_gradient(kind, policy, tmp_path):
    """Autograd does not visit its producers: they would get gradients of zeros, which would be stepped."""

    def drive(model, optimizer):
        seen = []
        other = Shown.apply(model.aside(torch.ones(1, WIDTH, device=DEVICE)), seen)
        other.register_hook(lambda g: seen.append(g.clone()))
        x = model.embed(batch())
        for block in model.blocks:
            x = block(x, other)
        model.head(x).square().mean().backward()
        seen.append([p.grad is None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        return seen

    same(drive, kind, tmp_path, build=lambda: with_aside(Choosy), policy=policy)


class Two(torch.nn.Module):
    """Each result depends on its own argument."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x, other):
        return self.block(x), torch.tanh(other)


@KIND
@POLICY
def test_what_only_an_unused_result_needs_gets_no_gradient(kind, policy, tmp_path):
    """A user's Function before it is not called, as in a plain loop; a later backward of that result calls it."""

    def drive(model, optimizer):
        seen = []
        for step in range(3):
            first = Shown.apply(model.aside(torch.ones(1, WIDTH, device=DEVICE)), seen)
            other = Shown.apply(first * 2, seen)
            x = model.embed(batch())
            for block in model.blocks:
                x, other = block(x, other)
            loss = model.head(x).square().mean()
            loss.backward(retain_graph=True)
            seen.append([p.grad is None for p in model.parameters()])
            if step == 1:
                other.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    same(drive, kind, tmp_path, build=lambda: with_aside(Two), policy=policy)


class Retains(torch.nn.Module):
    """Keeps tensors whose gradients the loop reads: inside, in a list, and its result."""

    def __init__(self):
        super().__init__()
        self.up, self.kept, self.calls, self.bend = torch.nn.Linear(WIDTH, WIDTH), [], {}, 0.5

    def forward(self, x):
        self.inside = self.up(x)
        more = torch.tanh(self.inside)
        more.register_hook(lambda grad: grad * self.bend)
        result = x + more * more
        for tensor in (x, self.inside, more, result):
            tensor.retain_grad()
        self.kept.append(more)
        self.calls["last"] = (self.inside, result)
        return result


@KIND
@POLICY
def test_gradients_that_a_block_retains(kind, policy, tmp_path):
    """A recompute makes other tensors; their gradients are those of the tensors that forward has left."""

    def drive(model, optimizer):
        held = []
        for step in range(2):
            for _ in range(2):  # two forwards before a backward, and a graph that is walked twice
                x = model.embed(batch(step))
                for block in model.blocks:
                    held.append(x)
                    x = block(x)
                    held += x, block.inside, *block.calls["last"]
                loss = model.head(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        held += [tensor for block in model.blocks for tensor in block.kept]
        return [tensor.grad.clone() if tensor.retains_grad and tensor.grad is not None else None for tensor in held]

    same(drive, kind, tmp_path, build=lambda: Tower(Retains), policy=policy, units=[Retains])
