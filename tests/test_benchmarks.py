"""Every benchmark runs alone at a tiny size and prints JSON: numbers in reports come from commands that still work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
TINY = {
    "cpu_update.py": "--numel 300000 --repeats 2",
    "disk_io.py": "--folder . --nbytes 8MiB --extent 4MiB --repetitions 1",
    "overlap.py": "--blocks 4 --milliseconds 2 --steps 1",
    "step.py": "--turns 1 --steps 1 --layers 2 --hidden 64 --vocabulary 97 --batch-size 1 --seq-len 16 --disk .",
}


def test_every_benchmark_is_run_here():
    runnable = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert runnable == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_tiny_run_prints_json_and_leaves_nothing(name: str, tmp_path: Path):
    command = [sys.executable, str(FOLDER / name), *TINY[name].split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in json.dumps(json.loads(done.stdout)), "a number without its versions is not a number"
    assert list(tmp_path.iterdir()) == []
    if name == "overlap.py":
        assert_no_step_beats_its_floor(json.loads(done.stdout)["results"])


def assert_no_step_beats_its_floor(results: dict[str, dict[str, dict[str, float]]]):
    """However busy the machine is: sleeps only get longer."""
    found = {(window, s): line for window, settings in results.items() for s, line in settings.items()}
    assert len(found) == 2 * 5
    for line in found.values():
        assert line["over_floor"] > 0.97
        assert line["serial_over_floor"] > 1.0
