"""Timing never shows: parity with late lanes, permuted lanes and poisoned frees, and no unordered access anywhere.

A comment behind a case says what it is for. Together they have every model, tier, precision, policy and depth, one and
more micro-batches, every way of clipping, and three kinds of updates: during forward, on the device, inside backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE

from .cases import Case, run_checked
from .loops import Setting, assert_equal, plain_loop


def case(name: str, kind: str, precision: str = "fp32", *, micro_batches: int = 1, **more: Any) -> Case:
    in_setting = {k: more.pop(k) for k in ("clipping", "groups", "optimizer") if k in more}
    setting = Setting(precision=precision, micro_batches=micro_batches, **in_setting)
    return Case(name, kind, setting, promised=more.get("early", False), **more)


CASES = [
    case("patchwork", "mixed", micro_batches=3, policy="mixed", depth=2),  # blocks are skipped, moved and used twice
    case("patchwork", "disk", "bf16", clipping="always"),
    case("gpt2", "mixed", "bf16", micro_batches=3, policy="mixed", offset=4),
    case("llama", "disk", clipping="off", policy="keep", depth=2),
    case("llama", "disk", "bf16", micro_batches=3, depth=2),  # slots keep the states that they brought to disk
    case("qwen3", "host", "bf16", groups="two", depth=2),  # tied weights
    case("mixtral", "mixed", "pure_bf16", offset=9, depth=0),
    case("lora", "mixed", "bf16", micro_batches=3, offset=13),  # frozen weights
    case("gpt2", "resident", "bf16", clipping="always", policy="mixed"),
    case("llama", "device", optimizer="sgd", policy="mixed"),
    case("patchwork", "host", "bf16", micro_batches=3, share=0.5, depth=2),
    case("patchwork", "resident", "bf16", share=1.0, depth=2),
    case("patchwork", "mixed", "bf16", micro_batches=3, share=0.5, depth=2),
    case("patchwork", "mixed", "bf16", micro_batches=3, clipping="off", early=True, depth=2),
    case("llama", "disk", "bf16", early=True, depth=2),
    case("gpt2", "resident", "bf16", early=True, depth=2),
    case("qwen3", "host", micro_batches=2, early=True, depth=2),
    case("patchwork", "mixed", "bf16", micro_batches=3, policy="keep", activations="mixed", depth=2),
    case("gpt2", "disk", policy="keep", activations="disk", depth=2),  # dropout
    case("mixtral", "host", "bf16", micro_batches=2, policy="keep", activations="host"),
    case("lora", "resident", policy="mixed", activations="disk"),
]
LATE_S = 0.002
LANES = (COMPUTE, *(lane.value for lane in Lane))
STAGING = (Lane.STATES_H2D.value, Lane.DEVICE_UPDATE.value, Lane.STATES_D2H.value)
LATE = [
    *((CASES[i % 2], lane) for i, lane in enumerate(lane for lane in LANES if lane not in STAGING)),
    *((case, lane) for case in CASES if case.share == 1.0 for lane in STAGING),
    *((CASES[-4], lane) for lane in (COMPUTE, "d2h", "h2d", "disk_write", "states_write", "weights_read")),
]


# Each case is disturbed in one way. Attempts that clipping undoes have both: the other cases reach no new branch by it.
@pytest.mark.parametrize("case", [*CASES[1::2], CASES[14]], ids=str)
def test_all_lanes_late(case: Case, tmp_path: Path) -> None:
    late = dict.fromkeys(LANES, LATE_S)
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, delays=late, seed=7, poison=True))


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_permuted_completion(case: Case, tmp_path: Path) -> None:
    seed = CASES.index(case)
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, permute=seed, poison=True))


@pytest.mark.parametrize(("case", "lane"), LATE, ids=str)
def test_one_late_lane(case: Case, lane: str, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, delays={lane: LATE_S}, poison=True))


@pytest.mark.parametrize("case", [*CASES[:2], *CASES[-7:-5], CASES[-4], CASES[-1]], ids=str)
def test_looking_on_changes_nothing(case: Case, tmp_path: Path) -> None:
    # Evaluation between backward and step, gradients changed after the step, states read while updates run.
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, is_nosy=True, poison=True))
