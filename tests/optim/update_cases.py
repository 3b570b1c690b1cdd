"""Every rule with every option, and the plain loop that blocked updates are compared with."""

from __future__ import annotations

import torch

from outcore.optim import Lion
from outcore.optim.blocks import numbers_after
from outcore.optim.piece import Piece
from outcore.optim.rules import rule_for

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, weight_decay=0.0, fused=True),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.5, 0.7), maximize=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam decay amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, fused=True),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True, fused=True),
    "adam decoupled": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd decay maximize": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, maximize=True, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.4, maximize=True, fused=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adagrad decay": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.3, maximize=True, fused=True
    ),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "adam plain": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True, fused=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, foreach=True),
    "adagrad foreach": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3, foreach=True
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, weight_decay=0.1),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, maximize=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1),
    "adadelta foreach": lambda p: torch.optim.Adadelta(p, maximize=True, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "adamax foreach": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam foreach": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1, maximize=True, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, betas=(0.9, 0.6), weight_decay=0.1, decoupled_weight_decay=True),
    "radam foreach": lambda p: torch.optim.RAdam(p, lr=1e-2, betas=(0.9, 0.6), weight_decay=0.1, foreach=True),
    "adamw tensors": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(3.3e-3), betas=(torch.tensor(0.9), torch.tensor(0.99)), fused=False
    ),
    "nadam tensors": lambda p: torch.optim.NAdam(p, lr=torch.tensor(3.3e-3), weight_decay=0.1),
    "adamax tensors": lambda p: torch.optim.Adamax(p, lr=torch.tensor(3.3e-3), weight_decay=0.1),
    "lion": lambda p: Lion(p, lr=1e-2, weight_decay=0.1, maximize=True),
}
FUSED = [name for name in OPTIMIZERS if OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))]).defaults.get("fused")]
"""Optimizers whose kernels are torch's fused ones."""


def fused_sgd_is_broken() -> bool:
    """Return whether this torch skips most of a bf16 parameter (pytorch issue 191763)."""
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    return bool((param == 1).any())


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


class PlainLoop:
    """Whole parameters stepped by torch: the reference for everything else."""

    def __init__(self, make, numels, dtype=torch.float32):
        self.params = [torch.nn.Parameter(random(n, i, dtype)) for i, n in enumerate(numels)]
        self.optimizer = make(self.params)
        if dtype == torch.bfloat16 and isinstance(self.optimizer, torch.optim.SGD) and fused_sgd_is_broken():
            for group in self.optimizer.param_groups:
                group["fused"] = False

    def step(self, grads, factors=()):
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.to(param.dtype, copy=True)
            for factor in factors:
                param.grad.mul_(factor)
        self.optimizer.step()

    def tensors(self, names):
        state = self.optimizer.state
        return [p.detach() for p in self.params] + [state[p][name] for p in self.params for name in names]


class Blocked:
    """The same parameters as pieces, with storage of their own."""

    def __init__(self, make, numels, dtype=torch.float32, weights_dtype=None):
        plain = PlainLoop(make, numels, dtype)
        self.groups = make(plain.params).param_groups
        self.rule = rule_for(make(plain.params))
        self.names = self.rule.state_names(self.groups)
        self.targets = [p.detach() for p in plain.params]
        forms = self.rule.states(plain.params[0], self.groups[0])
        self.states = [{name: _begun(form, t) for name, form in forms.items()} for t in self.targets]
        self.dtypes = {"": dtype, **{name: form.dtype or dtype for name, form in forms.items()}}
        self.numbers = {name: form.initial for name, form in forms.items() if form.shape == ()}
        self.weights = [
            torch.full_like(t, torch.nan, dtype=weights_dtype) if weights_dtype else None for t in self.targets
        ]

    def pieces(self, step, grads, **options):
        hyper, numbers = self.rule.hyper(self.groups[0]), self.numbers
        self.numbers = numbers_after(hyper, numbers, self.dtypes, step)
        options["numbers"] = numbers
        rows = zip(self.targets, grads, self.states, self.weights, strict=True)
        return [Piece(target=t, grad=g, states=s, weights=w, step=step, hyper=hyper, **options) for t, g, s, w in rows]

    def tensors(self):
        return self.targets + [state[name] for state in self.states for name in self.names]


def _begun(form, target):
    like = target if form.shape is None else torch.empty(1, dtype=form.dtype)
    return torch.full_like(like, form.initial, dtype=form.dtype)


def assert_same_bits(got, want):
    """Compare so that NaN equals NaN; torch.equal does not."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        bits = torch.int32 if a.dtype == torch.float32 else torch.int16
        assert torch.equal(a.reshape(-1).view(bits), b.reshape(-1).view(bits))
