"""Predicted beside measured time: in every line of the metrics, on the terminal, and in a message if far off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import without_launches

from outcore.command.train.output import prediction as predicted
from outcore.command.train.output import report
from outcore.command.train.output.prediction import LaneTimes, PredictedStep, PredictionComparison
from outcore.memory.machine import Others
from outcore.planner.timing.known_hardware import known_hardware
from outcore.spec.plan import Plan

from .conftest import TIERS, Run, read_jsonl

LANES = LaneTimes(
    busy_s={"compute": 0.6, "h2d": 0.5, "update": 0.2, "states_read": 0.2},
    exposed_s={"h2d": 0.4, "update": 0.0, "states_read": 0.0},
    moved_bytes={"h2d": 5e9, "states_read": 1e9, "update": 3e8},
)
STEP = PredictedStep(1.0, LANES)


def lanes(**busy_s: float) -> LaneTimes:
    """As predicted but for the seconds of some lanes. Compute always waits for the bus."""
    waited_s = 0.8 if "h2d" not in busy_s else 0.1
    return LANES._replace(busy_s={**LANES.busy_s, **busy_s}, exposed_s={**LANES.exposed_s, "h2d": waited_s})


def compared(step_s: float, steps: int = 22) -> PredictionComparison:
    comparison = PredictionComparison(STEP)
    for _ in range(steps):
        comparison.add(step_s, 1)
    return comparison


class TestComparison:
    @pytest.mark.parametrize(
        ("step_s", "measured", "said"),
        [
            (1.5, lanes(compute=1.1), "compute takes 1.1 s a step instead of 0.6 s"),
            (0.7, lanes(h2d=0.2), "lane h2d works 0.2 s a step instead of 0.5 s (at 25 instead of 10 GB/s)"),
            (
                1.5,
                lanes(states_read=0.8),
                "lane states_read works 0.8 s a step instead of 0.2 s (at 1.25 instead of 5 GB/s)",
            ),
            (1.5, lanes(update=0.9), "lane update works 0.9 s a step instead of 0.2 s"),
            (1.5, lanes(update=0.25), "compute waits for lane h2d 0.8 s a step instead of 0.4 s"),
        ],
    )
    def test_it_names_what_explains_most(self, step_s: float, measured: LaneTimes, said: str):
        """Compute waits for the bus in all cases but one, whatever is slow behind it."""
        comparison = compared(step_s)
        ratio = f"steps take {step_s:.3g} s, {step_s:.2f} of what was predicted, for 20 steps: "
        assert comparison.why(measured) == ratio + said

    def test_it_is_off_once_and_for_long(self):
        assert not compared(1.5, steps=21).is_off, "the first two steps do not count"
        comparison = compared(1.5)
        assert comparison.is_off
        comparison.why(LANES)
        comparison.add(1.5, 20)
        assert not comparison.is_off

    def test_now_and_then_is_nothing(self):
        comparison = PredictionComparison(STEP)
        for i in range(100):
            comparison.add(1.5 if i % 19 else 1.0, 1)
            assert not comparison.is_off

    def test_the_end_has_the_median_without_the_first_steps(self):
        comparison = PredictionComparison(STEP)
        for seconds in (9.3, 8.3, 1.1, 1.0, 1.1):
            comparison.add(seconds, 1)
        assert comparison.closing() == {"predicted": "1 s per step; the median took 1.1 s, 1.10 of it"}
        assert comparison.so_far == 1.1, "the bar shows the same"

    def test_a_line_with_the_first_steps_does_not_count(self):
        comparison = PredictionComparison(STEP)
        comparison.add(1.3, 20)
        assert not comparison.is_off, "two slow steps and eighteen as predicted"
        assert comparison.closing() == {"predicted": "1 s per step; the median took 1.3 s, 1.30 of it"}, "all there is"
        comparison.add(1.0, 20)
        assert comparison.closing() == {"predicted": "1 s per step; the median took 1 s, 1.00 of it"}
        comparison.add(1.5, 50)
        assert "for 50 steps" in comparison.why(LANES)

    def test_the_end_of_a_short_run_says_why_it_was_far_off(self):
        """Ten steps; those of a long one have said it already."""
        comparison = PredictionComparison(STEP)
        for _ in range(10):
            comparison.add(1.5, 1, lanes(compute=1.1))
        said = "1 s per step; the median took 1.5 s, 1.50 of it"
        assert comparison.closing() == {"predicted": f"{said}: compute takes 1.1 s a step instead of 0.6 s"}
        comparison.add(1.5, 10, lanes(compute=1.1))
        comparison.why(LANES)
        assert comparison.closing() == {"predicted": said}

    def test_more_than_planned_is_said(self):
        measured = LANES._replace(exposed_s={"h2d": 0.9}, moved_bytes={"h2d": 9 * 2**30})
        said = "for lane h2d 0.9 s a step instead of 0.4 s (it moves 9.00 GiB instead of 4.66 GiB)"
        assert compared(1.5).why(measured).endswith(said)

    @pytest.mark.parametrize(("ranks", "is_said"), [(1, True), (2, False)])
    def test_a_busy_machine_is_said(self, ranks: int, is_said: bool, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(Others, "busy", lambda _: "others kept 1.6 of 2 cores busy")
        monkeypatch.setattr(predicted, "num_ranks", lambda: ranks)
        said = ": this machine is busy, others kept 1.6 of 2 cores busy; compute takes 1.1 s"
        comparison = PredictionComparison(STEP)
        for steps in (2, 10):
            comparison.add(1.5, steps, lanes(compute=1.1))
        assert (said in comparison.closing()["predicted"]) is is_said
        comparison.add(1.5, 10, lanes(compute=1.1))
        assert (said in comparison.why(lanes(compute=1.1))) is is_said

    def test_where_nothing_is_known_nothing_is_said(self):
        comparison = PredictionComparison(None)
        comparison.add(2.0, 30)
        assert not comparison.is_off
        assert comparison.facts() == {"predicted_step_s": None}
        assert comparison.closing() == {}
        assert comparison.so_far is None
        assert comparison.ratio(1.0) is None


def test_a_run_has_it_beside_what_was_measured(command: Run, config_json: Path, text: Path, tmp_path: Path):
    without_launches("rtx-4090").save(tmp_path / "hardware.json")
    shared = ("--steps", 3, "--batch-size", 2, "--seq-len", 48, "--disk", tmp_path, *TIERS, "--max-grad-norm", 0)
    files = ("--model", config_json, "--data", text, "--out", tmp_path / "run")
    done = command("train", *files, *shared, "--hardware", tmp_path / "hardware.json", "--grad-accum", 2)
    assert done.status == 0, done.err
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for line in lines:
        waits = line["predicted_exposed_s"]
        assert line["predicted_step_s"] == pytest.approx(line["predicted_compute_s"] + sum(waits.values()), rel=1e-3)
        assert all(waits.values()), "lanes of zero are left out"
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


STEPS = 7


@pytest.fixture
def train_off(command: Run, config_json: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train so that all steps count as far off their prediction."""
    monkeypatch.setattr(predicted, "_OFF", -1.0)
    monkeypatch.setattr(predicted, "_FOR", 2)
    sizes = ("--device-memory", "700KiB", "--host-memory", "4MiB", "--hardware", "rtx-4090")
    shared = ("--steps", STEPS, "--batch-size", 2, "--seq-len", 48, "--max-grad-norm", 0.5, *sizes)
    files = ("--model", config_json, "--data", text, "--out", tmp_path / "run")
    return lambda: command("train", *files, *shared)


def test_a_run_that_ends_while_lanes_are_watched_says_what_it_has_seen(train_off, monkeypatch):
    monkeypatch.setattr(report, "WATCHED_STEPS", STEPS)
    done = train_off()
    assert done.status == 0, done.err
    (said,) = [line for line in done.out.splitlines() if "of what was predicted" in line]
    assert said.startswith(f"step {STEPS}: steps take ")
    assert said.endswith("; outcore probe measures the machine again, --resume plans for it")


def test_steps_that_are_as_predicted_again_while_lanes_are_watched_need_no_reason(train_off, monkeypatch):
    """Four steps take twice as long as predicted, and all later ones as long."""
    monkeypatch.setattr(predicted, "_OFF", 0.2)
    monkeypatch.setattr(report, "WATCHED_STEPS", 2)
    add, lines = predicted.PredictionComparison.add, []

    def twice_as_long_at_first(self: Any, step_s: float, steps: int, measured: Any) -> None:
        lines.append(self._predicted.step_s * (2 if len(lines) < 4 else 1))
        add(self, lines[-1], steps, measured)

    monkeypatch.setattr(predicted.PredictionComparison, "add", twice_as_long_at_first)
    done = train_off()
    assert done.status == 0, done.err
    assert len(lines) == STEPS
    assert "of what was predicted" not in done.out
