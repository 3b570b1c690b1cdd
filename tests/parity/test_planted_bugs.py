"""The race checker is not blind: without any one of the waits that the engine relies on, it finds the race.

A wait that can be dropped unnoticed is either not needed or guards bytes that nobody declares; both are bugs.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore.api import prepare_for_test
from outcore.core.errors import OutcoreError, RaceError
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker

from . import zoo
from .cases import Case, run, run_checked
from .loops import Record, Setting, assert_equal, plain_backward, plain_loop

STEPS = 3
SCENARIOS = [
    # These three come first, since some waits are missed by no other.
    Case("llama", "mixed", Setting(steps=STEPS), offset=2),
    Case("llama", "mixed", Setting(steps=STEPS), share=1.0, offset=7),
    Case("patchwork", "resident", Setting(clipping="off", steps=STEPS), policy="keep"),
    Case("patchwork", "mixed", Setting(micro_batches=3, steps=STEPS), policy="mixed", depth=2),
    Case("patchwork", "disk", Setting(micro_batches=3, steps=STEPS), depth=1),
    Case("patchwork", "host", Setting(precision="bf16", steps=STEPS), depth=2),
    Case("patchwork", "device", Setting(precision="bf16", micro_batches=3, steps=STEPS), depth=0),
    Case("patchwork", "mixed", Setting(precision="bf16", micro_batches=3, steps=STEPS), offset=7, depth=1),
    Case("llama", "disk", Setting(precision="bf16", micro_batches=3, steps=STEPS), depth=2),
    Case("patchwork", "mixed", Setting(clipping="off", steps=STEPS), promised=True, early=True, depth=1),
    Case("llama", "host", Setting(clipping="on", steps=STEPS), promised=True, early=True, depth=1),
    Case("patchwork", "host", Setting(precision="bf16", steps=STEPS), share=1.0, depth=1),
    Case("patchwork", "resident", Setting(steps=STEPS), share=0.5, depth=1),
    Case("llama", "host", Setting(clipping="off", steps=STEPS), share=1.0, depth=1, is_minimal=True),
    Case("patchwork", "mixed", Setting(clipping="off", steps=STEPS), offset=4),
    Case("llama", "device", Setting(micro_batches=2, steps=STEPS), policy="keep", activations="host", is_minimal=True),
    Case("llama", "device", Setting(micro_batches=2, steps=STEPS), policy="keep", activations="disk"),
]
LEAST_LABELS = 10


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    """Label -> the scenarios that use it."""
    found: dict[str, list[Case]] = {}
    for case in SCENARIOS:
        for label in run_checked(case, tmp_path_factory.mktemp("labels"), is_nosy=True).labels:
            found.setdefault(label, []).append(case)
    return found


def test_there_are_enough_waits_to_drop(users: dict[str, list[Case]]) -> None:
    assert len(users) >= LEAST_LABELS, sorted(users)


IMPLIED = {"states read"}
"""Of the operations that write states at home each comes after whoever read them in any case: it is on that one's lane
(an update on the host behind an early one), or what it writes was made of what was read (states that pass through the
device, or a slot). Only a user who writes states has to wait, see the last test."""


def test_no_wait_can_be_dropped_unnoticed(users: dict[str, list[Case]], tmp_path: Path) -> None:
    labels = sorted(users.keys() - IMPLIED)
    unnoticed = {label: verdicts for label in labels if (verdicts := _verdicts(label, users[label], tmp_path))}
    assert not unnoticed, "\n".join(f"'{label}': {verdicts}" for label, verdicts in unnoticed.items())


def _verdicts(label: str, cases: list[Case], folder: Path) -> dict[str, str]:
    """What happened instead, by scenario, if no scenario met the race; else nothing."""
    verdicts = {}
    for case, is_nosy in itertools.product(cases, (True, False)):  # looking at states waits for what writes them
        try:
            run_checked(case, folder, is_nosy=is_nosy, skip=frozenset({label}))
        except RaceError:
            return {}
        except OutcoreError as error:
            verdicts[str(case)] = f"{type(error).__name__}: {error}"
        else:
            verdicts[str(case)] = "no race found"
    return verdicts


def test_who_writes_states_waits_for_an_early_update_that_reads_them(tmp_path: Path) -> None:
    case = Case("llama", "host", Setting(clipping="off", steps=STEPS), promised=True, early=True)
    dropped = {"skip": frozenset({"states read"}), "delays": {"update": 0.01}}
    with pytest.raises(RaceError, match="update early"):
        _with_states_written(case, tmp_path, RaceChecker(), **dropped)
    # No result can tell: what the early update makes of a state that is written meanwhile is thrown away.
    assert_equal(plain_loop(case.name, case.setting), _with_states_written(case, tmp_path, None, **dropped))


def _with_states_written(case: Case, folder: Path, checker: RaceChecker | None, **faults: Any) -> Record:
    """Write all states between backward and step, as they are."""
    optimizers: list[Any] = []

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        prepared = prepare_for_test(model, optimizer, faults=Faults(**faults), race_checker=checker, **options)
        optimizers.append(prepared[1])
        return prepared

    def backward(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
        loss = plain_backward(model, batch, micro_batches)
        for state in optimizers[0].state.values():
            if "exp_avg" in state:
                state["exp_avg"].mul_(1.0)
        return loss

    return run(case, folder, prepare=prepare, backward=backward)
