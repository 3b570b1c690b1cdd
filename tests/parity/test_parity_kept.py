"""Slots keep what they brought to disk: it is not read again, unless something else wrote there since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import prepare_for_test
from torch import nn

import outcore
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker

from . import zoo
from .cases import Case
from .loops import Setting

STEPS = 5
ON_DISK = Case("gpt2", "disk", Setting(), depth=1)
Between = Callable[[nn.Module, Any, int], None]


def nothing(*_: Any) -> None:
    pass


class Disturbed:
    """Trains plain and streamed, with a disturbance between backward and step."""

    def __init__(self, case: Case, between: Between) -> None:
        self.case, self.between = case, between

    def __call__(self, tmp_path: Path) -> list[Counter[str]]:
        """Return the number of reads of each step, by operation."""
        plain = zoo.make(self.case.name, "fp32").to(zoo.DEVICE)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        model = zoo.make(self.case.name, "fp32")
        mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {**self.case.options(tmp_path), "plan": self.case.plan(model, mine)}
        faults = Faults(poison=True)
        reads: list[Counter[str]] = [Counter()]
        with prepare_for_test(model, mine, faults=faults, race_checker=RaceChecker(), **options) as (model, mine):
            submit = mine.engine.device.submit

            def logged(lane: Any, name: str, work: Any, **more: Any) -> Any:
                reads[-1][name.rpartition(" ")[0]] += 1
                return submit(lane, name, work, **more)

            mine.engine.device.submit = logged
            for loops in (self.steps(plain, optimizer), self.steps(model, mine)):
                for _ in loops:
                    reads.append(Counter())
            for (name, a), b in zip(outcore.named_tensors(model), plain.parameters(), strict=True):
                assert torch.equal(a.cpu(), b.cpu()), name
        return reads[STEPS:-1]

    def steps(self, model: nn.Module, optimizer: Any) -> Any:
        torch.manual_seed(3)
        for step, batch in enumerate(zoo.batches(self.case.name, steps=STEPS, micro_batches=1)):
            zoo.loss(model, batch).backward()
            self.between(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
            yield


def test_all_but_one_slot_keep_states(tmp_path: Path) -> None:
    reads = Disturbed(ON_DISK, nothing)(tmp_path)
    num_units = reads[0]["read states of"]
    assert num_units >= 3
    assert [step["read states of"] for step in reads[1:]] == [num_units - 2] * (STEPS - 1), "3 slots"
    assert [step["read gradients of"] for step in reads] == [num_units - 2] * STEPS, "2 landing slots"


def test_one_slot_keeps_what_it_has(tmp_path: Path) -> None:
    case = Case("gpt2", "disk", Setting(), depth=0, is_minimal=True)
    reads = Disturbed(case, nothing)(tmp_path)
    assert [step["read states of"] for step in reads[1:]] == [reads[0]["read states of"] - 1] * (STEPS - 1)


def load_weights(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 2:
        model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})


def load_states(model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 2:
        old = optimizer.state_dict()
        state = {k: {n: v * 2 if n == "exp_avg" else v for n, v in s.items()} for k, s in old["state"].items()}
        optimizer.load_state_dict({"state": state, "param_groups": old["param_groups"]})


def edit_gradients(model: nn.Module, optimizer: Any, step: int) -> None:
    for p in model.parameters():
        if step == 2 and p.grad is not None:
            p.grad.clamp_(-1e-3, 1e-3)


def look(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.state_dict()
    for p in model.parameters():
        if p.grad is not None:
            torch.linalg.vector_norm(p.grad, 1)


@pytest.mark.parametrize("between", [load_weights, load_states, edit_gradients, look])
@pytest.mark.parametrize("case", [ON_DISK, Case("gpt2", "mixed", Setting(), offset=3)], ids=str)
def test_what_others_write_counts(case: Case, between: Between, tmp_path: Path) -> None:
    Disturbed(case, between)(tmp_path)
