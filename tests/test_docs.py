"""What ``mkdocs build --strict`` does not check: links from and to files beside the site, and facts from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outcore
from outcore.spec.lane_names import Lane

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BESIDE = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")),
    *(page for folder in ("benchmarks", "research", "tests") for page in (ROOT / folder).rglob("reports/*.md")),
]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", BESIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_pages_beside_the_site_lead_to_files_and_headings(page: Path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference.md").read_text()
    errors = re.search(r"members: \[(.*Error)\]", page)[1].split(", ")
    assert {*re.findall(r"^::: outcore\.(\w+)$", page, flags=re.MULTILINE), *errors} == set(outcore.__all__)


@pytest.mark.parametrize("page", ["reference/glossary.md", "internals/lanes.md", "how-to/performance.md"])
def test_every_lane_is_explained(page: str):
    first_cells = re.findall(r"^\|([^|]*)\|", (DOCS / page).read_text(), flags=re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert {lane.value for lane in Lane} <= named


def test_the_tests_that_edges_name_are_there():
    named = set(re.findall(r"::(test_\w+)", (DOCS / "internals" / "edges.md").read_text()))
    written = {n for path in ROOT.glob("tests/**/*.py") for n in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 50
    assert [name for name in named if not any(test.startswith(name) for test in written)] == []
