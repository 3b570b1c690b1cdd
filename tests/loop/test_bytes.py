"""A parameter's bytes on every tier are what docs/explanation/bytes.md says, within a hundredth."""

from __future__ import annotations

import contextlib
import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn

import outcore
from outcore.engine.engine import engine_of
from outcore.optim import Lion

from .rig import DEVICE

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/bytes.md"
WIDTH, WIDE = 512, 2048
FEW, MANY = 2, 5


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def table() -> dict[str, list[list[float]]]:
    """Return, by precision, the least and the most bytes of weight, gradient, master and moments."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.match(r"`(\w+)`( with \[compact masters\])?", cells[0])
        if name and len(cells) == 7:
            numbers = [[float(n) for n in re.findall(r"[\d.]+", cell)] for cell in cells[1:6]]
            rows[name[1] + " compact" * bool(name[2])] = [numbers[i] for i in range(4)]
            assert sum(n[-1] for n in numbers[:4]) == pytest.approx(numbers[4][-1])
    return rows


TABLE = table()


def expected(precision: str, tier: str, moments: float | None = None) -> float:
    """Return bytes per parameter. A master is needed where states are on disk, and with some precisions everywhere."""
    has_compact = precision.endswith(" compact") and tier != "device"
    weight, gradient, master, both = TABLE[precision if has_compact else precision.removesuffix(" compact")]
    return weight[0] + gradient[0] + master[-1 if tier == "disk" else 0] + (both[0] if moments is None else moments)


def test_the_table_has_what_is_measured_here() -> None:
    assert TABLE.keys() == {"bf16", "bf16 compact", "fp16", "fp32", "pure_bf16", "fp64"}
    assert expected("bf16", "host") == 18
    assert expected("bf16 compact", "disk") == pytest.approx(16.01)
    assert [expected("pure_bf16", tier) for tier in ("device", "disk")] == [8, 10]


def on_disk(folder: Path) -> int:
    """Return the bytes of open files in a folder; a run's files there have no name any more."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing is gone
            if str(link.readlink()).startswith(str(folder)):
                found += link.stat().st_blocks * 512
    return found


def measured(
    folder: Path, tier: str, precision: str | None, make: Any, inner: Any = None, width: int = WIDTH, **group: Any
) -> float:
    """Return the bytes per parameter that more blocks add to all that a run takes on this tier."""
    taken = []
    for count in (FEW, MANY):
        model = nn.Sequential(*(Block(inner and inner()) for _ in range(count)))
        optimizer = make([{"params": model.parameters(), **group}])
        _, plan = forced(model, optimizer, tier, precision=precision, units=[Block])
        run = folder / f"{count}"
        run.mkdir()
        budget = outcore.Budget(disk=str(run))
        with outcore.prepare(
            model, optimizer, plan=plan, precision=precision, units=[Block], budget=budget, device="cpu"
        ) as (prepared, _):
            tiers = engine_of(prepared, "measured").opened.tiers
            nbytes = {name: arena.nbytes for name, arena in tiers._arenas.items()}
            nbytes["disk"] = on_disk(run)
            taken.append(nbytes.get(tier, 0))
    return (taken[1] - taken[0]) / ((MANY - FEW) * width**2)


ADAMW = torch.optim.AdamW
CASES: list[Any] = [
    *((precision, ADAMW, {}, None) for precision in ("bf16", "fp16", "fp32", "pure_bf16", "fp64")),
    ("bf16 compact", ADAMW, {}, None),
    ("bf16", ADAMW, {"state_format": "bf16"}, 4),
    ("bf16", ADAMW, {"state_format": "8bit"}, 2.03),
    ("bf16 compact", ADAMW, {"state_format": "8bit"}, 2.03),
    ("fp32", ADAMW, {"state_format": "bf16"}, 4),
    ("pure_bf16", ADAMW, {"state_format": "bf16"}, 4),
    ("pure_bf16", ADAMW, {"state_format": "8bit"}, 2.03),
    ("pure_bf16", ADAMW, {"state_format": "fp32"}, 8),
    ("bf16", partial(torch.optim.SGD, momentum=0.9), {}, 4),
    ("bf16", torch.optim.Adagrad, {}, 4),
    ("bf16", torch.optim.RMSprop, {}, 4),
    ("bf16", Lion, {}, 4),
    ("bf16 compact", Lion, {"state_format": "8bit"}, 1.02),
    ("bf16", torch.optim.Muon, {}, 4),
    ("bf16 compact", torch.optim.Muon, {}, 4),
    ("bf16", torch.optim.Adafactor, {}, 0),
    ("bf16", torch.optim.Adam, {}, None),
]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize(("precision", "make", "group", "moments"), CASES)
def test_a_parameter_takes_what_the_page_says(
    precision: str, make: Any, group: dict[str, Any], moments: float | None, tier: str, tmp_path: Path
) -> None:
    wanted = expected(precision, tier, moments)
    if precision.endswith(" compact"):
        group = {**group, "master_format": "compact"}
    found = measured(tmp_path, tier, precision.removesuffix(" compact"), make, **group)
    assert found == pytest.approx(wanted, rel=0.01)


FROZEN: list[Any] = [
    ("in 8 bits", "Linear8bitLt", {"has_fp16_weights": False}, 0),
    ("in 4 bits", "Linear4bit", {"quant_type": "nf4", "compress_statistics": False}, 0),
    ("in 4 bits", "Linear4bit", {"quant_type": "nf4", "compress_statistics": True}, 1),
]


@pytest.mark.skipif(DEVICE != "cpu", reason="the simulated GPU has no kernels of bitsandbytes")
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize(("row", "layer", "options", "which"), FROZEN)
def test_a_quantised_parameter_takes_what_the_page_says(
    row: str, layer: str, options: dict[str, Any], which: int, tier: str, tmp_path: Path
) -> None:
    kind = getattr(pytest.importorskip("bitsandbytes").nn, layer)
    [line] = [line for line in PAGE.read_text().splitlines() if row in line and line.startswith("|")]
    wanted = [float(n) for n in re.findall(r"[\d.]+", line.strip("|").split("|")[-1])][which]

    made = kind(WIDE, WIDE, bias=False, **options).to("cpu")  # this quantises it
    made.requires_grad_(requires_grad=False)
    found = measured(tmp_path, tier, None, lambda groups: None, lambda: copy.deepcopy(made), WIDE)
    assert found == pytest.approx(wanted, rel=0.01)
