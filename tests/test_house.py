"""Rules of the house that no linter has: sizes, words, who may open, print or name an accelerator, and honest pages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outcore

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "outcore"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if not path.is_symlink())
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
CODE = sorted(path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))

FILE_LINES, FUNCTION_LINES, CLASS_LINES, README_LINES, PUBLIC_NAMES = 450, 70, 300, 150, 15
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
OPENERS = {"open", "fdopen", "safe_open", "read_text", "write_text", "read_bytes", "write_bytes"}
# memory/ opens files. A plan saves and loads itself; the command line reads what its user names.
MAY_OPEN = ("memory/", "cli/", "spec/plan.py")


def relative(path: Path) -> str:
    return path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), filename=str(path)))


@pytest.mark.parametrize("path", MODULES, ids=relative)
class TestModule:
    def test_sizes(self, path: Path):
        too_long = []
        if (lines := len(path.read_text().splitlines())) > FILE_LINES:
            too_long.append(f"file: {lines} lines, at most {FILE_LINES}")
        limits = {ast.FunctionDef: FUNCTION_LINES, ast.AsyncFunctionDef: FUNCTION_LINES, ast.ClassDef: CLASS_LINES}
        for node in nodes(path):
            if type(node) in limits and (lines := node.end_lineno - node.lineno + 1) > limits[type(node)]:
                too_long.append(f"{node.name}: {lines} lines, at most {limits[type(node)]}")
        assert not too_long

    def test_name_says_what_it_is(self, path: Path):
        assert FORBIDDEN_MODULES.isdisjoint(relative(path).removesuffix(".py").split("/"))

    def test_prints_only_in_cli(self, path: Path):
        if not relative(path).startswith("cli/"):
            prints = [n.lineno for n in nodes(path) if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]
            assert not prints, f"print() on lines {prints}"

    def test_opens_files_only_where_it_may(self, path: Path):
        if not relative(path).startswith(MAY_OPEN):
            opens = [f"line {n.lineno}: {ast.unparse(n)}" for n in nodes(path) if _opens(n)]
            assert not opens

    def test_names_an_accelerator_only_in_device(self, path: Path):
        if not re.fullmatch(r"runtime/(device|cuda)\w*\.py", relative(path)):
            uses = [n.lineno for n in nodes(path) if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.cuda"]
            imports = [n.lineno for n in nodes(path) if isinstance(n, ast.ImportFrom) and n.module == "torch.cuda"]
            assert not uses + imports, f"torch.cuda on lines {uses + imports}"

    def test_core_knows_no_torch(self, path: Path):
        if relative(path).startswith("core/"):
            names = {alias.name for n in nodes(path) if isinstance(n, ast.Import) for alias in n.names}
            names |= {n.module for n in nodes(path) if isinstance(n, ast.ImportFrom)}
            assert "torch" not in {name.split(".")[0] for name in names if name}


def _opens(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    owner, _, called = ast.unparse(node.func).rpartition(".")
    is_constructor = owner.isidentifier() and owner[0].isupper()  # DiskStore.open: memory/ opens, not the caller
    return called in OPENERS and not is_constructor


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_todo_names_an_issue(path: Path):
    todo = "TO" + "DO"
    lines = [
        n for n, line in enumerate(path.read_text().splitlines(), 1) if re.search(rf"\b{todo}\b(?!\(#\d+\))", line)
    ]
    assert not lines, f"{todo} without an issue on lines {lines}"


def test_public_names():
    assert len(outcore.__all__) <= PUBLIC_NAMES
    assert sorted(outcore.__all__) == list(outcore.__all__)
    assert [name for name in outcore.__all__ if not hasattr(outcore, name)] == []
    assert [name for name in outcore.__all__ if not getattr(outcore, name).__doc__] == []


def test_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page: Path):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [t for t in targets if not t.startswith(("http:", "https:")) and not (page.parent / t).exists()]
    assert not broken


def readme_examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)


def test_readme_has_an_example():
    assert readme_examples()


@pytest.mark.parametrize("code", readme_examples())
def test_readme_example_runs(code: str, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
