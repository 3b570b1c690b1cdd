"""Updates on the device with states from host memory: the bits of the plain loop, for any share of the units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outcore.engine.updates.unit_update import UnitUpdate

from .cases import Case, run_checked
from .loops import Setting, assert_equal, plain_loop


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of units that were updated through staging."""
    labels: list[str] = []
    work = UnitUpdate.staged

    def counted(self: UnitUpdate, *parts: Any) -> Any:
        labels.append(self.unit.label)
        return work(self, *parts)

    monkeypatch.setattr(UnitUpdate, "staged", counted)
    return labels


@pytest.mark.parametrize("kind", ["host", "resident"])
@pytest.mark.parametrize(("precision", "share"), [("fp32", 1 / 3), ("bf16", 1 / 2), ("pure_bf16", 1.0)])
def test_equals_the_plain_loop(kind: str, precision: str, share: float, staged: list[str], tmp_path: Path) -> None:
    setting = Setting(precision=precision, micro_batches=2, groups="two", scheduler="cosine")
    assert_equal(
        plain_loop("gpt2", setting),
        run_checked(Case("gpt2", kind, setting, share=share, depth=2), tmp_path, poison=True),
    )
    assert staged


@pytest.mark.parametrize(
    ("name", "optimizer"), [("patchwork", "adamw"), ("lora", "adagrad"), ("qwen3", "sgd"), ("mixtral", "adamw")]
)
def test_skipped_frozen_and_shared_parts(name: str, optimizer: str, staged: list[str], tmp_path: Path) -> None:
    setting = Setting(precision="bf16", clipping="always", optimizer=optimizer)
    case = Case(name, "mixed", setting, share=1.0, offset=11, depth=2)
    assert_equal(plain_loop(name, setting), run_checked(case, tmp_path, poison=True))
    assert staged


def test_with_one_slot(tmp_path: Path) -> None:
    c = Case("llama", "host", Setting(precision="bf16"), share=1.0, is_minimal=True, depth=0)
    assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
