"""``--replan``: another plan in the middle of a run, with the same training as without."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import without_launches
from transformers import AutoConfig, AutoModelForCausalLM

from outcore.command.train import planned_run as job
from outcore.command.train.loop.nonfinite import FiniteSteps
from outcore.command.train.loop.trainer import SftTrainer
from outcore.command.train.output import prediction as predicted
from outcore.command.train.output import report, trace
from outcore.command.train.output.folder import Checkpoint, OutputFolder
from outcore.command.train.output.report import RunReport
from outcore.command.train.replan import may_fail_so
from outcore.core.errors import DiskError, MemoryBudgetError
from outcore.preparation import plan_choice as choice
from outcore.preparation.plan_choice import Timed
from outcore.probe import measured_machines as kept
from outcore.spec.hardware import Hardware

from .conftest import Outcome, Run, read_jsonl, replaced, write_jsonl

MACHINE = without_launches("rtx-4090")
STEPS, OFF_AT = 7, 5


def slow_updates(*_: object) -> Hardware:
    """The machine when it is measured again: the device should do the updates."""
    return dataclasses.replace(MACHINE, host=dataclasses.replace(MACHINE.host, update_parameters_per_s=1e3))


@pytest.fixture(autouse=True)
def _same_models_are_followed_once(followed: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow each kind of model with the same shapes once: what it computes and saves is the same."""
    for name in ("counted_work", "footprint_of"):
        monkeypatch.setattr(choice, name, partial(_follow_once, followed, getattr(choice, name)))


def _follow_once(known: dict[Any, Any], follow: Any, cut: Any, sample: Any, *args: Any, **options: Any) -> Any:
    key = follow, repr(cut.spec), str(cut.modules[0]), str(sample), torch.is_autocast_enabled("cpu")
    if key not in known:
        known[key] = follow(cut, sample, *args, **options)
    return known[key]


@pytest.fixture(scope="module")
def followed() -> dict[Any, Any]:
    return {}


@pytest.fixture
def train(command: Run, config_json: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command whose steps all count as far off their prediction."""
    monkeypatch.setattr(predicted, "_OFF", -1.0)
    monkeypatch.setattr(predicted, "_FOR", 2)
    monkeypatch.setattr(report, "WATCHED_STEPS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "measure", slow_updates)
    MACHINE.save(tmp_path / "hardware.json")

    def run(out: str, *more: object, method: str = "train") -> Outcome:
        length = () if "max_length=null" in more else ("--seq-len", 48)
        sizes = ("--device-memory", "700KiB", "--host-memory", "4MiB")
        shared = ("--steps", STEPS, "--batch-size", 2, *length, "--max-grad-norm", 0.5, *sizes)
        files = ("--model", config_json, "--data", text, "--out", tmp_path / out)
        return command(*replaced(method, *files, *shared, "--hardware", tmp_path / "hardware.json", *more))

    return run


def plan_of(path: Path) -> Any:
    return json.loads((path / "plan.json").read_text())


def trained(path: Path) -> tuple[bytes, list[tuple[float, float]]]:
    """Weights, and the losses and norms of all steps."""
    lines = read_jsonl(path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    weights = (path / "model" / "model.safetensors").read_bytes()
    return weights, [(line["loss"], line["grad_norm"]) for line in lines]


@dataclasses.dataclass(frozen=True)
class Plain:
    """A run that keeps its plan."""

    trained: tuple[bytes, list[tuple[float, float]]]
    plan: Any


@pytest.fixture(scope="module")
def runs() -> list[Plain]:
    """The plain run, once it has been made."""
    return []


@pytest.fixture
def plain(runs: list[Plain], train: Any, tmp_path: Path) -> Plain:
    if not runs:
        done = train("plain")
        assert done.status == 0, done.err
        assert "; outcore probe measures the machine again" in done.out
        runs.append(Plain(trained(tmp_path / "plain"), plan_of(tmp_path / "plain")))
    return runs[0]


def test_the_training_is_the_same(train, plain, tmp_path):
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with another plan" in done.out
    assert "outcore probe" not in done.out
    assert plan_of(tmp_path / "other") != plain.plan
    assert Hardware.load(tmp_path / "other" / "hardware.json") == slow_updates()
    assert not list((tmp_path / "cache").rglob("*.json")), "what is measured beside a run is no measure for others"
    assert [path.name for path in (tmp_path / "other").glob("checkpoint-*")] == [f"checkpoint-{OFF_AT}"]
    lines = read_jsonl(tmp_path / "other" / "metrics.jsonl")
    assert lines[OFF_AT - 1]["predicted_step_s"] != lines[OFF_AT]["predicted_step_s"]
    assert trained(tmp_path / "other") == plain.trained


def test_a_run_that_ends_while_lanes_are_watched_says_what_it_has_seen(train, monkeypatch):
    monkeypatch.setattr(report, "WATCHED_STEPS", STEPS)
    done = train("plain")
    assert done.status == 0, done.err
    (said,) = [line for line in done.out.splitlines() if "of what was predicted" in line]
    assert said.startswith(f"step {STEPS}: steps take ")


def test_steps_that_are_as_predicted_again_while_lanes_are_watched_need_no_reason(train, monkeypatch):
    """Four steps take twice as long as predicted, and all later ones as long."""
    monkeypatch.setattr(predicted, "_OFF", 0.2)
    monkeypatch.setattr(report, "WATCHED_STEPS", 2)
    add, lines = predicted.PredictionComparison.add, []

    def twice_as_long_at_first(self: Any, step_s: float, steps: int, measured: Any) -> None:
        lines.append(self._predicted.step_s * (2 if len(lines) < OFF_AT - 1 else 1))
        add(self, lines[-1], steps, measured)

    monkeypatch.setattr(predicted.PredictionComparison, "add", twice_as_long_at_first)
    done = train("plain", "--replan")
    assert done.status == 0, done.err
    assert len(lines) == STEPS
    assert "of what was predicted" not in done.out


def test_a_run_that_is_told_to_stop_meanwhile_goes_on_later(train, plain, tmp_path, monkeypatch):
    def stop(*_: object) -> Hardware:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("nobody waits for it")

    monkeypatch.setattr(kept, "measure", stop)
    stopped = train("other", "--replan")
    assert stopped.status == 143
    assert stopped.err.splitlines()[-1].startswith(f"{tmp_path / 'other' / f'checkpoint-{OFF_AT}'} holds everything")
    assert train("other", "--resume").status == 0
    assert trained(tmp_path / "other") == plain.trained


def test_nothing_is_lost_where_it_fails(train, plain, tmp_path, monkeypatch):
    def full(*_: object) -> Hardware:
        raise DiskError("the drive is full")

    monkeypatch.setattr(kept, "measure", full)
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with its plan, since no other could be made: the drive is full" in done.out
    assert trained(tmp_path / "other") == plain.trained
    monkeypatch.setattr(kept, "measure", slow_updates)
    build, tried = job.PlannedRun.trainer, []

    def refuse(self: job.PlannedRun, *args: Any) -> Any:
        tried.append(self)
        if len(tried) == 2:
            raise MemoryBudgetError("no room")
        return build(self, *args)

    monkeypatch.setattr(job.PlannedRun, "trainer", refuse)
    done = train("third", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with the plan that it had, since the other one fails: no room" in done.out
    assert tried[2] is tried[0]
    assert trained(tmp_path / "third") == plain.trained


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (MemoryBudgetError("no room"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (OSError("no such drive"), True),
        (RuntimeError("deque mutated during iteration"), False),
        (KeyError("layers.0"), False),
    ],
)
def test_a_bug_is_not_taken_for_a_plan_that_fails(error: Exception, *, may: bool):
    assert may_fail_so(error) is may


def test_where_the_same_plan_is_the_best_it_stays(train, tmp_path, monkeypatch):
    """Later steps are compared with what is predicted for the machine as it was measured again."""
    slower = dataclasses.replace(MACHINE.device, bytes_per_s=MACHINE.device.bytes_per_s / 2)
    monkeypatch.setattr(kept, "measure", lambda *_: dataclasses.replace(MACHINE, device=slower))
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the plan stays the best one that is known" in done.out
    lines = read_jsonl(tmp_path / "other" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    predicted_s = [line["predicted_step_s"] for line in lines]
    before = OFF_AT - 1  # the line of a step is written after it is over
    assert predicted_s == before * predicted_s[:1] + (STEPS - before) * predicted_s[-1:]
    assert predicted_s[-1] > predicted_s[0]
    assert not list((tmp_path / "other").glob("checkpoint-*"))  # it did not stop in vain


def test_a_run_that_was_killed_goes_on_with_another_plan(train, plain, tmp_path, monkeypatch):
    monkeypatch.setattr(predicted, "_FOR", 1)
    args = ("--save-every", 2)
    assert train("other", *args).status == 0
    for step in (4, 6, STEPS):
        shutil.rmtree(tmp_path / "other" / f"checkpoint-{step}", ignore_errors=True)
    shutil.rmtree(tmp_path / "other" / "model")
    (tmp_path / "other" / "checkpoint-3").mkdir()  # incomplete
    (tmp_path / "other" / ".outcore-data-old").mkdir()
    done = train("other", *args, "--resume", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with another plan" in done.out
    assert not (tmp_path / "other" / ".outcore-data-old").exists()
    assert trained(tmp_path / "other")[0] == plain.trained[0]


def test_the_run_goes_on_where_there_is_no_memory_to_measure_in(train, monkeypatch):
    def fail(*_: object) -> Hardware:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kept, "measure", fail)
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert "the run goes on with its plan, since no other could be made: no room" in done.out


@pytest.mark.parametrize("fails_at", [OFF_AT + 1, OFF_AT + 2])
def test_only_a_plan_that_makes_no_step_is_given_up(train, plain, tmp_path, monkeypatch, fails_at):
    """Later errors are raised as in any run."""
    step, built = SftTrainer.training_step, []

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        built.append(self) if self not in built else None
        if len(built) == 2 and self.state.global_step + 1 == fails_at:
            raise torch.OutOfMemoryError("no room")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(SftTrainer, "training_step", fail)
    if fails_at == OFF_AT + 1:
        done = train("other", "--replan")
        assert done.status == 0, done.err
        assert "the run goes on with the plan that it had, since the other one fails: no room" in done.out
        assert trained(tmp_path / "other") == plain.trained
    else:
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            train("other", "--replan")


def test_another_checkpoint_is_not_gone_on_from(train, monkeypatch):
    monkeypatch.setattr(OutputFolder, "latest", lambda folder: Checkpoint(path=folder.path, step=1))
    done = train("other", "--replan")
    assert done.status == 1
    assert f"expected a checkpoint of step {OFF_AT} to go on from" in done.err


def test_evaluations_are_those_of_the_plain_run(train, text, tmp_path):
    """Stopping does not end an epoch, and waits where an epoch ends."""
    found = []
    short = tmp_path / "short.txt"
    short.write_text(" ".join(f"{n} bottles of beer" for n in range(20)))
    for out, more in (("plain", ()), ("other", ("--replan",))):
        done = train(out, "--data", text, "--eval-data", short, "--set", "save_strategy=epoch", *more)
        assert done.status == 0, done.err
        lines = read_jsonl(tmp_path / out / "metrics.jsonl")
        found.append([(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line])
    assert "the run goes on with another plan" in done.out
    assert found[0] == found[1] != []


def test_the_summary_is_of_the_whole_run(train, monkeypatch):
    begun = []
    begin = RunReport.on_train_begin

    def on_train_begin(self: RunReport, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        begun.append(self._begun_s)

    monkeypatch.setattr(RunReport, "on_train_begin", on_train_begin)
    leave_out = FiniteSteps.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        leave_out(self, *args, **kwargs)
        self.num_skipped = 1

    monkeypatch.setattr(FiniteSteps, "__init__", init)
    done = train("other", "--replan")
    assert done.status == 0, done.err
    assert len(begun) == 2
    assert begun[0] == begun[1]
    assert f"{STEPS}, 2 of them without an update" in done.out


def test_a_trace_is_of_the_plan_that_the_run_ends_with(train, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "WARM_UP_STEPS", 0)  # so that lanes are watched after the first trace
    done = train("other", "--replan", "--trace", tmp_path / "trace.json")
    assert done.status == 0, done.err
    assert "the run goes on with another plan" in done.out
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [span["name"] for span in spans if span.get("ph") == "X"]
    assert names.count("step") == STEPS - OFF_AT
    assert any(name.startswith("stage ") for name in names), "the device updates"


def test_preferences_are_learned_the_same_beside_a_reference_model(train, config_json, tmp_path):
    folder = tmp_path / "weights"
    config = AutoConfig.for_model(**json.loads(config_json.read_text()))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    rows = [{"prompt": f"q {n}?", "chosen": f" yes, {n}", "rejected": " no" + n * " never"} for n in range(16)]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", rows)
    more = ("--model", folder, "--data", pairs, "--device-memory", "800KiB", "--host-memory", "8MiB")
    for out, options in (("plain", ()), ("other", ("--replan",))):
        done = train(out, *more, *options, method="dpo")
        assert done.status == 0, done.err
    assert "the run goes on with another plan" in done.out
    assert plan_of(tmp_path / "other") != plan_of(tmp_path / "plain")
    assert trained(tmp_path / "other") == trained(tmp_path / "plain")


def test_there_is_room_for_the_checkpoint(train, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(OutputFolder, "refuse_full", lambda _, nbytes: asked.append(nbytes))
    assert train("plain", "--dry-run").status == 0
    assert train("other", "--replan", "--dry-run").status == 0
    assert asked[1] > 3 * asked[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--hardware", "none"), "--replan: expected it without --hardware none"),
        (("--plan", "plan.json"), "--replan: expected it without --plan"),
        (("--set", "max_length=null"), "--replan: expected --seq-len N"),
        (("--set", "logging_strategy=no"), "--replan: expected logging_strategy=steps"),
        (("--set", "logging_strategy=epoch"), "--replan: expected logging_strategy=steps"),
        (
            ("--eval-data", "{text}", "--set", "save_strategy=best", "--set", "eval_strategy=epoch"),
            "--replan: expected a run that keeps no best",
        ),
    ],
)
def test_bad_input_is_one_message(train, text, tmp_path, more, message):
    done = train("other", "--replan", *(text if value == "{text}" else value for value in more))
    assert (done.status, done.err.count("Traceback")) == (2, 0)
    assert message in done.err
    assert not (tmp_path / "other").exists()


def test_times_that_nothing_predicts_are_refused(train, tmp_path, monkeypatch):
    monkeypatch.setattr(Timed, "predict", lambda *_: None)  # as for a model that cannot be followed
    done = train("other", "--replan")
    assert (done.status, done.err.count("Traceback")) == (2, 0)
    assert "--replan: expected a run whose times can be predicted" in done.err
    assert not (tmp_path / "other").exists()
