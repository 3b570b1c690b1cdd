"""``--trace``: a timeline of a few steps, written as soon as they are over, never over something else."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outcore.command.train import run as train_run
from outcore.command.train.output import trace
from outcore.command.train.output.trace import StepTracer, trace_target, write_trace
from outcore.core.errors import ConfigError
from outcore.spec.timeline import TRACE_BEGINNING, Span, Timeline

from .conftest import TIERS, read_jsonl

SHORT = ("--batch-size", 2, "--seq-len", 48, "--lr", 1e-2)
TIMELINE = Timeline((Span("h2d", "fetch", 0.0, 1.0),))


@pytest.fixture
def shared(config_json: Path, text: Path, tmp_path: Path) -> tuple[Any, ...]:
    return ("train", "--model", config_json, "--data", text, *SHORT, *TIERS, "--disk", tmp_path)


def rows(path: Path) -> dict[str, list[str]]:
    """Row -> names of its events."""
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[str]] = {name: [] for name in named.values()}
    for event in events:
        if event["ph"] == "X":
            found[named[event["tid"]]].append(event["name"])
    return found


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Press Ctrl-C in the middle of the step after ``step``."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_run.RunReport, "on_substep_end", on_substep_end)


class TestRun:
    def test_three_steps_after_two_are_there_with_all_lanes(self, command, shared, tmp_path):
        trace = tmp_path / "run" / "trace.json"  # in a folder that the run makes
        done = command(*shared, "--steps", 7, "--out", tmp_path / "run", "--trace", trace)
        assert done.status == 0, done.err
        found = rows(trace)
        compute = [name for name in found["compute"] if name in ("forward", "backward", "step")]
        assert compute == ["forward", "backward", "step"] * 3
        assert {"forward model.layers.0", "backward model.layers.2"} <= set(found["compute"])
        assert all(found[lane] for lane in ("write_back", "d2h", "update", "states_read", "states_write"))
        assert {p.name for p in trace.parent.iterdir()} == {"metrics.jsonl", "model", "plan.json", "trace.json"}

    def test_nothing_changes_by_it(self, command, shared, tmp_path):
        for name, more in (("plain", ()), ("traced", ("--trace", tmp_path / "trace.json"))):
            assert command(*shared, "--steps", 6, "--out", tmp_path / name, *more).status == 0
        lines = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("plain", "traced")]
        for key in ("loss", "grad_norm", "moved_bytes"):
            assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]]

    @pytest.mark.parametrize(("after", "steps"), [(1, None), (3, 1), (5, 3)])
    def test_an_interrupted_run_leaves_what_was_recorded(self, command, shared, tmp_path, monkeypatch, after, steps):
        """Before the recorded steps nothing is written; during them what there is so far; after them everything."""
        trace = tmp_path / "trace.json"
        stop_after(monkeypatch, after)
        more = ("--set", "gradient_accumulation_steps=2", "--trace", trace)
        stopped = command(*shared, "--steps", 7, "--out", tmp_path / "run", *more)
        assert stopped.status == 130
        assert trace.exists() == (steps is not None)
        if steps is not None:
            assert rows(trace)["compute"].count("step") == steps
        assert not list(tmp_path.glob(".trace-*"))

    def test_a_resumed_run_records_steps_of_its_own(self, command, shared, tmp_path):
        trace = tmp_path / "trace.json"
        more = ("--save-every", 2, "--out", tmp_path / "run", "--trace", trace)
        assert command(*shared, "--steps", 2, *more).status == 0
        assert rows(trace)["compute"].count("step") == 2
        assert command(*shared, "--steps", 3, *more, "--resume").status == 0
        assert rows(trace)["compute"].count("step") == 1, "replaced"
        trace.unlink()
        done = command(*shared, "--steps", 3, *more, "--resume")
        assert f"no trace was recorded: {trace}" in done.out.splitlines()
        assert not trace.exists()

    def test_a_drive_that_is_full_by_then_costs_only_the_trace(self, command, shared, tmp_path, monkeypatch):
        write = Path.write_text

        def failing(path, *args, **kwargs):
            written = write(path, *args, **kwargs)
            if path.name == "trace.json":
                raise OSError(28, "No space left on device")
            return written

        monkeypatch.setattr(Path, "write_text", failing)
        trace = tmp_path / "trace.json"
        done = command(*shared, "--steps", 4, "--out", tmp_path / "run", "--trace", trace)
        assert done.status == 0
        assert f"note: --trace: '{trace}' could not be written: No space left on device" in done.err.splitlines()
        assert not [*tmp_path.glob("trace*"), *tmp_path.glob(".trace*")]

    def test_a_dry_run_writes_none(self, command, shared, tmp_path):
        before = sorted(tmp_path.rglob("*"))
        done = command(*shared, "--out", tmp_path / "run", "--trace", tmp_path / "run" / "trace.json", "--dry-run")
        assert done.status == 0, done.err
        assert ["trace", str(tmp_path / "run" / "trace.json")] in [line.split() for line in done.out.splitlines()]
        assert sorted(tmp_path.rglob("*")) == before


class FakeRecorder:
    """Knows whether it is on, and records nothing."""

    def __init__(self):
        self.is_on = False

    def begin(self, *, num_steps):
        assert num_steps == 3
        self.is_on = True

    def end(self):
        self.is_on = False

    def timeline(self):
        return TIMELINE


@pytest.mark.parametrize(
    ("done", "steps", "recorded"),
    [(0, 1, [1]), (0, 3, [1, 2, 3]), (0, 4, [2, 3, 4]), (0, 5, [3, 4, 5]), (0, 100, [3, 4, 5]), (90, 100, [93, 94, 95]),
     (98, 100, [99, 100])],
)  # fmt: skip
def test_steps_to_record(done, steps, recorded, monkeypatch):
    recorder, writes = FakeRecorder(), []
    monkeypatch.setattr(trace, "write_trace", lambda _, timeline: writes.append(timeline))
    tracer = StepTracer(Path("t.json"), recorder, done=done, steps=steps)
    found = []
    for step in range(done + 1, steps + 1):
        tracer.begin_step(step)
        if recorder.is_on:
            found.append(step)
        if tracer.is_last(step):
            tracer.close()
            assert writes == [TIMELINE]
    for _ in range(2):
        tracer.close()
    assert found == recorded
    assert writes == [TIMELINE]


class TestFile:
    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        return tmp_path / "run"

    @pytest.mark.parametrize("content", ["", TIMELINE.to_trace()])
    def test_an_older_trace_is_replaced(self, tmp_path, out, content):
        path = tmp_path / "trace.json"
        path.write_text(content)
        write_trace(trace_target(path, out=out), TIMELINE)
        assert path.read_text() == TIMELINE.to_trace()
        assert list(tmp_path.iterdir()) == [path]

    def test_a_neighbour_of_any_name_stays(self, tmp_path, out):
        neighbour = tmp_path / "trace.json.partial"
        neighbour.write_text("mine")
        write_trace(trace_target(tmp_path / "trace.json", out=out), TIMELINE)
        assert neighbour.read_text() == "mine"
        assert sorted(tmp_path.iterdir()) == [tmp_path / "trace.json", neighbour]

    def test_a_link_stays_one(self, tmp_path, out):
        (tmp_path / "real").mkdir()
        link = tmp_path / "trace.json"
        link.symlink_to(tmp_path / "real" / "t.json")
        write_trace(trace_target(link, out=out), TIMELINE)
        assert link.is_symlink()
        assert (tmp_path / "real" / "t.json").read_text().startswith(TRACE_BEGINNING)

    @pytest.mark.parametrize("content", ["{", '{"traceEvents": []}', TRACE_BEGINNING[:-1], "loss\n"])
    def test_anything_else_stays(self, tmp_path, out, content):
        path = tmp_path / "data.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match="--trace: expected a new file or an older trace .*data.json' holds"):
            trace_target(path, out=out)
        assert path.read_text() == content

    def test_nothing_is_made_by_looking(self, tmp_path, out):
        trace_target(tmp_path / "trace.json", out=out)
        trace_target(out / "trace.json", out=out)
        trace_target(tmp_path / "plan.json", out=out)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "metrics.jsonl.partial", "model", "checkpoint-3"])
    def test_names_of_the_run_itself_are_refused(self, out, name):
        with pytest.raises(ConfigError, match="--trace: expected a file of its own, but the run itself writes"):
            trace_target(out / name, out=out)

    @pytest.mark.parametrize("name", ["model/t.json", "checkpoint-4/t.json", "checkpoint-4/deep/t.json", "."])
    def test_so_is_what_lies_in_its_folders(self, out, name):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with pytest.raises(ConfigError, match="--trace: expected a file of its own, but the run itself writes"):
            trace_target(out / name, out=out)

    def test_other_folders_in_the_output_may_hold_it(self, out):
        (out / "traces").mkdir(parents=True)
        path = out / "traces" / "model"
        write_trace(trace_target(path, out=out), TIMELINE)
        assert path.exists()

    def test_a_circle_of_links(self, tmp_path, out):
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        with pytest.raises(ConfigError, match="--trace: expected"):
            trace_target(tmp_path / "a", out=out)

    def test_what_may_not_be_written_is_refused(self, tmp_path, out, monkeypatch):
        """Root may write everywhere, so missing permissions are simulated."""
        path = tmp_path / "trace.json"
        path.write_text("")
        monkeypatch.setattr("os.access", lambda *_: False)
        with pytest.raises(ConfigError, match="--trace: expected a file to write to, but .* Permission denied"):
            trace_target(path, out=out)
        path.unlink()
        monkeypatch.setattr("tempfile.TemporaryFile", partial(_fail, OSError(30, "Read-only file system")))
        with pytest.raises(ConfigError, match="--trace: expected a file to write to, but .* Read-only file system"):
            trace_target(path, out=out)


def _fail(error: Exception, **_: object) -> None:
    raise error
