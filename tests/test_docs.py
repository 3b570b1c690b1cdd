"""Pages that repeat facts from the code agree with the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from outcore.spec.lane_names import Lane

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say():
    made = reference()
    assert made.PAGE.read_text() == made.page(), "run: python docs/make_reference.py"


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", ["reference/glossary.md", "internals/lanes.md", "how-to/performance.md"])
def test_every_lane_is_explained(page: str):
    first_cells = re.findall(r"^\|([^|]*)\|", (DOCS / page).read_text(), flags=re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert {lane.value for lane in Lane} <= named


def test_the_tests_that_edges_name_are_there():
    named = set(re.findall(r"::(test_\w+)", (DOCS / "reference" / "edges.md").read_text()))
    written = {n for path in ROOT.glob("tests/**/*.py") for n in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 50
    assert [name for name in named if not any(test.startswith(name) for test in written)] == []
