"""Predicted beside measured time: in every line of the metrics, on the terminal, and in a message if far off."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.cli.train.output.predicted import Comparison, PredictedStep
from outcore.planning.timing.known_hardware import known_hardware
from outcore.spec.plan import Plan

from .conftest import TIERS, Run, read_jsonl

STEP = PredictedStep(1.0, 0.6, {"h2d": 0.4, "update": 0.0})


def lap(compute_s: float, h2d_s: float, update_s: float = 0.0) -> dict[str, object]:
    exposed_s = {"h2d": h2d_s, "update": update_s}
    return {"step_s": compute_s + h2d_s + update_s, "compute_s": compute_s, "exposed_s": exposed_s}


class TestComparison:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lap(1.1, 0.4), "steps take 1.5 s, 1.50 of what was predicted, for 20 steps: compute takes 1.1 s a step "),
            (lap(0.6, 0.1), "steps take 0.7 s, 0.70 of what was predicted, for 20 steps: it waits for lane h2d 0.1 s "),
            (lap(0.6, 0.4, 0.5), "it waits for lane update 0.5 s a step instead of 0 s"),
        ],
    )
    def test_far_off_for_long_it_says_once_what_was_wrong(self, wrong, said):
        comparison = Comparison(STEP)
        found = [comparison.add(wrong, 1) for _ in range(60)]
        (sentence,) = [text for text in found if text is not None]
        assert said in sentence
        assert found.index(sentence) == 21, "the first two steps do not count"

    def test_now_and_then_is_nothing(self):
        comparison = Comparison(STEP)
        assert not any(comparison.add(lap(1.1 if i % 19 else 0.6, 0.4), 1) for i in range(100))

    def test_the_end_has_the_median_without_the_first_steps(self):
        comparison = Comparison(STEP)
        for seconds in (9.0, 8.0, 0.8, 0.7, 0.8):
            comparison.add(lap(seconds, 0.3), 1)
        assert comparison.closing() == {"predicted": "1 s per step; the median took 1.1 s, 1.10 of it"}

    def test_a_line_with_the_first_steps_does_not_count(self):
        comparison = Comparison(STEP)
        assert comparison.add(lap(0.9, 0.4), 20) is None, "two slow steps and eighteen as predicted"
        assert comparison.closing() == {"predicted": "1 s per step; the median took 1.3 s, 1.30 of it"}, "all there is"
        assert comparison.add(lap(0.6, 0.4), 20) is None
        assert comparison.closing() == {"predicted": "1 s per step; the median took 1 s, 1.00 of it"}
        assert "for 50 steps" in (comparison.add(lap(1.1, 0.4), 50) or "")

    def test_where_nothing_is_known_nothing_is_said(self):
        comparison = Comparison(None)
        assert comparison.add(lap(1.0, 1.0), 30) is None
        assert comparison.facts() == {"predicted_step_s": None}
        assert comparison.closing() == {}
        assert comparison.ratio(1.0) is None


def test_a_run_has_it_beside_what_was_measured(command: Run, config_json: Path, text: Path, tmp_path: Path):
    known_hardware("rtx-4090").save(tmp_path / "hardware.json")
    shared = ("--steps", 3, "--batch-size", 2, "--seq-len", 48, "--disk", tmp_path, *TIERS, "--max-grad-norm", 0)
    files = ("--model", config_json, "--data", text, "--out", tmp_path / "run")
    done = command("train", *files, *shared, "--hardware", tmp_path / "hardware.json", "--grad-accum", 2)
    assert done.status == 0, done.err
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line in lines:
        waits = line["predicted_exposed_s"]
        assert line["predicted_step_s"] == pytest.approx(line["predicted_compute_s"] + sum(waits.values()), rel=1e-3)
        assert waits.keys() == line["exposed_s"].keys()
    assert " of predicted" in done.out
    said = [" ".join(line.split()) for line in done.out.splitlines()]
    assert any(line.startswith("predicted") and "s per step; the median took" in line for line in said)


def test_what_there_is_room_to_keep_is_kept(command: Run, config_json: Path, text: Path, tmp_path: Path):
    files = ("--model", config_json, "--data", text, "--out", tmp_path / "run", "--hardware", "rtx-4090")
    done = command("train", *files, "--steps", 1, "--seq-len", 48, "--device-memory", "4MiB", "--host-memory", "1MiB")
    assert done.status == 0, done.err
    assert "activations kept while they fit in" in done.out
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.kept_bytes == 4 * 2**20 - plan.tier_bytes["device"]


def test_a_machine_that_is_none_is_one_message(command: Run, config_json: Path, text: Path, tmp_path: Path):
    damaged = tmp_path / "hardware.json"
    damaged.write_text(known_hardware("h100").to_json().replace('"version": 2', '"version": 99'))
    files = ("--model", config_json, "--data", text, "--out", tmp_path / "run")
    done = command("train", *files, "--device-memory", "260KiB", "--hardware", damaged)
    assert (done.status, done.out.count("Traceback")) == (2, 0)
    assert "expected version 2, but got 99" in done.err
    assert not (tmp_path / "run").exists()
