"""Tests marked ``gpu`` on a CUDA device made of threads: a process per file, since it must load before torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
import simulator  # noqa: E402

TESTS = FOLDER.parent
GPU_TESTS = sorted([*(TESTS / "gpu").glob("test_*.py"), *FOLDER.glob("*_tests.py")])
PARITY = (
    "test_nothing_is_unordered or test_all_lanes_late or test_skipped_frozen_and_shared_parts and adamw "
    "or TestWindow and bf16"
)
RUNS = {file.stem: ["-m", "gpu", str(file)] for file in GPU_TESTS}
RUNS["test_engine_cuda"] += ["-k", "not test_delays_on_each_lane or early"]  # of three kinds of plans one
# The promise as on CPU lanes, but a device computes and streams wait.
RUNS["parity"] = ["-k", PARITY, str(TESTS / "parity")]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def simulated_gpu() -> Path:
    """The simulator, compiled once: a minute, and nothing later."""
    missing = simulator.why_not()
    if missing is not None and "CI" not in os.environ:
        pytest.skip(missing)
    assert missing is None, missing
    return simulator.build()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.usefixtures("simulated_gpu")
def test_on_the_simulated_gpu(run: str):
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-n0"]
    command = [sys.executable, str(FOLDER / "run.py"), "-m", "pytest", *options, *RUNS[run]]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=FOLDER.parent.parent,
        env=env | {"OMP_NUM_THREADS": "1", "OUTCORE_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
