"""The source archive, the wheel built from it, and ``outcore demo`` in an environment with that wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"src", "examples", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO"}
OTHERS = {".ci", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "constraints.txt", "mkdocs.yml"}
OTHERS |= {"benchmarks", "docs", "research", "tests"}
LARGEST_BYTES = 200_000  # the largest file is old.zip, checkpoints of an earlier version


class Packages(NamedTuple):
    """Both archives, the unpacked source, and the version that is in their names."""

    source: Path
    wheel: Path
    folder: Path
    version: str


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Build the source archive from this folder, and the wheel from the archive alone, without a network."""
    if "CI" not in os.environ:
        pytest.importorskip("hatchling", reason="install the extra test to build packages")
    out = tmp_path_factory.mktemp("packages")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out], cwd=ROOT)
    source = out / f"outcore-{version}.tar.gz"
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    folder = out / f"outcore-{version}"
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out], cwd=folder)
    return Packages(source, out / f"outcore-{version}-py3-none-any.whl", folder, version)


def run(command: list[Any], **options: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_source_archive_has_the_project_and_nothing_else(packages: Packages):
    with tarfile.open(packages.source) as archive:
        members = {PurePosixPath(*PurePosixPath(m.name).parts[1:]): m for m in archive if not m.isdir()}
    top = {path.parts[0] for path in members}
    assert top >= NEEDED
    assert top <= NEEDED | OTHERS, "a file that lies beside the project is in the archive"
    assert [str(path) for path, member in members.items() if member.size > LARGEST_BYTES] == []
    left = {"__pycache__", ".hypothesis", ".venv", ".pytest_cache", "build", "dist"}
    assert [str(path) for path in members if left & set(path.parts)] == []
    data = {path for path in (ROOT / "src").rglob("*") if path.suffix in {".json", ".css", ".html", ".js", ".typed"}}
    assert {path.relative_to(ROOT) for path in data} <= {Path(path) for path in members}


@pytest.mark.timeout(300)
def test_an_environment_with_the_wheel_runs_the_demo(packages: Packages, tmp_path: Path):
    """Libraries come from the environment of the tests, which is searched after the new one."""
    new = packages.folder.with_name("new")
    run([sys.executable, "-m", "venv", new])
    here = new / "bin"
    run([here / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", packages.wheel])
    (installed,) = (new / "lib").glob("python*/site-packages")
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (installed / "libraries.pth").write_text("\n".join(libraries))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": environment}
    package = run([here / "python", "-c", "import outcore; print(outcore.__file__)"], **options)
    assert Path(package.strip()) == installed / "outcore" / "__init__.py"
    assert run([here / "outcore", "--version"], **options) == f"outcore {packages.version}\n"
    said = run([here / "outcore", "demo", "--steps", "1", "--folder", tmp_path, "--device", "cpu"], **options)
    assert "Yes, bit for bit" in said


def test_one_version_is_named_everywhere(packages: Packages):
    (cited,) = re.findall(r"^version: (.+)$", (packages.folder / "CITATION.cff").read_text(), flags=re.MULTILINE)
    newest = re.search(r"^## (\S+)$", (packages.folder / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert cited == newest[1] == packages.version
