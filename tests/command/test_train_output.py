"""What a run reports while it trains, and how it treats its output folder."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nursery
import pytest
import torch
from accelerate import Accelerator
from outside.calls import Call, watched
from rich.console import Console
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from trl import SFTTrainer

from outcore.api import prepare_in_loop
from outcore.command.progress import ProgressFunctions
from outcore.command.train import run as train_run
from outcore.command.train.methods import FINE_TUNING
from outcore.command.train.output import folder as output
from outcore.command.train.output import notices as noticing
from outcore.command.train.output import report
from outcore.command.train.output.folder import OutputFolder
from outcore.command.train.output.notices import notices
from outcore.command.train.output.report import keep_until
from outcore.core.errors import ConfigError
from outcore.device.faults import Faults
from outcore.engine.optimizer import StreamedOptimizer
from outcore.integrations import transformers as mixin
from outcore.spec.lane_names import Lane

from .conftest import TIERS, Run, read_jsonl, replaced, write_jsonl

LANES = {lane.value for lane in Lane}
SHORT = ("--steps", 4, "--batch-size", 2, "--seq-len", 48)


class TestMetrics:
    @pytest.fixture
    def few(self, tmp_path: Path) -> Path:
        """Two rows to evaluate on, one per batch."""
        path = tmp_path / "few.txt"
        path.write_text("that evaluates " * 8)
        return path

    @pytest.fixture
    def lines(self, command: Run, config_json: Path, text: Path, few: Path, tmp_path: Path) -> list[dict[str, Any]]:
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path, *TIERS)
        more = ("--eval-data", few, "--set", "eval_steps=2", "--set", "logging_steps=1")
        assert command(*shared, *more, "--out", tmp_path / "run").status == 0
        return read_jsonl(tmp_path / "run" / "metrics.jsonl")

    def test_a_line_per_step_and_per_evaluation(self, lines, tmp_path):
        assert [(line["step"], "eval_loss" in line) for line in lines] == [
            (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
        ]  # fmt: skip
        for line in (line for line in lines if "loss" in line):
            assert {"epoch", "loss", "lr", "grad_norm", "mean_token_accuracy"} <= line.keys()
            assert line["predicted_step_s"] is None
            assert line["tokens_per_s"] == pytest.approx(2 * 48 / line["step_s"]), "packed rows are full"
            assert LANES > line["moved_bytes"].keys() > {"states_read", "states_write"}
            assert all(line["moved_bytes"].values()), "lanes of zero are left out"
            assert all(0 < seconds < line["step_s"] for seconds in line["exposed_s"].values())
            assert 0 < line["compute_s"] <= line["step_s"] - sum(line["exposed_s"].values())
            plan = json.loads((tmp_path / "run" / "plan.json").read_text())
            assert line["peak_bytes"] == plan["tier_bytes"]
        assert lines[0]["lr"] == 2e-5
        assert lines[4]["lr"] == pytest.approx(0.5e-5)

    def test_the_metrics_of_an_evaluation_are_those_that_may_choose_the_best_model(self, lines):
        (found, *_) = ({name for name in line if name.startswith("eval_")} for line in lines if "eval_loss" in line)
        assert found | {"eval_aux_loss"} == set(FINE_TUNING.metrics)

    def test_compute_and_waits_explain_model_and_step(self, command, config_json, text, tmp_path, monkeypatch):
        """Blocks sleep so that no other compute matters, and lanes are so slow that compute waits for them."""
        took_s = [0.0]
        faults = Faults(throttle={"h2d": 2**20, "d2h": 2**20, "update": 8 * 2**20, "states_read": 2**23})
        monkeypatch.setattr(mixin, "prepare_in_loop", partial(prepare_in_loop, faults=faults))
        forward = LlamaDecoderLayer.forward

        def sleeping(self, *args, **kwargs):
            time.sleep(0.04)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(LlamaDecoderLayer, "forward", sleeping)
        for owner, name in ((SFTTrainer, "compute_loss"), (Accelerator, "backward"), (StreamedOptimizer, "step")):
            monkeypatch.setattr(owner, name, timed(getattr(owner, name), took_s))
        # The weights of two blocks are on the host and are fetched.
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path)
        more = ("--device-memory", "140KiB", "--host-memory", "520KiB")
        shares = []
        while len(shares) < 9 and pytest.approx(1.0, rel=0.05) not in shares:  # TRL's own loss is sometimes slow
            took_s[0], out = 0.0, tmp_path / f"run {len(shares)}"
            assert command(*shared, *more, "--out", out).status == 0
            lines = read_jsonl(out / "metrics.jsonl")
            exposed_s = sum(sum(line["exposed_s"].values()) for line in lines)
            explained_s = exposed_s + sum(line["compute_s"] for line in lines)
            assert exposed_s > 0.2
            assert explained_s <= sum(line["step_s"] for line in lines)
            shares.append(explained_s / took_s[0])
        assert shares[-1] == pytest.approx(1.0, rel=0.05), shares

    def test_bytes_are_those_of_the_step(self, lines):
        """Each step moves the same bytes; evaluation only reads weights, which are on the device here."""
        moved = [line["moved_bytes"] for line in lines if "loss" in line]
        assert moved[1] == moved[2] == moved[3]
        assert moved[1]["states_write"] > 0

    def test_a_line_is_there_at_once(self, command, config_json, text, tmp_path, monkeypatch):
        seen, begin = [], train_run.RunReport.on_step_begin

        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
            begin(self, args, state, control, **kwargs)

        monkeypatch.setattr(train_run.RunReport, "on_step_begin", on_step_begin)
        assert command("train", "--model", config_json, "--data", text, *SHORT, "--out", tmp_path / "run").status == 0
        assert seen == [0, 1, 2, 3]

    @pytest.mark.parametrize("logging_steps", [1, 2])
    def test_evaluation_and_saving_are_not_counted_as_training(
        self, command, config_json, text, few, tmp_path, monkeypatch, logging_steps
    ):
        """All else is: a checkpoint is durable, and callbacks hear of it, while later steps are trained."""
        skipped_s, moved = [0.0], list[list[dict[str, int]]]()
        for name in ("evaluate", "_save_checkpoint"):
            monkeypatch.setattr(SFTTrainer, name, skipping(getattr(SFTTrainer, name), skipped_s))
        monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped_s[0]))
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path, *TIERS)
        shared += ("--set", f"logging_steps={logging_steps}")
        for name, more in (("bare", ()), ("run", ("--eval-data", few, "--set", "eval_steps=1", "--save-every", 1))):
            assert command(*shared, *more, "--out", tmp_path / name).status == 0
            lines = [line for line in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in line]
            assert all(0 < line["compute_s"] < line["step_s"] < 500 for line in lines)
            moved.append([line["moved_bytes"] for line in lines])
        assert skipped_s == [8000]
        assert moved[0] == moved[1]

    def test_the_bar_moves_with_steps_that_have_no_line(self, command, config_json, text, tmp_path, monkeypatch):
        moved = list[int]()
        begin = report.progress

        @contextmanager
        def progress(*args: Any, **options: Any) -> Iterator[ProgressFunctions]:
            with begin(*args, **options) as shown:
                yield shown._replace(move_to=moved.append)

        monkeypatch.setattr(report, "progress", progress)
        files = ("--model", config_json, "--data", text, "--out", tmp_path / "run")
        assert command("train", *files, *SHORT, "--set", "logging_steps=3").status == 0
        assert moved == [1, 2, 3, 4]

    def test_several_steps_in_a_line_are_averaged(self, command, config_json, text, few, tmp_path):
        """Evaluations between the steps do not matter."""
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path, *TIERS)
        for every, more in ((1, ()), (2, ("--eval-data", few, "--set", "eval_steps=1"))):
            settings = ("--out", tmp_path / str(every), "--set", f"logging_steps={every}", *more)
            assert command(*shared, *settings).status == 0
        one, two = (
            [line for line in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in line] for name in ("1", "2")
        )
        assert [line["step"] for line in two] == [2, 4]
        assert two[1]["moved_bytes"] == one[3]["moved_bytes"]
        assert two[1]["tokens_per_s"] == pytest.approx(2 * 48 / two[1]["step_s"])

    def test_lines_are_durable_before_the_checkpoint(self, command, config_json, text, tmp_path):
        """Otherwise a power loss could leave a checkpoint after steps that have no line and are not trained again."""
        out, calls = tmp_path / "run", []

        def note(call: Call, make: Callable[..., Any]) -> Any:
            if call.path.endswith("/metrics.jsonl"):
                calls.append(call.name)
            elif call.name == "rename" and Path(call.to).parent == out:
                calls.append(Path(call.to).name)
            return make()

        with watched(out, note):
            done = command("train", "--model", config_json, "--data", text, *SHORT, "--out", out, "--save-every", 2)
        assert done.status == 0, done.err
        assert [name for name in calls if name not in ("write", "fsync")] == [
            *("plan.json", "create", "checkpoint-2", "checkpoint-4", "model")
        ]
        for steps in (2, 4):  # training goes on while a checkpoint is written, so later lines may be there already
            before = calls[: calls.index(f"checkpoint-{steps}")]
            synced = before[: len(before) - before[::-1].index("fsync")]
            assert synced.count("write") >= steps

    @pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', '{"epoch": 1}\n', "\n", "[]\n"])
    def test_on_resume_later_and_torn_lines_go(self, tmp_path, torn):
        path = write_jsonl(tmp_path / "metrics.jsonl", [{"step": n // 2} for n in range(8)])
        with path.open("a") as file:
            file.write(torn)
        keep_until(path, 2)
        assert [line["step"] for line in read_jsonl(path)] == [0, 0, 1, 1, 2, 2]
        assert list(tmp_path.iterdir()) == [path]

    def test_an_evaluation_that_is_made_again_goes(self, tmp_path):
        lines = [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 2.0}, {"step": 2, "loss": 1.0}]
        path = write_jsonl(tmp_path / "metrics.jsonl", [*lines, {"step": 2, "eval_loss": 1.0}])
        keep_until(path, 2, is_evaluated=False)
        assert read_jsonl(path) == lines

    def test_an_evaluation_at_the_start_is_there_once(self, command, config_json, text, tmp_path):
        out, shared = tmp_path / "run", ("train", "--model", config_json, "--data", text, *SHORT, "--eval-data", text)
        shared = (*shared, "--set", "eval_on_start=true", "--save-every", 2, "--out", out)
        assert command(*shared).status == 0
        shutil.rmtree(out / "checkpoint-4")
        assert command(*shared, "--resume").status == 0
        assert [line["step"] for line in read_jsonl(out / "metrics.jsonl")] == [0, 1, 2, 2, 3, 4, 4]

    def test_nothing_to_drop_is_no_error(self, tmp_path):
        keep_until(tmp_path / "metrics.jsonl", 2)
        assert not list(tmp_path.iterdir())


def timed(function: Callable[..., Any], took_s: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took_s[0] += time.perf_counter() - start_s

    return run


def skipping(function: Callable[..., Any], skipped_s: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        skipped_s[0] += 1000
        return function(*args, **kwargs)

    return run


class TestTerminal:
    def test_plain_lines_where_there_is_none(self, command, config_json, text, tmp_path):
        done = command("train", "--model", config_json, "--data", text, *SHORT, "--out", tmp_path / "run")
        lines = done.out.splitlines()
        assert lines[0] == "Settings"
        assert "Plan" in lines
        assert len([line for line in lines if line.startswith("step ")]) == 4
        end = [" ".join(line.split()) for line in lines[lines.index("Done") :]]
        assert end[1] == "steps 4"
        assert end[2] == f"final loss {read_jsonl(tmp_path / 'run' / 'metrics.jsonl')[-1]['loss']:.4f}"
        assert [line.split()[0] for line in end[3:7]] == ["speed", "time", "peak", "model"]
        assert f'(pipeline("text-generation", "{tmp_path / "run" / "model"}")("Hello", ' in end[-1]
        assert "\x1b" not in done.out
        assert all(line.startswith("note: ") for line in done.err.splitlines())

    def test_a_bar_on_a_terminal(self, command, config_json, text, tmp_path, monkeypatch):
        screen = io.StringIO()
        monkeypatch.setattr(
            train_run, "Terminal", lambda **options: Console(file=screen, force_terminal=True, width=100, **options)
        )
        more = ("--eval-data", text, "--set", "eval_steps=2")
        done = command("train", "--model", config_json, "--data", text, *SHORT, "--out", tmp_path / "run", *more)
        assert done.status == 0
        assert "━" in screen.getvalue()
        assert "step 4: eval_loss" in screen.getvalue()
        assert "step 4/4  loss" not in screen.getvalue(), "no plain lines beside the bar"

    def test_at_80_columns_nothing_breaks_and_the_snippet_works(
        self, command, config_json, text, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        screen = io.StringIO()
        monkeypatch.setattr(
            train_run, "Terminal", lambda **options: Console(file=screen, force_terminal=True, width=80, **options)
        )
        shared = (
            "train",
            "--model",
            "config.json",
            "--data",
            "text.txt",
            "--out",
            "run",
            *SHORT,
            "--disk",
            ".",
            *TIERS,
        )
        assert command(*shared).status == 0
        shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n")
        lines = [line.rstrip() for line in shown.splitlines()]
        *others, snippet = lines
        assert max(map(len, others)) <= 80, "a command for a shell stays one line"
        assert any(line.startswith("step 4/4 ") for line in lines[: lines.index("Done")]), "the bar stays"
        typed = shlex.split(snippet.replace("max_new_tokens=50", "max_new_tokens=1"))
        assert subprocess.run(typed, capture_output=True, text=True, check=True).stdout.startswith("Hello")

    def test_facts_are_said_before_the_run(self, command, config_json, text, tmp_path):
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path, *TIERS, "--lora", 2)
        done = command(*shared, "--eval-data", text, "--out", tmp_path / "run", "--dry-run")
        assert done.status == 0, done.err
        said = {}
        for line in done.out.splitlines():
            name, _, value = line.partition("  ")
            said[name] = value.strip()
        assert f"torch {torch.__version__} sees no accelerator" in done.out
        assert "is_gradient_checkpointing" not in done.err, "PEFT asks Transformers by an old name"
        assert said["parameters"] == "42,688"
        assert (said["trained"], said["frozen"]) == ("2,784 (6.52%)", "39,904 (93.48%)")
        assert said["device budget"] == "260.00 KiB (266,240 bytes)"
        assert said["disk budget"].endswith(f" bytes) in {tmp_path}")
        assert said["rows"] == "101, packed, 4,840 tokens"
        assert said["an epoch"] == "51 steps"
        assert said["a step"] == "95 tokens on average"
        assert said["the run"] == "4 steps, 0.08 epochs"
        assert said["evaluation"].startswith("101 rows") or "evaluation  101 rows" in done.out
        assert not re.search(r"\bif\b|up to|what is free", done.out)
        assert not (tmp_path / "run").exists()

    def test_what_is_cut_is_said_once_with_its_number(self, command, config_json, chats, tmp_path):
        shared = ("train", "--model", config_json, "--data", chats, *SHORT, "--seq-len", 40, "--eval-data", chats)
        done = command(*replaced(*shared, "--out", tmp_path / "run", "--set", "assistant_only_loss=true"))
        assert done.status == 0
        said = [line for line in done.err.splitlines() if "rows have more than" in line]
        assert len(said) == 2
        assert said[0].startswith("note: --data: 11 of 11 rows have more than 40 tokens and are cut")
        assert said[1].startswith("note: --eval-data: 11 of 11")

    def test_packed_text_is_not_cut(self, command, config_json, text, tmp_path):
        done = command("train", "--model", config_json, "--data", text, *SHORT, "--out", tmp_path / "run")
        assert "are cut" not in done.err

    def test_a_tracker_is_told(self, command, config_json, text, tmp_path, monkeypatch):
        from transformers.integrations import integration_utils

        logged: list[dict[str, float]] = []

        class Tracker(train_run.RunReport.__base__):
            def on_log(self, args, state, control, logs, **kwargs):
                logged.append(dict(logs))

        monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
        monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Tracker)
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--report-to", "tensorboard")
        done = command(*shared, "--out", tmp_path / "run")
        assert done.status == 0, done.err
        lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
        assert [logs["loss"] for logs in logged if "loss" in logs] == [line["loss"] for line in lines]


class TestNotices:
    def said(self, capsys: pytest.CaptureFixture[str]) -> list[str]:
        return capsys.readouterr().err.splitlines()

    def test_each_is_said_once_in_a_line(self, capsys):
        with notices():
            for _ in range(3):
                warnings.warn("a long\n  story", FutureWarning, stacklevel=1)
                warnings.warn("for whoever wrote the library", DeprecationWarning, stacklevel=1)
                logging.getLogger("transformers.trainer").warning("%d rows", 3)
                logging.getLogger("trl").info("not worth it")
        assert self.said(capsys) == ["note: a long story", "note: 3 rows"]

    def test_pages_are_cut(self, capsys):
        with notices():
            logging.getLogger("datasets").error("word " * 1000)
        (line,) = self.said(capsys)
        assert len(line) < 420
        assert line.endswith("...")

    def test_everything_is_as_it_was_afterwards(self):
        loggers = [logging.getLogger(name) for name in noticing.LIBRARIES]

        def state() -> list[tuple[Any, ...]]:
            return [(log.level, list(log.handlers), log.propagate) for log in loggers] + [(warnings.showwarning,)]

        with notices():  # imports the libraries, which then set up their loggers
            pass
        before = state()
        with pytest.raises(ValueError, match="stop"), notices():
            raise ValueError("stop")
        assert state() == before


class TestFolder:
    def tree(self, folder: Path) -> list[Path]:
        return sorted(folder.rglob("*"))

    def test_what_was_made_goes_if_the_run_does_not_begin(self, tmp_path):
        (tmp_path / "there").mkdir()
        for path in (tmp_path / "a" / "b" / "c", tmp_path / "there"):
            before = self.tree(tmp_path)
            output = OutputFolder(path, resume=False)
            with pytest.raises(ConfigError, match="stop"), output.opened() as cache:
                (cache / "rows").write_text("x")
                assert cache.parent == path
                raise ConfigError("stop")
            assert self.tree(tmp_path) == before

    def test_what_others_put_beside_it_stays(self, tmp_path):
        output = OutputFolder(tmp_path / "a" / "b", resume=False)
        with pytest.raises(ConfigError, match="stop"), output.opened():
            (tmp_path / "a" / "mine").write_text("x")
            raise ConfigError("stop")
        assert self.tree(tmp_path) == [tmp_path / "a", tmp_path / "a" / "mine"]

    def test_a_run_that_has_begun_keeps_all_but_the_cache(self, tmp_path):
        output = OutputFolder(tmp_path / "run", resume=False)
        with pytest.raises(ConfigError, match="stop"), output.opened() as cache:
            (cache / "rows").write_text("x")
            output.begin()
            (tmp_path / "run" / "plan.json").write_text("{}")
            raise ConfigError("stop")
        assert self.tree(tmp_path) == [tmp_path / "run", tmp_path / "run" / "plan.json"]

    def test_an_unfinished_model_never_stands_as_model(self, tmp_path):
        output = OutputFolder(tmp_path, resume=False)
        with output.new_model() as folder:
            (folder / "a").write_text("1")
        with pytest.raises(ValueError, match="stop"), output.new_model() as folder:
            (folder / "a").write_text("2")
            raise ValueError("stop")
        assert (tmp_path / "model" / "a").read_text() == "1"
        with output.new_model() as folder:
            assert not list(folder.iterdir())
            (folder / "b").write_text("3")
        assert self.tree(tmp_path) == [tmp_path / "model", tmp_path / "model" / "b"]

    def test_the_newest_complete_checkpoint(self, tmp_path):
        for step, state in ((9, "{}"), (10, "{}"), (11, '{"log'), (100, None)):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            if state is not None:
                (folder / "trainer_state.json").write_text(state)
        (tmp_path / "checkpoint-best").mkdir()
        (tmp_path / ".outcore-data-of-a-killed-run").mkdir()
        output = OutputFolder(tmp_path, resume=True)
        assert output.checkpoint is not None
        assert (output.checkpoint.path.name, output.checkpoint.step) == ("checkpoint-10", 10)
        assert sorted(p.name for p in output.incomplete) == ["checkpoint-100", "checkpoint-11"]
        with output.opened() as cache:
            output.begin()
            assert cache.is_dir()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9", "checkpoint-best"]

    @pytest.mark.parametrize("left", [(), ("plan.json", "metrics.jsonl"), (".outcore-data-x",), ("checkpoint-3", "x")])
    def test_auto_begins_anew_where_a_run_saved_nothing(self, tmp_path, left):
        out = tmp_path / "run"
        for name in left:
            (out / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match="expected a complete checkpoint .* begin anew with --resume auto"):
            OutputFolder(out, resume=True)
        output = OutputFolder(out, resume="auto")
        assert output.checkpoint is None
        with output.opened() as cache:
            output.begin()
            kept = {name for name in left if name in ("plan.json", "metrics.jsonl", "x")}
            assert {p.name for p in out.iterdir()} == {cache.name, *kept}

    @pytest.mark.parametrize(
        ("there", "said"),
        [(("plan.json", "model"), "only a finished model/"), (("notes",), "one that a run has written to, .* 'notes'")],
    )
    def test_auto_begins_anew_only_where_nothing_is_lost(self, tmp_path, there, said):
        for name in there:
            (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=said):
            OutputFolder(tmp_path, resume="auto")

    def test_only_what_a_run_made_is_removed(self, tmp_path):
        """Files that look like the run's, other programs' folders and older incomplete checkpoints all stay."""
        for step, state in ((3, None), (10, "{}")):
            (tmp_path / f"checkpoint-{step}").mkdir()
            if state is not None:
                (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        (tmp_path / ".data-mine").mkdir()
        (tmp_path / ".outcore-data-file").write_text("")
        (tmp_path / "checkpoint-12").symlink_to(tmp_path / ".data-mine")
        before = self.tree(tmp_path)
        output = OutputFolder(tmp_path, resume=True)
        with output.opened():
            output.begin()
        assert self.tree(tmp_path) == before

    def test_a_checkpoint_that_cannot_be_read_is_not_removed(self, tmp_path, monkeypatch):
        for step in (10, 20):
            (tmp_path / f"checkpoint-{step}").mkdir()
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        read = Path.read_text

        def failing(path, *args, **kwargs):
            if path.parent.name == "checkpoint-20":
                raise OSError(5, "Input/output error")
            return read(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", failing)
        with pytest.raises(ConfigError, match=r"expected to read '.*checkpoint-20/trainer_state.json'"):
            OutputFolder(tmp_path, resume=True)
        assert (tmp_path / "checkpoint-20").exists()

    def test_what_another_run_wrote_stays(self, tmp_path):
        out = tmp_path / "run"
        with OutputFolder(out, resume=False).opened():
            (out / "checkpoint-1").mkdir()  # of a run that began in the meantime
        assert (out / "checkpoint-1").is_dir()

    def test_an_older_model_is_replaced_by_the_last_checkpoint(self, tmp_path):
        for step, best in ((10, None), (20, "somewhere/checkpoint-10")):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": best}))
            (folder / "config.json").write_text(str(step))
        model = tmp_path / "model"
        for is_best, want in ((False, "20"), (True, "10")):
            shutil.rmtree(model, ignore_errors=True)
            model.mkdir()
            os.utime(model, (1, 1))
            output = OutputFolder(tmp_path, resume=True)
            output.model_of(output.checkpoint, best=is_best)
            assert (model / "config.json").read_text() == want
        os.utime(model, None)
        output.model_of(output.checkpoint, best=False)
        assert (model / "config.json").read_text() == "10", "saved after the checkpoint"

    def test_a_full_drive_is_noticed_beforehand(self, tmp_path, monkeypatch):
        output = OutputFolder(tmp_path / "deep" / "run", resume=False)
        free_bytes = shutil.disk_usage(tmp_path).free
        output.refuse_full(free_bytes // 2)
        with pytest.raises(ConfigError, match=r"--out: expected room for 1\.00 TiB .* are free at '.*/deep/run'"):
            output.refuse_full(2**40)


class TestOneRunPerFolder:
    """The second run is refused, and touches nothing."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        return tmp_path / "deep" / "run"

    def test_a_second_run_is_refused_whatever_it_wants(self, out):
        with OutputFolder(out, resume=False).opened():
            (out / "metrics.jsonl").write_text("{}")
            before = sorted(out.rglob("*"))
            for resume in (False, True):
                with pytest.raises(ConfigError, match="--out: expected a folder that no other run .*run'"):
                    OutputFolder(out, resume=resume)
            assert sorted(out.rglob("*")) == before

    def test_two_that_begin_together(self, out):
        one, other = (OutputFolder(out, resume=False) for _ in range(2))
        with one.opened() as cache:
            with pytest.raises(ConfigError, match="no other run writes to"), other.opened():
                raise AssertionError
            assert cache.is_dir()
        assert not out.parent.exists(), "the first one has not begun"
        with other.opened():
            pass

    def test_one_that_looked_before_another_was_there_and_gone(self, out):
        late, resumed = OutputFolder(out, resume=False), None
        with OutputFolder(out, resume=False).opened():
            (out / "checkpoint-1").mkdir()
            (out / "checkpoint-1" / "trainer_state.json").write_text("{}")
        with pytest.raises(ConfigError, match="holds 'checkpoint-1'; pass --resume"), late.opened():
            raise AssertionError
        resumed = OutputFolder(out, resume=True)
        with OutputFolder(out, resume=True).opened():
            (out / "checkpoint-1").rename(out / "checkpoint-2")
            (out / ".outcore-data-killed").mkdir()
        with resumed.opened() as cache:
            resumed.begin()
            assert resumed.checkpoint.step == 2
            assert sorted(out.iterdir()) == sorted([cache, out / "checkpoint-2"])

    def test_a_folder_that_was_removed_meanwhile_is_nobodys(self, out, monkeypatch):
        """Its lock would not keep another run from a new folder of that name."""
        lock = output._lock

        def removing(folder, kind):
            out.rmdir()
            return lock(folder, kind)

        monkeypatch.setattr(output, "_lock", removing)
        with pytest.raises(ConfigError, match="no other run writes to"), OutputFolder(out, resume=False).opened():
            raise AssertionError

    def test_a_drive_without_locks_is_used_without(self, out, monkeypatch):
        def flock(*_):
            raise OSError(9, "Bad file descriptor")

        monkeypatch.setattr(fcntl, "flock", flock)
        with OutputFolder(out, resume=False).opened() as cache:
            assert cache.is_dir()

    def test_a_killed_run_leaves_no_lock_but_a_live_one_holds_it(self, tmp_path):
        code = (
            "import sys, time; from pathlib import Path; from outcore.command.train.output.folder import OutputFolder\n"
            "with OutputFolder(Path(sys.argv[1]), resume=False).opened():\n"
            "    print('locked', flush=True); time.sleep(100)"
        )
        with nursery.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == "locked\n"
                with pytest.raises(ConfigError, match="no other run writes to"):
                    OutputFolder(tmp_path, resume=True)
            finally:
                process.send_signal(signal.SIGKILL)
        (stale,) = tmp_path.iterdir()
        with pytest.raises(ConfigError, match=f"holds '{stale.name}'"):
            OutputFolder(tmp_path, resume=False)

    def test_a_child_that_outlives_its_run_holds_no_lock(self, out, monkeypatch):
        """For example a data loader's worker that has inherited the open folder."""
        out.mkdir(parents=True)
        lock, inherited = output._lock, []

        def inheriting(folder, kind):
            inherited.append(os.dup(folder))
            return lock(folder, kind)

        monkeypatch.setattr(output, "_lock", inheriting)
        for _ in range(2):
            with OutputFolder(out, resume=False).opened():
                pass
        for folder in inherited:
            os.close(folder)
