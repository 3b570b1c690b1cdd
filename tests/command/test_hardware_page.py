"""The page of hardware is today's: its tables are what was kept, and what was kept is what the planner finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def made() -> ModuleType:
    script = Path(__file__).resolve().parents[2] / "docs" / "make_hardware.py"
    spec = importlib.util.spec_from_file_location("make_hardware", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_what_was_found(made: ModuleType):
    assert made.PAGE.read_text() == made.page(made.kept()), "run: python docs/make_hardware.py"


def test_what_was_found_is_of_todays_machines_and_models(made: ModuleType):
    found = made.kept()
    assert [cell.name for cell in made.cells() if found[cell.name]["asked"] != cell.digest] == []
    assert {*found} == {cell.name for cell in made.cells()}


@pytest.mark.parametrize("method", ["full", "LoRA", "QLoRA"])
def test_the_planner_finds_the_same_today(made: ModuleType, method: str):
    cell = made.Cell(made.MACHINES["RTX 3060 (12 GB)"][0], "4B", method)
    kept, today = made.kept()[cell.name], cell.found()
    assert today["tokens_per_s"] == pytest.approx(kept["tokens_per_s"], rel=0.02)
    assert made.LIMITS[today["limit"]] == made.LIMITS[kept["limit"]]
