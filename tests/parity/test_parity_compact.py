"""Compact masters: the bits of the plain loop with fp32 masters, wherever weights and states live."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import prepare_for_test

from outcore.core.errors import RaceError
from outcore.optim import blocks
from outcore.optim.compact import HAS_NAN, close_masters
from outcore.spec.layout import CODES

from .cases import Case, run, run_checked
from .loops import Setting, assert_equal, plain_loop
from .zoo import DEVICE

MODEL = "llama" if DEVICE == "cpu" else "qwen3"
PERMUTED, LATE = {"permute": 3, "poison": True}, {"delays": {"update": 0.002, "disk_write": 0.002}, "poison": True}


def _case(kind: str, name: str = MODEL, optimizer: str = "adamw", faults: Any = None, **more: Any) -> Any:
    settings = {f.name for f in dataclasses.fields(Setting)}
    setting = Setting(
        precision="bf16",
        steps=4,
        optimizer=f"{optimizer}:compact",
        **{k: v for k, v in more.items() if k in settings},
    )
    return Case(name, kind, setting, **{k: v for k, v in more.items() if k not in settings}), faults or {}


CASES = [
    _case("device", groups="two"),
    _case("resident", clipping="off", promised=True, early=True),
    _case("host", groups="two", scheduler="cosine", depth=2),
    _case("host", micro_batches=3, clipping="always", faults=PERMUTED),
    _case("host", clipping="off", promised=True, early=True, faults=LATE),
    _case("host", clipping="on", promised=True, early=True, micro_batches=2),
    _case("disk", clipping="on", faults=LATE),
    _case("disk", clipping="off", promised=True, early=True),
    _case("disk", clipping="off", promised=True, early=True, micro_batches=2, faults=PERMUTED),
    _case("disk", clipping="always", is_minimal=True),
    _case("host", share=0.5, clipping="always", is_minimal=True),
    _case("host", share=1.0, clipping="off", faults=PERMUTED),
    _case("mixed", micro_batches=2, depth=2),
    _case("mixed", offset=7, share=0.5, groups="two"),
    _case("mixed", offset=13, promised=True, early=True, clipping="off", faults=PERMUTED),
    _case("mixed", optimizer="dyadic"),
    _case("host", optimizer="dyadic", share=0.5, clipping="off"),
    _case("disk", optimizer="nesterov", offset=4),
    _case("mixed", optimizer="lion", offset=2, share=0.5, micro_batches=2),
    _case("host", optimizer="muon"),
    _case("disk", optimizer="muon", clipping="off", promised=True, early=True),
    _case("host", optimizer="adafactor", share=0.5),
    _case("host", "patchwork"),  # some of its parameters are in fp32, whose masters are as usual
]


def _id(value: Any) -> str:
    return str(value) if isinstance(value, Case) else "-".join(value) or "race checked"


@pytest.mark.parametrize(("case", "faults"), CASES, ids=_id)
def test_a_compact_master_equals_the_plain_loop(case: Case, faults: Any, tmp_path: Path) -> None:
    plain = dataclasses.replace(case.setting, optimizer=case.setting.optimizer.removesuffix(":compact"))
    assert_equal(plain_loop(case.name, plain), run_checked(case, tmp_path, is_nosy=not faults, **faults))


@pytest.mark.parametrize("chosen", ["bf16", "8bit"])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_with_moments_in_fewer_bytes_it_equals_fp32_masters_beside_these(
    kind: str, chosen: str, tmp_path: Path
) -> None:
    compact, _ = _case(kind, "qwen3", optimizer=f"adamw:{chosen}", clipping="off", promised=True, early=kind == "host")
    setting = dataclasses.replace(compact.setting, optimizer=f"adamw:{chosen}")
    want = run_checked(dataclasses.replace(compact, setting=setting), tmp_path / "a")
    assert_equal(want, run_checked(compact, tmp_path / "b"))


def test_the_ties_that_have_a_code_are_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would not show that they come back."""
    seen: list[int] = []

    def close(room: torch.Tensor, weights: torch.Tensor, lower: torch.Tensor, codes: torch.Tensor) -> None:
        close_masters(room, weights, lower, codes)
        seen.append(int((codes < HAS_NAN).sum()))

    monkeypatch.setattr(blocks, "close_masters", close)
    run(_case("host", optimizer="dyadic", clipping="off")[0], tmp_path)
    assert sum(seen) > 10


def test_states_have_the_bytes_that_are_stored(tmp_path: Path) -> None:
    specs: list[dict[str, Any]] = []

    def prepare(model: Any, optimizer: Any, **options: Any) -> Any:
        prepared = prepare_for_test(model, optimizer, **options)
        specs.extend(unit.ledger.state_specs for unit in prepared.optimizer.engine.units)
        return prepared

    run(_case("host")[0], tmp_path, prepare=prepare)
    root, *others = specs
    assert {part.dtype for part in root["master"].parts} == {"float32"}  # its weights live on the device
    assert CODES not in root
    for states in others:
        assert {part.dtype for part in states["master"].parts} == {"int16"}
        assert [p.numel for p in states[CODES].parts] == [-(-p.numel // 128) for p in states["master"].parts]


@pytest.mark.parametrize(
    ("label", "case"),
    [
        ("weights written", _case("disk", clipping="off")[0]),
        ("old weights read", _case("disk", clipping="off")[0]),
        ("old weights read", _case("disk", clipping="off", promised=True, early=True)[0]),
        ("new weights slot free", _case("disk", clipping="off", is_minimal=True)[0]),
    ],
    ids=str,
)
def test_no_wait_can_be_dropped_unnoticed(label: str, case: Case, tmp_path: Path) -> None:
    with pytest.raises(RaceError):
        run_checked(case, tmp_path, skip=frozenset({label}))
