"""The benchmark runs, and reports its measurements."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nursery
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "disk_io.py"


@pytest.mark.skipif(not BENCHMARK.exists(), reason="the benchmarks are not installed")
def test_the_benchmark_reports_both_directions(tmp_path):
    options = ["--folder", str(tmp_path), "--nbytes", "9MiB", "--extent", "4MiB", "--repetitions", "3"]
    environment = {**os.environ, "PATH": ""}  # without fio
    output = nursery.run(
        [sys.executable, str(BENCHMARK), *options], env=environment, check=True, capture_output=True, text=True
    ).stdout
    report = json.loads(output)
    assert report["nbytes"] == 8 * 2**20
    for verb in ("read", "write"):
        rates = report[verb]["store_bytes_per_s"]
        assert rates["repetitions"] == 3
        assert 0 < rates["min"] <= rates["median"] <= rates["max"]
        assert "apt-get install fio" in report[verb]["fio"]
    assert list(tmp_path.iterdir()) == []
