"""The race checker is not blind: without any one of the waits that the engine relies on, it finds the race.

A wait that can be dropped unnoticed is either not needed or guards bytes that nobody declares; both are bugs.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from outcore.core.errors import OutcoreError, RaceError

from .cases import Case, run_checked
from .loops import Setting

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
"""Whoever reads states at home also writes them afterwards, or runs on the lane that does."""


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
