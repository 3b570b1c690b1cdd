"""A rule's temporaries on the device stay within the size that it states, which plans count."""

from __future__ import annotations

import pytest
import torch

from outcore.integrations.optimizers import AdafactorOfTransformers
from outcore.optim import Lion
from outcore.optim.rules import rule_for

pytestmark = pytest.mark.gpu
OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True, weight_decay=0.1, maximize=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1, maximize=True),
    "adamax": lambda p: torch.optim.Adamax(p, weight_decay=0.1, maximize=True),
    "nadam": lambda p: torch.optim.NAdam(p, weight_decay=0.1, maximize=True),
    "radam": lambda p: torch.optim.RAdam(p, weight_decay=0.1, betas=(0.9, 0.6), maximize=True),
    "lion": lambda p: Lion(p, maximize=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, maximize=True),
    "adafactor foreach": lambda p: torch.optim.Adafactor(p, maximize=True, foreach=True),
    "adafactor of transformers": AdafactorOfTransformers,
    "muon": torch.optim.Muon,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_temporaries_are_within_what_the_rule_says(name):
    weight, grad = (torch.randn(512, 512, device="cuda") for _ in range(2))
    _ = weight @ grad  # the library of products takes its workspace once, and keeps it
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(weight.clone())])
    hyper = rule_for(optimizer).hyper(optimizer.param_groups[0])
    states = {}
    for state, form in hyper.rule.states((512, 512), hyper.settings).items():
        shape, where = form.shape or (512, 512), "cuda"
        shape, where = ((), "cpu") if form.shape == () else (shape, where)
        states[state] = torch.full(shape, float(form.initial), device=where)
    for step in (1, 2, 20):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            hyper.rule.update(weight, grad, states, step, hyper.settings)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= hyper.rule.temporaries * weight.nbytes
