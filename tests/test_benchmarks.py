"""Every benchmark runs alone at a tiny size and prints JSON, so the commands behind the reports' numbers still work."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import nursery
import pytest
import torch
from ranks.conftest import launch

from outcore.core.errors import MemoryBudgetError
from outcore.spec.timeline import Span, Timeline

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
LARGE = "--layers 5 --hidden 64 --intermediate 160 --heads 2 --kv-heads 1 --vocabulary 101 --seq-len 16 --device cpu"
TINY = {
    "activation_peak.py": "--only 16384",
    "compact_masters.py": "--numbers 100000",
    "convergence.py": "--steps 1 --seeds 1",
    "cpu_update.py": "--numel 50000 --repeats 2",
    "disk_io.py": "--folder . --nbytes 8MiB --extent 4MiB --repetitions 1",
    "large.py": f"{LARGE} --tokens 16 32 --device-memory 100KiB 520KiB --disk-memory 0 --steps 1 --recorded-steps 1"
    " --against plain",
    "overlap.py": "--blocks 3 --numel 4096 --milliseconds 1 --steps 1",
    "overhead.py": "--turns 1 --steps 1 --layers 2 --device cpu",
    "predict.py": "--cases 1 --blocks 2 --numel 65536 --milliseconds 1 --steps 1 --layers 1 --hidden 64 --lengths 8"
    " --quick --what throttled models limit --seconds 0.2",
    "saving.py": "--folder . --tiers disk --steps 2 --every 2 --turns 1 --numel 4096 --blocks 3 --milliseconds 1",
    "pieces.py": "--pieces 2 --blocks 7 --numel 4096 --milliseconds 1 --steps 1",
    "sums.py": "--disk . --pairs 2 --nbytes 1MiB --steps 1 --layers 1 --hidden 64 --vocabulary 97 --batch-size 1"
    " --seq-len 16",
    "step.py": "--turns 1 --steps 1 --layers 1 --hidden 64 --vocabulary 97 --batch-size 1 --seq-len 16 --disk ."
    " --plans device host disk to_host to_disk --rivals checkpointing save_on_cpu trl_offloading",
}


def test_every_benchmark_is_run_here():
    runnable = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert runnable == set(TINY)


@pytest.mark.parametrize("name", TINY)
def test_tiny_run_prints_json_and_leaves_nothing(name: str, tmp_path: Path):
    command = [sys.executable, str(FOLDER / name), *TINY[name].split()]
    done = nursery.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in json.dumps(json.loads(done.stdout)), "a number without its versions is not a number"
    assert list(tmp_path.iterdir()) == []
    if name == "overlap.py":
        assert_no_step_beats_its_bound(json.loads(done.stdout)["results"])
    if name == "pieces.py":
        found = json.loads(done.stdout)["results"]["2"]
        assert found["in_pieces"]["fetched_bytes"] < found["accumulation"]["fetched_bytes"]
    if name == "predict.py":
        for found in json.loads(done.stdout)["results"]["limit"]["medians_over"].values():
            windows, *counts = found.values()
            assert 1 <= counts[0] <= counts[1] <= counts[2] <= counts[3] <= windows
    if name == "large.py":
        assert_every_case_has_its_numbers(json.loads(done.stdout))
        assert "host memory is pinned" in done.stderr


def test_what_the_best_prediction_can_be_near(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    most_within = importlib.import_module("predict").most_within
    assert most_within([1.0], 0.1) == 1
    assert most_within([1.2, 1.0, 2.0], 0.1) == 2  # by 1.1; their median 1.2 is not within 10% of 1.0
    assert most_within([1.0, 1.3, 2.0], 0.1) == 1


def test_no_step_of_two_ranks_beats_its_bound(tmp_path: Path):
    code = f"sys.path.insert(0, {str(FOLDER)!r}); import runpy; runpy.run_path({str(FOLDER / 'overlap.py')!r}, "
    said = launch(f"{code} run_name='__main__')", 2, [*TINY["overlap.py"].split(), "--disk", str(tmp_path)])
    found = json.loads(said[0])["results"]["forward"]
    assert set(found) == {"compute", "reduce", "gather", "link", "link_reduce", "one_copy"}
    assert all(line["over_bound"] > 0.97 and line["serial_over_bound"] > 1.0 for line in found.values())
    assert not said[1]


def assert_no_step_beats_its_bound(results: dict[str, dict[str, dict[str, float]]]):
    """Holds on a busy machine, too: sleeps only get longer."""
    found = {(window, s): line for window, settings in results.items() for s, line in settings.items()}
    assert len(found) == 2 * 11
    for line in found.values():
        assert line["over_bound"] > 0.97
        assert line["serial_over_bound"] > 1.0


@pytest.mark.parametrize("window", ["forward", "backward"])
def test_activations_that_leave_are_near_their_bound_in_virtual_time(window: str, monkeypatch: pytest.MonkeyPatch):
    """Measure the schedule alone, without a machine's noise; a run submits exactly this (``test_virtual_time``)."""
    monkeypatch.syspath_prepend(str(FOLDER))
    overlap = importlib.import_module("overlap")
    args = argparse.Namespace(blocks=20, numel=2**16, milliseconds=14.0, depth=2, buckets=2, device="cpu")
    cases = {name: overlap.Case(setting, window, args) for name, setting in overlap.SETTINGS.items()}
    binding = [name for name in cases if name in ("activations", "activations_disk", "selected_disk")]
    assert {cases[name].bound.binding for name in binding} == {"d2h"}
    for name in binding:
        assert cases[name].simulated_s <= 1.10 * cases[name].bound.seconds, name
    hidden, kept = cases["activations_hidden"], cases["kept"]
    assert hidden.bound.binding == kept.bound.binding == "compute"
    assert hidden.simulated_s <= 1.03 * kept.simulated_s


def assert_every_case_has_its_numbers(found: dict[str, Any]):
    *refused, first, second = found["cases"]
    assert ["no placement fits" in case["refused"] for case in refused] == [True, True]
    assert found["shape"] == "custom"
    assert [case["tokens"] for case in found["cases"]] == [16, 32, 16, 32]
    for case in (first, second):
        assert case["plan"]["units"]["weights"].get("host"), "something must move"
        assert case["bound_s"] > 0
        assert case["binding"]
        assert case["over_bound"] == pytest.approx(case["step_s"]["median"] / case["bound_s"], rel=0.01)
        assert case["serial_s"]["repetitions"] == 1
        assert case["host_is_pinned"]
        assert case["explained"] > 0
        # Which lane updates depends on measurements of this machine.
        assert {"compute", "h2d", "d2h"} <= case["busy_s_per_step"].keys()
    assert found["rivals"]["plain"]["step_s"].keys() == {"16", "32"}


def test_an_error_ends_its_case_and_stopping_prints_before_it_closes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(FOLDER))
    large = importlib.import_module("large")
    tried, printed = [], []

    def prepare(args: object, *_: object):
        tried.append(args)
        if len(tried) == 1:
            raise MemoryBudgetError("expected more\nthan there is")
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(large, "Streamed", prepare)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(
        sys, "argv", ["large.py", *f"{LARGE} --tokens 16 --device-memory 520KiB 520KiB --disk-memory 0".split()]
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            large.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    first, second = json.loads(*printed)["cases"]
    assert first["stopped"] == "MemoryBudgetError: expected more"
    assert second["cap_bytes"] == 520 * 2**10
    assert capsys.readouterr().out == ""


def test_everything_for_a_gpu_runs_once_and_draws_a_step(tmp_path: Path):
    """Run the GPU's script at sizes for a CPU, so that on a GPU nothing else can be missing."""
    out = tmp_path / "out"
    environment = {**os.environ, "TINY": "1", "OUT": str(out), "PYTHON": sys.executable}
    command = ["bash", str(FOLDER / "gpu.sh"), "early", "tests"]
    failed = subprocess.run([*command[:2], "early"], env={**environment, "PYTHON": "false"}, check=False, timeout=60)
    assert failed.returncode == 1
    assert (out / "failed.txt").read_text().split() == ["early"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert first.returncode == 0, first.stdout + first.stderr
    assert json.loads((out / "early.json").read_text())["cases"][0]["plan"]["early_units"] == 3
    assert "skipped" in (out / "tests.txt").read_text()
    assert (out / "done.txt").read_text().split() == ["tests", "early"], "what failed comes last"
    assert (out / "failed.txt").read_text() == ""
    (picture,) = out.glob("*.svg")
    assert picture.name.startswith("step_custom_")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 0
    assert again.stdout.count("done before") == 2


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("picture")


class TestPicture:
    """The timeline takes 2 s, so a second is half as wide as a row."""

    TIMELINE = Timeline(
        spans=(
            Span("compute", "forward", 10.0, 11.0),
            Span("compute", "forward layers.0", 10.5, 11.0),
            Span("h2d", "fetch layers.0 & <more>", 10.0, 10.5, 2_000_000_000),
            Span("update", "update layers.0", 11.0, 12.0, 100),
        ),
        waits=(Span("h2d", "fetch layers.0 & <more>", 10.0, 10.5),),
    )

    def test_every_span_is_drawn_where_it_belongs(self, picture: ModuleType):
        boxes = self.boxes(picture)
        assert len(boxes) == 5
        row = picture.WIDTH - picture.LEFT - picture.RIGHT
        x, _, width, colour = boxes["compute: forward layers.0, 500 ms from 500 ms"]
        assert (x, width) == pytest.approx((picture.LEFT + row / 4, row / 4), abs=0.01)
        assert colour == picture.COLOURS["forward"]
        assert boxes["update: update layers.0, 1 s from 1 s, 0.0001 MB"][2] == pytest.approx(row / 2, abs=0.01)

    def test_lanes_have_rows_of_their_own_and_waits_are_hatched(self, picture: ModuleType):
        boxes = self.boxes(picture)
        assert len({y // (picture.ROW + picture.GAP) for _, y, _, _ in boxes.values()}) == 4
        hatched = [about for about, (*_, colour) in boxes.items() if colour == "url(#wait)"]
        assert hatched == ["h2d: fetch layers.0 & <more>, 500 ms from 0 ms"]

    def test_words_say_what_ran_and_how_fast(self, picture: ModuleType):
        root = ElementTree.fromstring(picture.svg(self.TIMELINE, "a < b"))
        words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {"a < b", "compute", "waits", "h2d", "update", "0.0 s", "2.0 s"} <= set(words)
        assert "25% busy, 4 GB/s" in words
        assert "2 s; compute busy 500 ms; waits for h2d 500 ms" in words

    def test_it_needs_nothing_else(self, picture: ModuleType):
        text = picture.svg(self.TIMELINE, "a").replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text
        assert "<script" not in text

    def test_a_timeline_of_no_length(self, picture: ModuleType):
        ElementTree.fromstring(picture.svg(Timeline((Span("compute", "step", 1.0, 1.0),)), "nothing"))

    def boxes(self, picture: ModuleType) -> dict[str, tuple[float, float, float, str]]:
        """Return the boxes: title -> x, y, width and colour."""
        root = ElementTree.fromstring(picture.svg(self.TIMELINE, "a"))
        found = {}
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            about = box.find("{http://www.w3.org/2000/svg}title")
            if about is not None:
                x, y, width = (float(box.get(key)) for key in ("x", "y", "width"))
                found[about.text] = x, y, width, box.get("fill")
        return found
