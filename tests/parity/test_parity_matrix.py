"""Any model, any plan, any precision, any way of training: the bits of the plain loop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import outcore.spec.plan as spec
from outcore.optim import blocks

from .cases import CHOICES, KINDS, POLICIES, PRECISIONS, Case, pairs, pairwise, run_checked
from .loops import Setting, assert_equal, plain_loop

MATRIX = list(pairwise())


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_streamed_training_equals_the_plain_loop(case: Case, tmp_path: Path) -> None:
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path))


@pytest.mark.parametrize("name", ["lora", "mixtral"])
@pytest.mark.parametrize(("policy", "tier"), [*itertools.product(spec.POLICIES, spec.TIERS)])
def test_every_policy_on_every_tier(policy: str, tier: str, name: str, tmp_path: Path) -> None:
    """Adapters and experts, with accumulation, clipping in every step, and changing shapes."""
    case = Case(name, "host", Setting(micro_batches=3, clipping="always"), policy, tier)
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, poison=True))


@pytest.mark.parametrize(("kind", "early"), [("host", True), ("disk", False), ("disk", True), ("mixed", False)])
def test_many_steps(kind: str, *, early: bool, tmp_path: Path) -> None:
    """Slots take turns and keep their bytes at times: the run is longer than any of their cycles."""
    setting = Setting(precision="bf16", micro_batches=2, clipping="off", steps=12)
    case = Case("patchwork", kind, setting, promised=early, early=early, depth=2)
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, poison=True))


@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [("llama", "adamw", "bf16"), ("patchwork", "sgd", "fp32"), ("lora", "adagrad", "pure_bf16")],
)
def test_updates_in_many_blocks(name: str, optimizer: str, precision: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Large parameters have many blocks; here blocks have 64 elements, since all of a small one would fit into one."""
    monkeypatch.setattr("outcore.engine.updates.workers.USUAL_BYTES", 256)
    streamed, real = list[bool](), blocks._stream
    monkeypatch.setattr(blocks, "_stream", lambda *given: streamed.append(real(*given)) or streamed[-1])
    case = Case(name, "mixed", Setting(precision=precision, micro_batches=2, optimizer=optimizer))
    assert_equal(plain_loop(case.name, case.setting), run_checked(case, tmp_path, poison=True, permute=3))
    assert any(streamed)


def test_every_pair_of_choices_is_covered() -> None:
    choices = {"kind": KINDS, "precision": PRECISIONS, "policy": POLICIES, **CHOICES}
    choices.pop("offset")
    want = {
        (a, x, b, y)
        for a, b in itertools.combinations(sorted(choices), 2)
        for x, y in itertools.product(choices[a], choices[b])
    }
    got = set().union(*(pairs(vars(case.setting) | vars(case)) for case in MATRIX))
    assert not want - got
