"""SIGTERM and SIGUSR1 in every state of a run: what is left and reported, and that it goes on as if uninterrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nursery
import pytest
from safetensors.torch import load_file

import outcore
from outcore.checkpoint.weights import export
from outcore.command.train.loop import preemption as saves
from outcore.command.train.loop.preemption import Preemption, SaveTimes
from outcore.command.train.loop.trainer import SftTrainer
from outcore.command.train.output.report import RunReport
from outcore.core.ranks import OtherRankError
from outcore.integrations import trainer_saves as integration
from outcore.integrations.trainer_saves import EndedAtOnceError

from .conftest import CONFIG, read_jsonl, write_json, write_jsonl
from .test_train import assert_equal, options

STEPS, EVERY = 5, 2
# State -> steps made by then; owner, method and number of the call after which the signal comes; the saved step.
STATES: dict[str, tuple[int, Any, str, int, int]] = {
    "first micro-batch": (0, SftTrainer, "training_step", 1, 1),
    "before the update": (2, SftTrainer, "_get_grad_norm", 1, 3),
    "behind the step": (3, RunReport, "on_step_end", 1, 3),
    "evaluation": (3, SftTrainer, "prediction_step", 2, 3),
    "between steps": (1, SftTrainer, "get_batch_samples", 1, 2),
    "between epochs": (3, SftTrainer, "get_batch_samples", 1, 4),
    "save": (4, SftTrainer, "_save_optimizer_and_scheduler", 1, 4),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job: dropout, windows of two batches (an epoch's last is short), a schedule, evaluations between saves."""
    folder = tmp_path_factory.mktemp("preemption")
    model = write_json(folder / "config.json", {**CONFIG, "num_hidden_layers": 2, "attention_dropout": 0.1})
    rows = [{"prompt": f"{n} and {n} is ", "completion": f"{2 * n}"} for n in range(5)]
    data = write_jsonl(folder / "rows.jsonl", rows)
    settings = options({"lr_scheduler_type": "cosine", "eval_strategy": "epoch"})
    short = ("--steps", STEPS, "--batch-size", 1, "--grad-accum", 2, "--seq-len", 32, "--lr", 1e-2)
    more = ("--eval-data", data, "--device-memory", "200KiB", "--host-memory", "400KiB", "--disk", folder)
    return ["train", "--model", str(model), "--data", str(data), *settings, *map(str, (*short, *more))]


@pytest.fixture(scope="module")
def whole(shared: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the run that was not stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    command = [sys.executable, "-m", "outcore", *shared, "--out", str(out), "--save-every", str(EVERY)]
    done = nursery.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def then(
    patch: pytest.MonkeyPatch, step: int, owner: Any, name: str, number: int, act: Callable[[], None]
) -> list[int]:
    """Act once when a run reaches a state; the returned list tells whether it did."""
    method, calls = getattr(owner, name), []

    def acting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        if (
            self.state if hasattr(self, "state") else args[1]
        ).global_step == step:  # a Trainer has a state, a callback is given it
            calls.append(step)
            if len(calls) == number:
                act()
        return found

    patch.setattr(owner, name, acting)
    return calls


def trained(out: Path) -> list[dict[str, Any]]:
    wanted = ("step", "epoch", "loss", "lr", "grad_norm", "eval_loss")
    return [{key: line.get(key) for key in wanted} for line in read_jsonl(out / "metrics.jsonl")]


@pytest.mark.parametrize("state", STATES)
def test_the_step_is_finished_and_saved(state, shared, whole, command, tmp_path, monkeypatch):
    out = tmp_path / "run"
    *where, count, saved = STATES[state]
    number = (signal.SIGTERM, signal.SIGUSR1)[saved % 2]
    with monkeypatch.context() as patch:
        calls = then(patch, *where, count, lambda: signal.raise_signal(number))
        stopped = command(*shared, "--out", out, "--save-every", EVERY)
    assert len(calls) >= count, "the state was reached"
    assert stopped.status == 143, stopped.err
    left = f"{out / f'checkpoint-{saved}'} holds everything up to step {saved}; the same command with --resume goes on"
    assert stopped.err.splitlines()[-2:] == ["outcore: stopped", f"{left} there"]
    assert not (out / "model").exists()
    resumed = command(*shared, "--out", out, "--save-every", EVERY, "--resume")
    assert resumed.status == 0, resumed.err
    assert trained(out) == trained(whole)
    assert_equal(*(load_file(folder / "model" / "model.safetensors") for folder in (out, whole)))


KILLED = """
import os, signal, sys
from unittest import mock
from outcore.command.main import main
from outcore.command.train.loop.trainer import SftTrainer
from outcore.core.ranks import OtherRankError
from outcore.integrations import trainer_saves as integration
step, method = int(sys.argv.pop(1)), SftTrainer._maybe_log_save_evaluate

def then_die(self, *args, **kwargs):
    method(self, *args, **kwargs)
    if self.state.global_step == step:
        os.kill(os.getpid(), signal.SIGKILL)

with mock.patch.object(SftTrainer, "_maybe_log_save_evaluate", then_die):
    main()
"""


def test_killed_before_the_evaluation_of_an_epoch(shared, whole, command, tmp_path):
    """A save after an epoch's last step waits for the evaluation: else it is lost, and random numbers differ."""
    out = tmp_path / "run"
    program = [sys.executable, "-c", KILLED, "3", *shared, "--out", str(out), "--save-every", "1"]
    assert nursery.run(program, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert trained(out)[-1]["step"] == 3
    resumed = command(*shared, "--out", out, "--save-every", 1, "--resume")
    assert resumed.status == 0, resumed.err
    assert trained(out) == trained(whole)
    assert_equal(*(load_file(folder / "model" / "model.safetensors") for folder in (out, whole)))


def test_a_signal_in_the_last_save_changes_nothing(shared, whole, command, tmp_path, monkeypatch):
    """Nor does a signal while the model is written: a finished run need not be started again."""
    out, save, numbers = tmp_path / "run", export.save_model, []

    def save_model(*args: Any) -> None:
        save(*args)
        numbers.append(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr("outcore.command.train.run.save_model", save_model)
    done = command(*shared, "--out", out, "--save-every", EVERY)
    assert numbers
    assert done.status == 0, done.err
    assert "Done" in done.out
    assert trained(out) == trained(whole)


# A run that reports when it reaches a state and waits there for a signal; then it performs an action.
PROGRAM = """
import signal, sys, time
from unittest import mock
place, name, act = sys.argv[1:4]
del sys.argv[1:4]
from outcore.command.train.planned_run import PlannedRun
from outcore.command.train.loop.trainer import SftTrainer
from outcore.core.ranks import OtherRankError
from outcore.integrations import trainer_saves as integration
from outcore.command.main import main
owner = {"PlannedRun": PlannedRun, "SftTrainer": SftTrainer}[place]
method, calls = getattr(owner, name), []

def wait(self, *args, **kwargs):
    calls.append(name)
    if len(calls) == (3 if name == "training_step" else 1):
        print("reached", file=sys.stderr, flush=True)
        sys.stdin.readline()
        exec(act)
    return method(self, *args, **kwargs)

with mock.patch.object(owner, name, wait):
    main()
"""


def start(place: str, act: str, command: list[Any], **options: Any) -> nursery.Popen:
    arguments = [sys.executable, "-c", PROGRAM, *place.split("."), act, *map(str, command)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = nursery.Popen(arguments, text=True, **pipes, **options)
    said = []
    while (line := process.stderr.readline()) != "reached\n":
        said.append(line)
        if not line:
            process.kill()
            raise AssertionError(f"it did not get there: {said} {process.communicate()}")
    return process


def end(process: nursery.Popen) -> tuple[int, str]:
    try:
        _, err = process.communicate("go\n", timeout=60)
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.parametrize(
    ("place", "number"), [("PlannedRun.load_data", signal.SIGUSR1), ("SftTrainer._wrap_model", signal.SIGTERM)]
)
def test_before_training_nothing_is_left(place, number, shared, tmp_path):
    out = tmp_path / "deep" / "run"
    process = start(place, "", [*shared, "--out", out])
    process.send_signal(number)
    status, err = end(process)
    assert (status, err.splitlines()[-1]) == (143, "outcore: stopped")
    assert not out.parent.exists()


def test_a_second_signal_ends_the_run_at_once(shared, tmp_path):
    out = tmp_path / "run"
    process = start("SftTrainer.training_step", "time.sleep(30)", [*shared, "--out", out])
    begun_s = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    status, err = end(process)
    assert status == 143
    assert time.monotonic() - begun_s < 25
    left = f"no checkpoint was saved in {out}: --resume auto begins anew; --save-every N saves some"
    assert err.splitlines()[-2:] == ["outcore: stopped", left]


@pytest.mark.parametrize("is_stuck", [False, True])
def test_the_run_is_gone_when_the_time_is_over(is_stuck, shared, tmp_path):
    """Whatever the run does then, also if no handler can run, as inside a kernel."""
    out = tmp_path / "run"
    act = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); " if is_stuck else ""
    grace_s = 1 if is_stuck else 5  # a tenth of it is left for closing, enough on a busy machine, too
    process = start("SftTrainer.training_step", act + "time.sleep(30)", [*shared, "--out", out, "--grace", grace_s])
    process.send_signal(signal.SIGTERM)
    status, err = end(process)
    assert status == 143
    wanted = (
        "outcore: stopped: the run could not be closed within --grace"
        if is_stuck
        else "step 2 was not saved within --grace (5 s)"
    )
    assert wanted in err.splitlines()


def test_signals_to_the_whole_group_and_nobody_listens(shared, whole, tmp_path):
    """Workers of the data loader get the signal, too; the reader of standard output and error is gone."""
    out = tmp_path / "run"
    process = start("SftTrainer.training_step", "", [*shared, "--set", "dataloader_num_workers=1", "--out", out])
    process.stdout.close()
    process.stderr.close()
    for child in (process.pid, *children(process.pid)):
        os.kill(child, signal.SIGTERM)
    process.stderr = None
    status, _ = end(process)
    assert status == 143
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-2", "metrics.jsonl", "plan.json"]


def children(pid: int) -> list[int]:
    found = [int(n) for task in Path(f"/proc/{pid}/task").iterdir() for n in (task / "children").read_text().split()]
    assert found, "workers"
    return found


def test_saves_come_by_the_clock_and_at_the_end(shared, command, tmp_path, monkeypatch):
    """The output says what the saves cost."""
    out = tmp_path / "run"
    clock = iter(range(10**6))
    for module in (saves, integration):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 25.0 * next(clock)))
    done = command(*shared, "--out", out, "--save-every-minutes", 1, "--keep", 2)
    assert done.status == 0, done.err
    said = [line.split() for line in done.out.splitlines()]
    assert ["save_every_minutes", "1"] in said
    assert ["keep", "2"] in said
    said = re.search(
        r"saving +(\d) checkpoints, for which training waited (\d+) s, ([\d.]+)% of the time; "
        r"--save-every-minutes ([\d.]+) would",
        done.out,
    )
    assert said is not None
    number, total_s, share, minutes = map(float, said.groups())
    assert 2 <= number < STEPS
    assert share > 5
    assert minutes == pytest.approx(total_s / number * 19 / 60, abs=0.1)
    assert sorted(path.name for path in out.glob("checkpoint-*"))[-1] == f"checkpoint-{STEPS}"


def test_only_a_second_signal_waits_for_no_save():
    with Preemption(None, 5) as asked:
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)  # there is nothing to save yet
        assert caught.type is SystemExit
        asked._is_held = True
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_asked
        with pytest.raises(EndedAtOnceError):
            signal.raise_signal(signal.SIGTERM)


def test_saves_are_due_by_the_clock_and_say_what_they_cost(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(saves, "time", SimpleNamespace(monotonic=lambda: now_s))
    made = SaveTimes(1)
    made.begin()
    assert made.summary() == {}
    now_s = 59.0
    assert [made.is_due(is_last=last) for last in (False, True)] == [False, True]
    now_s = 60.0
    assert made.is_due(is_last=False)
    made.begin_save()
    now_s = 130.0
    assert not made.is_due(is_last=False), "one is under way"
    made.end_save(3, 7.5)
    assert made.step == 3
    said = "1 checkpoint, for which training waited 7.5 s, 5.8% of the time; --save-every-minutes 2.4 would make it 5%"
    assert made.summary() == {"saving": said}
    now_s = 1000.0
    assert made.summary() == {"saving": "1 checkpoint, for which training waited 7.5 s, 0.8% of the time"}
    assert not SaveTimes(None).is_due(is_last=True)


def test_only_a_lost_rank_is_taken_for_a_stop():
    """An error of this rank's own after a signal is reported."""
    lost, own = OtherRankError("rank 0: expected all ranks to come"), outcore.DiskError("no space left")
    on_lane = outcore.OutcoreError("a lane failed")
    on_lane.__cause__ = lost
    for failure, error, ends_as in (
        (lost, lost, SystemExit),
        (lost, on_lane, SystemExit),
        (lost, own, outcore.DiskError),
        (None, own, outcore.DiskError),
    ):
        preemption = Preemption(None, 60)
        preemption._world = SimpleNamespace(failure=failure)
        with pytest.raises(ends_as), preemption:
            preemption._ask()
            raise error
