"""Which older versions of the libraries work with outcore. The lower bounds in pyproject come from here.

    python research/outside/oldest_versions.py                                  # every set below, an hour on two cores
    python research/outside/oldest_versions.py transformers==5.8.1,trl==1.4.0   # one set
    python research/outside/oldest_versions.py --in FOLDER ...                  # keep the environment for the next

A virtual environment gets each set in turn, with the versions of constraints.txt for all packages that do not depend on
it, and runs the tests below. The last report is reports/oldest_versions_2026-11-22.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDEST = "trl==1.16.0,datasets==4.7.0,accelerate==1.15.0,peft==0.21.0"
SETS = (
    "transformers==5.20.2",
    "transformers==5.16.1",
    "transformers==5.12.1",
    "transformers==5.8.1",
    "transformers==5.6.0",
    f"transformers==5.6.0,{OLDEST}",
)
TESTS = (
    *("tests/integrations", "tests/checkpoint/test_loading.py", "tests/checkpoint/test_export.py"),
    *("tests/ranks/test_trainer.py", "tests/ranks/test_commands.py"),
    *(
        "tests/command/test_train.py",
        "tests/command/test_settings.py",
        "tests/command/test_extra.py",
        "tests/command/test_dpo.py",
    ),
)
OTHERWISE = (
    # these use names that transformers has had since 5.23
    "tests/integrations/test_contract.py::test_activation_checkpointing_is_an_attribute_of_modules",
    "tests/integrations/test_life.py::test_settings[training]",
    "tests/integrations/test_life.py::test_no_second_recomputation",
    # a setting that older versions have, and values that only TRL 1.16 has
    "tests/command/test_settings.py::TestNames::test_unknown_in_a_file[warmup_ratio: 0.1\\n-words4]",
    *(
        f"tests/command/test_settings.py::TestValues::{test}"
        for test in (
            "test_wrong_in_a_file['pad_to_multiple_of: 0\\\\n'-[\"or equal to 1 or 'auto'\"]]",
            "test_wrong_in_a_file['pad_to_multiple_of: x\\\\n'-[\"'auto'\", 'a valid integer']]",
            "test_right['pad_to_multiple_of: auto\\\\n'-'pad_to_multiple_of'-'auto']",
            "test_wrong_in_a_file['loss_type: mse\\\\n'-[\"'nll', 'dft'\"]]",
        )
    ),
)
"""Tests that fail with older versions for a reason that does not matter here."""
FOLLOWS = (
    *("transformers", "trl", "peft", "datasets", "accelerate", "tokenizers", "huggingface_hub", "hf-xet", "torch"),
    *("fsspec", "pyarrow", "dill", "multiprocess"),
)
"""Packages whose versions a set may change; the newest that fits is taken."""


def constraints(versions: list[str], folder: Path) -> Path:
    """Write the repository's constraints without the packages that a set of versions may change. Returns the path."""
    free = {_canonical(name) for name in (*FOLLOWS, *(version.partition("==")[0] for version in versions))}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if _canonical(line.partition("==")[0]) not in free]
    path = folder / "constraints.txt"
    path.write_text("\n".join([*kept, *versions]))
    return path


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run(versions: list[str], folder: Path) -> str:
    """Install versions into a folder's environment and run the tests. Returns a row of the report."""
    python, began = folder / "venv" / "bin" / "python", time.monotonic()
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "-c", constraints(versions, folder)]
    done = subprocess.run([*pip, f"{ROOT}[train,test]", *versions], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"| {', '.join(versions)} | | not installed: {done.stderr.strip().splitlines()[-1]} |"
    listed = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    with_them = ", ".join(line for line in listed.splitlines() if line.partition("==")[0] in FOLLOWS)
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    tests += [part for test in OTHERWISE for part in ("--deselect", test)]
    said = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    failed = [line.partition(" - ")[0] for line in said if line.startswith(("FAILED", "ERROR"))]
    minutes = (time.monotonic() - began) / 60
    return f"| {', '.join(versions)} | {with_them} | {'; '.join([said[-1].strip('= '), *failed])} ({minutes:.0f} min) |"


def main() -> None:
    """Print a table of versions, what was installed with them, and what passed."""
    given = sys.argv[1:]
    print("| versions | installed | outcome |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if given[:1] == ["--in"]:
            folder, given = Path(given[1]), given[2:]
        for versions in given or SETS:
            print(run(versions.split(","), folder), flush=True)


if __name__ == "__main__":
    main()
