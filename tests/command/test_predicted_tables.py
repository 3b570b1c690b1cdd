"""The hardware page, and the README's table and pictures, are what the planner finds today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).resolve().parents[2] / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made() -> ModuleType:
    return script("make_hardware")


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    return script("make_readme")


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


def test_a_row_is_what_the_planner_finds_today(readme: ModuleType):
    page = readme.README.read_text()
    kept = page[page.index(readme.BEGIN) : page.index(readme.END)].splitlines()[3:]
    assert [line.split(" | ")[:3] for line in kept] == [[f"| {row[0]}", *row[1:3]] for row in readme.ROWS]
    [row] = [i for i, (_, _, method, _) in enumerate(readme.ROWS) if method == "LoRA"]
    tokens = readme.ask(**readme.ROWS[row][3]).tokens_per_s
    assert float(kept[row].split(" | ")[3].replace(",", "")) == pytest.approx(tokens, rel=0.02)


def test_pictures_are_drawn(readme: ModuleType):
    """Of a model that lives on all tiers, so every bar and every row is there."""
    found = readme.ask(model="Qwen/Qwen3-0.6B", host_memory="3GiB", device_memory="6GiB", batch_size=1)
    for draw, words in ((readme.homes, readme.TIER_NAMES.values()), (readme.step, [name for name, _ in readme.LANES])):
        said = {element.text for element in ElementTree.fromstring(draw(found)).iter() if element.text}
        assert {*words} <= said
