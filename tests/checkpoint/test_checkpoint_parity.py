"""Saving during training: a checkpoint has the bits of its step, and training's own bits do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.cases import Case, run
from parity.loops import OPTIMIZERS, Record, Setting, assert_equal, plain_loop
from plans import prepare_for_test
from torch import nn

import outcore
from outcore.core.errors import RaceError
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.updates import streamed as early
from outcore.memory.files.weights_file import WeightsDirectory

from . import small

STEPS = 3
OFF, CLIPPED = Setting(clipping="off", steps=STEPS), Setting(clipping="on", micro_batches=2, steps=STEPS)
EARLY = Case("llama", "host", OFF, promised=True, early=True)
EARLY_ON_DISK = Case("llama", "disk", OFF, promised=True, early=True)
SHARE = Case("llama", "host", CLIPPED, share=1.0)
PLAIN = Case("llama", "fits", OFF, policy="keep")
LATE = {
    "delays": {"save": 0.01, "update": 0.002, "states_d2h": 0.002, "disk_write": 0.002},
    "poison": True,
}
PERMUTED = {"permute": 3, "poison": True}
CHECKED: dict[str, Any] = {}
GROUPS = Setting(groups="two", optimizer="nesterov", steps=STEPS)
PATCHES = Setting(precision="bf16", micro_batches=2, optimizer="adagrad", steps=STEPS)
CASES = [
    (EARLY, LATE),
    (EARLY, CHECKED),
    (EARLY_ON_DISK, PERMUTED),
    (SHARE, LATE),
    (PLAIN, LATE),
    (PLAIN, CHECKED),
    (Case("llama", "resident", Setting(precision="bf16", steps=STEPS), promised=True, early=True), PERMUTED),
    (Case("patchwork", "mixed", PATCHES, offset=2), LATE),
    (
        Case("patchwork", "mixed", GROUPS, share=0.5, offset=7),
        CHECKED,
    ),
    (Case("patchwork", "device", Setting(precision="pure_bf16", clipping="off", steps=STEPS)), PERMUTED),
    (Case("llama", "mixed", CLIPPED, offset=7, is_minimal=True), PERMUTED),
]


@pytest.mark.parametrize(("case", "faults"), CASES, ids=str)
def test_saving_at_every_step(case: Case, faults: dict[str, Any], tmp_path: Path):
    want = [plain_loop(case.name, _until(case.setting, step)) for step in range(1, STEPS + 1)]
    checker = None if faults else RaceChecker()
    assert_equal(want[-1], _saving(case, tmp_path, checker, range(STEPS), **faults))
    for step, record in enumerate(want, 1):
        _same_as_saved(record, tmp_path / "checkpoints", step)


HOST = Case("llama", "host", OFF)
DEVICE = Case("llama", "device", OFF)
SGD = Setting(clipping="off", optimizer="sgd", steps=STEPS)


@pytest.mark.parametrize(
    ("label", "case"),
    [
        ("states read", HOST),
        ("states read", Case("llama", "disk", OFF)),
        ("states read", SHARE),
        ("states read", PLAIN),
        ("weights read", Case("llama", "host", SGD)),
        ("next states read", EARLY),
        ("next weights read", Case("llama", "host", SGD, promised=True, early=True)),
        ("weights read", Case("llama", "device", SGD)),
        ("states read", DEVICE),
        ("weights written", HOST),
    ],
    ids=str,
)
def test_no_wait_can_be_dropped_unnoticed(label: str, case: Case, tmp_path: Path, monkeypatch: Any):
    # Without states nothing else waits here: a unit's weights are saved before its states, on one lane.
    monkeypatch.setitem(OPTIMIZERS, "sgd", (torch.optim.SGD, {"lr": 0.05}))
    at = [0] if "next" in label else range(STEPS)  # the next save waits for the one before it
    with pytest.raises(RaceError):
        _saving(case, tmp_path, RaceChecker(), at, skip=frozenset({label}))


@pytest.mark.parametrize("case", [EARLY, EARLY_ON_DISK], ids=str)
def test_an_early_update_that_is_given_up_has_waited_for_nobody(case: Case, tmp_path: Path, monkeypatch: Any):
    """The update that follows writes where a save of two steps before may still read."""
    steps: list[int] = []
    monkeypatch.setattr(early._EarlyAttempt, "settle", lambda attempt: attempt.is_due())
    monkeypatch.setattr(early._EarlyAttempt, "is_due", lambda attempt: vars(attempt).setdefault("due", len(steps) != 2))
    setting = Setting(clipping="off", steps=5)
    case = Case("llama", case.kind, setting, promised=True, early=True)
    got = _saving(case, tmp_path, RaceChecker(), [0], steps)
    assert_equal(plain_loop("llama", setting), got)
    _same_as_saved(plain_loop("llama", _until(setting, 1)), tmp_path / "checkpoints", 1)


def _until(setting: Setting, step: int) -> Setting:
    return Setting(**{**vars(setting), "steps": step})


def _saving(
    case: Case, folder: Path, checker: RaceChecker | None, at: Any, steps: list[int] | None = None, **faults: Any
) -> Record:
    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        return prepare_for_test(model, optimizer, faults=Faults(**faults), race_checker=checker, **options)

    def save(model: nn.Module, optimizer: Any, step: int) -> None:
        if steps is not None:
            steps.append(step)
        if step in at:
            outcore.save_checkpoint(model, optimizer, folder / "checkpoints", step=step + 1)

    return run(case, folder, prepare=prepare, after_step=save)


def _same_as_saved(record: Record, folder: Path, step: int) -> None:
    path, manifest = small.find(folder, step=step)
    weights, saved = WeightsDirectory.open(path), WeightsDirectory.open(path, "optimizer")
    for name, tensor in record.tensors.items():
        if name in weights.names():  # the first of several names
            assert torch.equal(weights.read(name), tensor.cpu()), name
    for name, states in record.moments.items():
        assert manifest.steps[name] == int(states.get("step", manifest.steps[name]))
        for state, value in states.items():
            if state != "step":
                assert torch.equal(saved.read(f"{name}.{state}"), value.cpu()), (name, state)
