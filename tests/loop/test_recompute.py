"""State that a block reads and changes besides its arguments: recompute must see the same, and change it only once."""

from __future__ import annotations

import functools
import random
import zlib
from collections import Counter as Tally
from collections import OrderedDict, defaultdict, deque
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import outcore
from outcore.engine.engine import ATTACHMENT
from outcore.engine.recompute.checks import FIRST_CALLS

from .rig import DEVICE, IS_SIMULATED, KINDS, WIDTH, Tower, adamw, batch, make, prepared, same, train

LEGACY: Any = np.random  # numpy's global generator, from which functions of the module draw
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])
NOT_SIMULATED = pytest.mark.skipif(IS_SIMULATED, reason="the simulated GPU knows no sparse tensors")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def core(self, x):
        return x + torch.tanh(self.up(x))


class PythonRandom(Base):
    def forward(self, x):
        scale = random.random() + random.gauss(0, 1)
        rows = random.sample(range(x.shape[0]), x.shape[0])
        return self.core(x[rows] if random.random() < 0.5 else x) * scale


class NumpyRandom(Base):
    def forward(self, x):
        noise = LEGACY.randn(3).sum() + LEGACY.rand()  # an odd number of draws: numpy keeps the next one
        return self.core(x) + float(noise)


class OwnGenerators(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator(DEVICE).manual_seed(3)
        self.more = {"list": [torch.Generator(DEVICE).manual_seed(4)]}
        self.numpy = np.random.default_rng(5)
        self.legacy = np.random.RandomState(6)
        self.python = random.Random(7)
        self.system = random.SystemRandom()  # has no state

    def forward(self, x):
        mask = torch.rand(x.shape, generator=self.generator) < 0.8
        noise = torch.rand(WIDTH, generator=self.more["list"][0])
        rest = self.numpy.random() + self.legacy.randn() + self.python.gauss(0, 1)
        return self.core(x) * mask + noise * rest


class Counter(Base):
    calls = 0  # of the class: the first call adds one to the module

    def forward(self, x):
        self.calls += 1
        self.up.last = f"call {self.calls}"  # a module inside of this one
        return self.core(x) / self.calls


class RunningTensor(Base):
    def __init__(self):
        super().__init__()
        self.mean, self.steps, self.seen = torch.zeros(WIDTH), torch.zeros(()), None

    def forward(self, x):
        self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        self.steps += 1
        self.steps.data.mul_(1.5)
        before, self.seen = self.seen, x.detach()
        return self.core(x - self.mean) / float(self.steps) + (0 if before is None else before.mean())


class DefaultDevice(Base):
    def forward(self, x):
        return self.core(x) * (2.0 if torch.empty(0).is_meta else 0.5)


class Containers(Base):
    def __init__(self):
        super().__init__()
        self.log, self.state, self.window = [], {"calls": 0, "means": []}, deque(maxlen=2)

    def forward(self, x):
        self.log.append(float(x.detach().mean()))
        self.state["calls"] += 1
        self.state["means"].append(x.detach().mean())
        self.window.append(x.detach().std())
        return self.core(x) * len(self.log) + sum(self.window) + self.state["means"][-1] / self.state["calls"]


class MoreContainers(Base):
    def __init__(self):
        super().__init__()
        self.tally, self.sums, self.turns = Tally(a=1), defaultdict(float), {"x": 0.1, "y": 0.3, "z": 0.7}
        self.order, self.sizes, self.bins = OrderedDict(p=2, q=3), {"array": np.zeros(3)}, np.zeros((2, 2))

    def forward(self, x):
        self.tally["a"] += 2
        self.sums["b"] += 0.5
        first = next(iter(self.turns))
        self.turns[first] = self.turns.pop(first)
        self.order.move_to_end(next(iter(self.order)))
        self.sizes["array"][0] += 1
        self.bins += 0.25
        scale = self.turns[first] + self.sums["b"] + self.order[next(iter(self.order))] + self.bins.sum()
        return self.core(x) * float(scale) + self.tally["a"] * float(self.sizes["array"][0])


class SilentBuffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(WIDTH))
        self.register_buffer("large", torch.ones(130, 130))  # too large to copy while it stays as it is
        self.register_buffer("late", None)

    def forward(self, x):
        self.factor.data.mul_(1.25)
        self.large.data.copy_(self.large * 0.75 + x.detach().mean())
        if self.late is None:
            self.late = torch.ones(())
        self.late.data += 1
        return self.core(x * self.factor.clone()) * float(self.large.mean()) + float(self.late)


class Expanded(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("wide", torch.ones(1, WIDTH).expand(3, WIDTH))
        self.register_buffer("large", torch.ones(1, 1, 1).expand(50, 50, 50))
        self.rows, self.windows = torch.ones(3, 1).expand(3, WIDTH), torch.arange(9.0).unfold(0, 4, 1)

    def forward(self, x):
        self.wide[:, :1].data[0] *= 1.25  # one element, which all rows show
        self.rows[:, :1].mul_(0.75)
        return self.core(x * self.wide[0]) * self.rows.mean() * self.large.mean() + self.windows.mean()


class Sparse(Base):
    """Torch does not compare sparse tensors, and overwrites some only in parts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("coo", torch.eye(WIDTH).to_sparse(), persistent=False)
        self.register_buffer("csr", torch.eye(WIDTH).to_sparse_csr(), persistent=False)
        self.csc, self.held = torch.eye(WIDTH).to_sparse_csc(), [torch.eye(WIDTH).to_sparse()]
        self.grows = torch.eye(WIDTH)[:1].to_sparse()
        self.ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    def forward(self, x):
        self.coo._values().data.mul_(1.25)
        self.csr.values().mul_(0.75)
        self.held[0].mul_(1.5)
        self.ragged.values().mul_(1.1)
        self.grows.add_(torch.eye(WIDTH).roll(self.grows._nnz(), 1)[:1].to_sparse())
        rows = self.core(x).flatten(0, 1).t()
        for tensor in (self.coo, self.csr, self.csc, *self.held):
            rows = tensor.clone() @ rows
        return rows.t().view_as(x) * self.ragged.values().mean() + self.grows.to_dense().mean()


BLOCKS = [PythonRandom, NumpyRandom, OwnGenerators, Counter, RunningTensor, Containers, MoreContainers, SilentBuffers]


class All(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(block() for block in BLOCKS)

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def drive(model, optimizer):
    random.seed(1)
    LEGACY.seed(2)
    losses = train(model, optimizer)
    first = model.loss(batch(7))
    second = model.loss(batch(8))  # changes everything again before either recompute
    second.backward()
    first.backward()
    optimizer.step()
    ends = random.random(), random.gauss(0, 1), float(LEGACY.randn()), torch.rand(3)
    return losses, ends, [left_in(module) for module in model.modules()]


def left_in(module):
    drawn = {torch.Generator: lambda g: torch.rand(2, generator=g)}
    drawn |= {np.random.Generator: lambda g: g.random(), np.random.RandomState: lambda g: float(g.randn())}
    drawn |= {random.Random: lambda g: g.gauss(0, 1)}

    def plain(value):
        if type(value) in drawn:
            return drawn[type(value)](value)
        if isinstance(value, list | deque):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return [(k, plain(v)) for k, v in value.items()]
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.copy())
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
            value = value.values().clone() if value.is_nested else value.to_dense()
        return value if isinstance(value, torch.Tensor | int | float | str | None) else None

    ours = {"forward", "zero_grad"} if ATTACHMENT in module.__dict__ else {"forward"}
    names = (n for n in module.__dict__ if not n.startswith("_") and n not in ours)
    return {n: plain(module.__dict__[n]) for n in names}


@pytest.mark.parametrize("kind", KINDS)
@POLICY
def test_the_default_device_is_that_of_the_user(policy, kind, tmp_path):
    """The library's own tensors have explicit devices; recompute, which no default device reaches, has forward's."""

    def drive_with_another(model, optimizer):
        batches = [batch(step) for step in range(2)]
        with torch.device("meta"):
            for ids in batches:
                model.loss(ids).backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                model.state_dict()
        return norm

    def build():
        return Tower(DefaultDevice)

    same(drive_with_another, kind, tmp_path, build=build, policy=policy, units=[DefaultDevice])


@POLICY
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta state")
@pytest.mark.parametrize("block", [*BLOCKS, Expanded, pytest.param(Sparse, marks=NOT_SIMULATED)])
def test_what_a_block_sees_and_changes(block, policy, tmp_path):
    same(drive, "host", tmp_path, build=lambda: Tower(block), policy=policy, units=[block])


@POLICY
@pytest.mark.parametrize("kind", ["device", "disk"])
def test_all_of_it_in_one_block(kind, policy, tmp_path):
    same(drive, kind, tmp_path, build=lambda: Tower(All, 2), policy=policy, units=[All])


def switches():
    """All that torch lets a program choose of its kernels, and what new tensors are."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    products = [getattr(cuda.matmul, f"allow_{n}_reduced_precision_reduction") for n in ("fp16", "bf16")]
    kinds = [getattr(cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")]
    order = cuda.fp16_bf16_reduction_math_sdp_allowed(), torch._C._get_sdp_priority_order()
    precision = [each.fp32_precision for each in (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv)]
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, mkldnn.enabled, mkldnn.deterministic
    rest = torch.get_deterministic_debug_mode(), torch.get_default_dtype(), cuda.preferred_linalg_library()
    return [*products, cuda.matmul.allow_fp16_accumulation, *kinds, *order, *precision, *flags, *rest]


class Switched(Base):
    def forward(self, x):
        return self.core(x) * (1 + zlib.crc32(repr(switches()).encode()) % 97) + torch.tensor(1.0).sin()


@contextmanager
def chosen(choose, value, before):
    choose(value)
    try:
        yield
    finally:
        choose(before)


def attribute(owner, name, value):
    return chosen(functools.partial(setattr, owner, name), value, getattr(owner, name))


CHOICES = {
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "order of attention": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "sums of attention": lambda: chosen(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    "high": lambda: chosen(torch.set_float32_matmul_precision, "high", "highest"),
    "medium": lambda: chosen(torch.set_float32_matmul_precision, "medium", "highest"),
    "tf32": lambda: attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "no tf32 in cuDNN": lambda: attribute(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "everywhere": lambda: attribute(torch.backends, "fp32_precision", "tf32"),
    "bf16 sums": lambda: attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 sums": lambda: attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "deterministic": lambda: chosen(torch.set_deterministic_debug_mode, "warn", "default"),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True),
    "mkldnn": lambda: attribute(torch.backends.mkldnn, "enabled", False),
    "dtype": lambda: chosen(torch.set_default_dtype, torch.float64, torch.float32),
}


@pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled")
@pytest.mark.parametrize("choice", CHOICES)
def test_kernels_that_are_chosen_for_forward_alone(choice, tmp_path):
    """They are chosen in recompute, too, and in backward those of backward."""

    def drive_with(model, optimizer):
        seen = []
        for step in range(2):
            with CHOICES[choice]():
                loss = model.loss(batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += loss.detach(), repr(switches()), torch.get_float32_matmul_precision()
        return seen

    same(drive_with, "host", tmp_path, build=lambda: Tower(Switched), units=[Switched])


class Attends(Base):
    def forward(self, x):
        x = self.core(x).unsqueeze(1)
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)


def test_attention_that_is_chosen_for_forward_alone(tmp_path):
    def drive_with(model, optimizer):
        ids = batch()
        with sdpa_kernel(SDPBackend.MATH):
            loss = model.loss(ids)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    same(drive_with, "host", tmp_path, build=lambda: Tower(Attends), units=[Attends])


class Replaced(Base):
    """A caller replaces its tensors by others that are equal at first."""

    def __init__(self):
        super().__init__()
        self.scale, self.more, self.grows = None, [None], 0.0

    def forward(self, x):
        scale = self.scale if self.more[0] is None else self.more[0]
        scale += self.grows
        return self.core(x) * scale


@pytest.mark.parametrize("place", ["attribute", "list"])
def test_an_attribute_that_is_replaced_by_an_equal_tensor(place, tmp_path):
    def drive(model, optimizer):
        losses = []
        for step in range(FIRST_CALLS + 4):  # no longer compared with forward at the end
            for block in model.blocks:
                block.grows = float(step > FIRST_CALLS)
                new = torch.tensor(1.0 + max(0, step - FIRST_CALLS))
                if place == "attribute":
                    block.scale = new
                else:
                    block.more[0] = new
            losses += train(model, optimizer, 1, seed=step)
        return losses, [(block.scale, block.more[0]) for block in model.blocks]

    same(drive, "host", tmp_path, build=lambda: Tower(Replaced), units=[Replaced])


class Context:
    """Passed from block to block; each sees what the one before did."""

    def __init__(self):
        self.calls, self.log, self.generator = 0, [], torch.Generator(DEVICE).manual_seed(8)


class TakesContext(Base):
    def forward(self, x, context):
        context.calls += 1
        context.log.append(x.shape[0])
        context.last = float(x.detach().mean())
        return self.core(x) * context.calls + torch.rand(WIDTH, generator=context.generator) + len(context.log)


@POLICY
def test_an_object_that_a_block_changes(policy, tmp_path):
    def drive(model, optimizer):
        context = Context()
        for step in range(2):
            x = model.embed(batch(step))
            for block in model.blocks:
                x = block(x, context)
                context.calls += 1
            model.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        context.generator = torch.rand(2, generator=context.generator)
        return vars(context)

    same(drive, "host", tmp_path, build=lambda: Tower(TakesContext), policy=policy, units=[TakesContext])


HIDDEN = {"calls": 0}
SEEN = 2**-20 if DEVICE == "cpu" else 2**-2  # on an accelerator, a difference that may be rounding passes


class HiddenState(Base):
    def forward(self, x):
        HIDDEN["calls"] += 1
        return self.core(x) * (1 + HIDDEN["calls"] * SEEN)


class HiddenOrder(Base):
    def forward(self, x):
        HIDDEN["calls"] += 1
        return self.core(x).roll(HIDDEN["calls"], 0)  # the same numbers in other places


class HiddenNumber(Base):
    def forward(self, x):
        HIDDEN["calls"] += 1
        return self.core(x), HIDDEN["calls"]


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (HiddenState, r"gave another result than forward \(result 0, shape \(3, 7, 13\)\)"),
        (HiddenOrder, r"gave another result than forward \(result 0, shape \(3, 7, 13\)\)"),
        (HiddenNumber, r"gave \[2\] beside its tensors, forward \[1\]"),
    ],
)
def test_state_that_nobody_can_restore_is_refused(block, found, tmp_path, monkeypatch):
    monkeypatch.setitem(HIDDEN, "calls", 0)
    advice = "Move that into a buffer, make the block deterministic, or give this unit the policy keep"
    for policy in ("keep", "recompute"):
        model = make(lambda: Tower(block))
        with prepared(model, adamw(model), "host", tmp_path, policy=policy, units=[block]) as (model, optimizer):
            HIDDEN["calls"] = 0
            result = model.blocks[1](model.embed(batch()))
            loss = (result[0] if isinstance(result, tuple) else result).sum()
            if policy == "keep":
                loss.backward()
                continue
            with pytest.raises(outcore.UnsupportedError, match=rf"unit 'blocks.1': recompute {found}; .*{advice}"):
                loss.backward()
                optimizer.step()  # the first step waits for the accelerator's answer


class LateState(Base):
    starts = 2**20

    def forward(self, x):
        HIDDEN["calls"] += 1
        return self.core(x) * (1 if HIDDEN["calls"] < self.starts else 2.0 ** (HIDDEN["calls"] % 8))


@pytest.mark.parametrize("rows", [3, 4])
def test_checks_come_first_and_with_new_shapes_and_now_and_then(rows, tmp_path, monkeypatch):
    monkeypatch.setitem(HIDDEN, "calls", 0)
    model = make(lambda: Tower(LateState))
    with prepared(model, adamw(model), "host", tmp_path, units=[LateState]) as (model, optimizer):
        block, x = model.blocks[0], torch.randn(3, WIDTH)
        for _ in range(10):
            block(x).sum().backward()
        block.starts = HIDDEN["calls"]
        with pytest.raises(outcore.UnsupportedError, match="another result than forward"):
            for _ in range(64 if rows == 3 else 1):
                block(torch.randn(rows, WIDTH)).sum().backward()
            optimizer.step()  # the first step waits for the accelerator's answer


class Normed(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.inside = False

    def part(self, x):
        self.calls += 1
        return self.norm(x.flatten(0, 1)).view_as(x)

    def forward(self, x):
        y = checkpoint(self.part, x, use_reentrant=False) if self.inside else self.part(x)
        return self.core(y)


@POLICY
@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_checkpoint_of_the_users_own(where, policy, tmp_path):
    def drive(model, optimizer):
        for block in model.blocks:
            block.inside = where == "inside"
        for step in range(2):
            x = model.embed(batch(step))
            for block in model.blocks:
                x = block(x) if where == "inside" else checkpoint(block, x, use_reentrant=False)
            model.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    same(drive, "host", tmp_path, build=lambda: Tower(Normed), policy=policy, units=[Normed])
