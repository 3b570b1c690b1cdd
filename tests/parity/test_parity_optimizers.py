"""Optimizers without a fused kernel: the bits of torch's own step, wherever their states live."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from .cases import Case, run_checked
from .loops import BY_RULE, Setting, assert_equal, plain_loop
from .zoo import DEVICE

MODEL = "patchwork" if DEVICE == "cpu" else "qwen3"
"""The simulated GPU multiplies parameters without dimensions in another precision than others."""
# Each adds something in which rules differ: casts, factors, copies, second homes, slots.
KINDS = {
    "fits": Case(MODEL, "fits", Setting(groups="two", clipping="on")),
    "device": Case(MODEL, "device", Setting(precision="bf16", micro_batches=2)),
    "host": Case(MODEL, "host", Setting(precision="bf16", groups="two", scheduler="cosine")),
    "early": Case(MODEL, "host", Setting(clipping="off", micro_batches=2), promised=True, early=True),
    "lost": Case(MODEL, "disk", Setting(precision="bf16", clipping="on"), promised=True, early=True),
    "share": Case(MODEL, "host", Setting(precision="bf16", clipping="always"), share=0.5, is_minimal=True),
    "mixed": Case(MODEL, "mixed", Setting(precision="pure_bf16", clipping="on"), depth=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", BY_RULE)
def test_an_optimizer_by_rule_equals_its_torch_step(optimizer: str, kind: str, tmp_path: Path) -> None:
    case = KINDS[kind]
    case = dataclasses.replace(case, setting=dataclasses.replace(case.setting, optimizer=optimizer, steps=4))
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("fits", "mixed")])
@pytest.mark.parametrize("optimizer", ["adamw:bf16", "adamw:8bit", "nadam:bf16"])
def test_states_in_fewer_bytes_are_the_same_wherever_they_live(optimizer: str, kind: str, tmp_path: Path) -> None:
    """No plain loop has such states, so other plans are compared with the one that has all on the device and updates at
    once. ``tests/optim/test_formats.py`` compares a step with torch's."""
    case = KINDS[kind]
    setting = dataclasses.replace(case.setting, optimizer=optimizer, steps=3)
    at_once = Case("qwen3", "device", setting)
    got = run_checked(dataclasses.replace(case, name="qwen3", setting=setting), tmp_path / "a")
    assert_equal(run_checked(at_once, tmp_path / "b"), got)
    stored = {t.dtype for states in got.moments.values() for n, t in states.items() if n in ("exp_avg", "exp_avg_sq")}
    assert stored == ({torch.bfloat16} if "bf16" in optimizer else {torch.uint8, torch.float32})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fits"])
@pytest.mark.parametrize("chosen", ["8bit", "bf16", "fp32"])
def test_bf16_weights_without_masters_beside_stored_states(chosen: str, kind: str, tmp_path: Path) -> None:
    """The plain loop steps whole parameters in fp32 and rounds them; gradients are in bf16, also after clipping."""
    case = KINDS[kind]
    changes = {"optimizer": f"adamw:{chosen}", "precision": "pure_bf16", "steps": 3}
    setting = dataclasses.replace(case.setting, **changes)
    assert_equal(
        plain_loop("qwen3", setting), run_checked(dataclasses.replace(case, name="qwen3", setting=setting), tmp_path)
    )
