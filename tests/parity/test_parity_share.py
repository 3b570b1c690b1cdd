"""Updates on the device of states from host memory: the bits of the plain loop, for any share of the units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outcore.runtime.staged_updates import StagedUpdates

from .cases import Case, run_checked
from .loops import Setting, assert_equal, plain_loop

STEPS = 4


def case(name: str, kind: str, share: float, *, offset: int = 0, depth: int = 2, **setting: Any) -> Case:
    return Case(name, kind, Setting(steps=STEPS, **setting), share=share, offset=offset, depth=depth)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the units that were updated so."""
    labels: list[str] = []
    submit = StagedUpdates.submit

    def counted(self: StagedUpdates, gradients: Any, changes: Any) -> None:
        labels.append(gradients.unit.label)
        submit(self, gradients, changes)

    monkeypatch.setattr(StagedUpdates, "submit", counted)
    return labels


@pytest.mark.parametrize("share", [1 / 3, 1 / 2, 1.0])
@pytest.mark.parametrize("kind", ["host", "resident"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_equals_the_plain_loop(share: float, kind: str, precision: str, staged: list[str], tmp_path: Path) -> None:
    c = case("gpt2", kind, share, precision=precision, micro_batches=2, groups="two", scheduler="cosine")
    assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
    assert staged


@pytest.mark.parametrize("name", ["patchwork", "lora", "qwen3", "mixtral"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad"])
def test_skipped_frozen_and_shared_parts(name: str, optimizer: str, staged: list[str], tmp_path: Path) -> None:
    c = case(name, "mixed", 1.0, precision="bf16", clipping="always", optimizer=optimizer, offset=11)
    assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
    assert staged


@pytest.mark.parametrize("kind", ["host", "resident", "mixed"])
@pytest.mark.parametrize("faults", [{"permute": 0}, {"permute": 1}, {"delays": {"device_update": 0.002}}], ids=str)
def test_timing_never_shows(kind: str, faults: dict[str, Any], tmp_path: Path) -> None:
    c = case("patchwork", kind, 0.5, precision="bf16", micro_batches=3)
    assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True, **faults))


@pytest.mark.parametrize("kind", ["host", "resident"])
def test_looking_on_changes_nothing(kind: str, tmp_path: Path) -> None:
    c = case("patchwork", kind, 1.0, clipping="on")
    assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, is_nosy=True, poison=True))


def test_with_one_slot(tmp_path: Path) -> None:
    c = Case("llama", "host", Setting(precision="bf16", steps=STEPS), share=1.0, is_minimal=True, depth=0)
    assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
