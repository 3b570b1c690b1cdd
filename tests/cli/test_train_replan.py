"""``--replan``: another plan in the middle of a run, and the training that there would have been without."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from outcore.cli.train import job
from outcore.cli.train.output import predicted
from outcore.core.errors import DiskError, MemoryBudgetError
from outcore.planning.timing.known_hardware import known_hardware
from outcore.probe import kept
from outcore.spec.hardware import Hardware

from .conftest import Outcome, Run, read_jsonl

MACHINE = known_hardware("rtx-4090")
STEPS, OFF_AT = 6, 4


def slow_updates(*_: object) -> Hardware:
    """The machine as it is when it is measured again: the device should update."""
    return dataclasses.replace(MACHINE, host=dataclasses.replace(MACHINE.host, update_parameters_per_s=1e3))


@pytest.fixture
def train(command: Run, config_json: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every step is far off."""
    monkeypatch.setattr(predicted, "_OFF", -1.0)
    monkeypatch.setattr(predicted, "_FOR", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "measure", slow_updates)
    MACHINE.save(tmp_path / "hardware.json")

    def run(out: str, *more: object) -> Outcome:
        length = () if "max_length=null" in more else ("--seq-len", 48)
        sizes = ("--device-memory", "700KiB", "--host-memory", "4MiB")
        shared = ("--steps", STEPS, "--batch-size", 2, *length, "--max-grad-norm", 0.5, *sizes)
        files = ("--model", config_json, "--data", text, "--out", tmp_path / out)
        return command("train", *files, *shared, "--hardware", tmp_path / "hardware.json", *more)

    return run


def plan_of(path: Path) -> Any:
    return json.loads((path / "plan.json").read_text())


def trained(path: Path) -> tuple[bytes, list[tuple[float, float]]]:
    """Weights, and losses and norms of all steps."""
    lines = read_jsonl(path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    weights = (path / "model" / "model.safetensors").read_bytes()
    return weights, [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture
def plain(train: Any, tmp_path: Path) -> tuple[bytes, list[tuple[float, float]]]:
    done = train("plain")
    assert done.status == 0, done.err
    return trained(tmp_path / "plain")


def test_the_training_is_the_same(train, plain, tmp_path):
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with another plan" in done.out
    assert plan_of(tmp_path / "other") != plan_of(tmp_path / "plain")
    assert Hardware.load(tmp_path / "other" / "hardware.json") == slow_updates()
    assert not list((tmp_path / "cache").rglob("*.json")), "what is measured beside a run is no measure for others"
    assert [path.name for path in (tmp_path / "other").glob("checkpoint-*")] == [f"checkpoint-{OFF_AT}"]
    lines = read_jsonl(tmp_path / "other" / "metrics.jsonl")
    assert lines[OFF_AT - 1]["predicted_step_s"] != lines[OFF_AT]["predicted_step_s"]
    assert trained(tmp_path / "other") == plain


def test_nothing_is_lost_where_it_fails(train, plain, tmp_path, monkeypatch):
    def full(*_: object) -> Hardware:
        raise DiskError("the drive is full")

    monkeypatch.setattr(kept, "measure", full)
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with its plan, since the machine could not be measured again: the drive is full" in done.out
    assert trained(tmp_path / "other") == plain
    monkeypatch.setattr(kept, "measure", slow_updates)
    build, tried = job.Job.trainer, []

    def refuse(self: job.Job, *args: Any) -> Any:
        tried.append(self)
        if len(tried) == 2:
            raise MemoryBudgetError("no room")
        return build(self, *args)

    monkeypatch.setattr(job.Job, "trainer", refuse)
    done = train("third", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with the plan that it had, since the other one fails: no room" in done.out
    assert tried[2] is tried[0]
    assert trained(tmp_path / "third") == plain


def test_where_the_same_plan_is_the_best_it_stays(train, tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "measure", lambda *_: MACHINE)
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the plan stays the best one that is known" in done.out
    assert [line["step"] for line in read_jsonl(tmp_path / "other" / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--hardware", "none"), "--replan: expected it without --hardware none"),
        (("--plan", "plan.json"), "--replan: expected it without --plan"),
        (("--set", "max_length=null"), "--replan: expected --seq-len N"),
    ],
)
def test_bad_input_is_one_message(train, tmp_path, more, message):
    done = train("other", "--replan", *more)
    assert (done.status, done.err.count("Traceback")) == (2, 0)
    assert message in done.err
    assert not (tmp_path / "other").exists()
