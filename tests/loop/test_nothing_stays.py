"""Nothing of a step stays alive in reference cycles: results, saved tensors and gradients go without the collector."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput

import outcore
from outcore.engine.activations.saving import CallSaving
from outcore.engine.module.graphs import ForwardCall

from .rig import DEVICE, VOCAB, WIDTH, Block, adamw, batch, make, plan_for


@dataclasses.dataclass
class Pair:
    """A result of a user's own class."""

    x: torch.Tensor
    more: torch.Tensor


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[torch.Tensor, ...]]]] = {
    "tensor": (lambda x, _: x, lambda r: (r, r)),
    "tuple": (lambda *both: both, lambda r: r),
    "dict": (lambda x, more: {"x": x, "more": {"more": [more]}}, lambda r: (r["x"], r["more"]["more"][0])),
    "dataclass": (Pair, lambda r: (r.x, r.more)),
    "ModelOutput": (lambda x, more: BaseModelOutput(x, (more,)), lambda r: (r[0], r.hidden_states[0])),
}
"""How a result is made of two tensors, and how these are found in it."""
PLANS: dict[str, dict[str, Any]] = {
    "device": {"homes": "device"},
    "host": {"homes": "host"},
    "disk": {"homes": "disk"},
    "activations on the host": {"homes": "host", "activations": "host"},
    "activations on disk": {"homes": "disk", "activations": "disk"},
    "updated on the device": {"homes": "host", "share": 1.0},
    "early": {"homes": "host", "early": True, "steps": 1},
    "in pieces": {"homes": "host", "pieces": 3},
}
HOLDERS = (torch.Tensor, ForwardCall, CallSaving)
CASES = [(plan, policy, "ModelOutput") for plan in PLANS for policy in ("keep", "select", "recompute")]
CASES += [("host", policy, form) for form in FORMS for policy in ("keep", "select", "recompute")]
CASES += [("plain", policy, form) for form in FORMS for policy in ("keep", "recompute", "recompute without room")]


class FormBlock(Block):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Any) -> Any:
        x = super().forward(x if isinstance(x, torch.Tensor) else FORMS[self.form][1](x)[0])
        return FORMS[self.form][0](x, x * 2)


class Net(nn.Module):
    """Takes and gives nests of tensors everywhere."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.embed, self.head = form, nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(FormBlock(form) for _ in range(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(sum(FORMS[self.form][1](x)))
        loss = logits.sum() if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return FORMS[self.form][0](loss, logits)


@contextlib.contextmanager
def prepared(plan: str, policy: str, form: str, folder: Path) -> Iterator[Any]:
    model = make(lambda: Net(form))
    optimizer = adamw(model)
    if plan == "plain":
        made, chosen = plan_for(model, optimizer, plan, policy.partition(" ")[0]), {}
        assert made.plain
        made = dataclasses.replace(made, kept_bytes=0) if "without" in policy else made
    else:
        chosen = PLANS[plan]
        made = forced(model, optimizer, policy=policy, **chosen)[1]
    steps, pieces = chosen.get("steps"), chosen.get("pieces", 1)
    options = {"accumulation_steps": steps, "clipping": steps is None, "micro_batches_in_unit": pieces}
    with outcore.prepare(
        model, optimizer, plan=made, budget=outcore.Budget(disk=str(folder)), device=DEVICE, **options
    ) as both:
        yield both


def a_round(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[weakref.ref[torch.Tensor]]:
    """Evaluate, train, and leave a graph that is never walked. Returns references to all results."""
    ids, seen = batch(), []

    def run(*given: torch.Tensor) -> torch.Tensor:
        found = FORMS[model.form][1](model(*given))
        seen.extend(weakref.ref(tensor) for tensor in found)
        return found[0]

    with torch.no_grad():
        run(ids)
    run(ids)
    model.eval()
    with torch.inference_mode():
        run(ids, ids)
    model.train()
    run(ids, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    return seen


def counted() -> collections.Counter[str]:
    """Count what may hold a step's memory: tensors, nodes of graphs, and what calls keep for backward."""
    kinds = (type(thing) for thing in gc.get_objects())
    return collections.Counter(k.__qualname__ for k in kinds if issubclass(k, HOLDERS) or hasattr(k, "next_functions"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("plan", "policy", "form"), dict.fromkeys(CASES))
def test_nothing_stays_alive(plan: str, policy: str, form: str, tmp_path: Path, no_collector: None) -> None:
    with prepared(plan, policy, form, tmp_path) as (model, optimizer):
        gc.collect()
        for _ in range(3):
            assert [reference() for reference in a_round(model, optimizer)] == [None] * 8
        optimizer.engine.device.synchronize()  # an update that runs has gradients
        before = counted()
        gc.collect()
        assert not before - counted()
