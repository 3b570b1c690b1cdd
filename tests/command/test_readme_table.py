"""The README's table and pictures are what the planner finds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def made() -> ModuleType:
    script = Path(__file__).resolve().parents[2] / "docs" / "make_readme.py"
    spec = importlib.util.spec_from_file_location("make_readme", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_row_is_what_the_planner_finds_today(made: ModuleType):
    page = made.README.read_text()
    kept = page[page.index(made.BEGIN) : page.index(made.END)].splitlines()[3:]
    assert [line.split(" | ")[:3] for line in kept] == [[f"| {row[0]}", *row[1:3]] for row in made.ROWS]
    [row] = [i for i, (_, _, method, _) in enumerate(made.ROWS) if method == "LoRA"]
    tokens = made.ask(**made.ROWS[row][3]).tokens_per_s
    assert float(kept[row].split(" | ")[3].replace(",", "")) == pytest.approx(tokens, rel=0.02)


def test_pictures_are_drawn(made: ModuleType):
    """Of a model that lives on all tiers, so every bar and every row is there."""
    found = made.ask(model="Qwen/Qwen3-0.6B", host_memory="3GiB", device_memory="6GiB", batch_size=1)
    for draw, words in ((made.homes, made.TIER_NAMES.values()), (made.step, [name for name, _ in made.LANES])):
        said = {element.text for element in ElementTree.fromstring(draw(found)).iter() if element.text}
        assert {*words} <= said
