"""Timing never shows: parity with late lanes, permuted lanes and poisoned frees, and no unordered access anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import Case, run_checked
from .loops import Setting, assert_equal, plain_loop

STEPS = 4  # the patchwork has skipped and moved its blocks by then
CASES = [
    Case("patchwork", "mixed", Setting(micro_batches=3, steps=STEPS), policy="mixed", depth=2),
    Case("patchwork", "disk", Setting(precision="bf16", clipping="always", steps=STEPS), depth=1),
    Case("gpt2", "mixed", Setting(precision="bf16", micro_batches=3, steps=STEPS), policy="mixed", offset=4),
    Case("llama", "disk", Setting(clipping="off", steps=STEPS), policy="keep", depth=2),
    Case("qwen3", "host", Setting(precision="bf16", groups="two", steps=STEPS), depth=2),
    Case("mixtral", "mixed", Setting(precision="pure_bf16", steps=STEPS), offset=9, depth=0),
    Case("lora", "mixed", Setting(precision="bf16", micro_batches=3, steps=STEPS), offset=13),
    Case("gpt2", "resident", Setting(precision="bf16", clipping="always", steps=STEPS), policy="mixed"),
    Case("llama", "device", Setting(optimizer="sgd", steps=STEPS), policy="mixed"),
]
LANES = ("compute", "h2d", "d2h", "weights_read", "states_read", "disk_write", "update")
LATE_S = 0.002

each_case = pytest.mark.parametrize("case", CASES, ids=str)
two_cases = pytest.mark.parametrize("case", CASES[:2], ids=str)


@each_case
def test_nothing_is_unordered(case: Case, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path))


@two_cases
@pytest.mark.parametrize("lane", LANES)
def test_one_late_lane(case: Case, lane: str, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, delays={lane: LATE_S}, poison=True))


@each_case
def test_all_lanes_late(case: Case, tmp_path: Path) -> None:
    late = dict.fromkeys(LANES, LATE_S)
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, delays=late, seed=7, poison=True))


@each_case
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_permuted_completion(case: Case, seed: int, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, permute=seed, poison=seed > 0))


@each_case
def test_poisoned_frees(case: Case, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, poison=True))


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_looking_on_changes_nothing(case: Case, tmp_path: Path) -> None:
    # Evaluation between backward and step, gradients changed after the step, states read while updates run.
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, is_nosy=True, poison=True))
