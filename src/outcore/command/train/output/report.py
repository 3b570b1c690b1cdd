"""Reports on a run while it goes: on the terminal and, a line a step, in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TextIO, final

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState

from outcore.command.progress import ProgressFunctions, StepReport, progress
from outcore.command.train.output.folder import METRICS, PLAN, OutputFolder
from outcore.command.train.output.prediction import LaneTimes, PredictionComparison
from outcore.command.train.output.trace import StepTracer
from outcore.core.quantities import format_bytes
from outcore.engine.module.timing import timing
from outcore.engine.optimizer import StreamedOptimizer
from outcore.memory.files.staged_files import sync
from outcore.spec.plan import Tier
from outcore.spec.timeline import COMPUTE

# Names in a Trainer's logs whose values are written in another form: renamed, per step instead of per run, or by lane.
_ELSEWHERE = ("learning_rate", "num_tokens", "moved_bytes", "exposed_s", "epoch")
_JUDGED = {"rewards/margins": "margin", "rewards/accuracies": "accuracy"}
"""TRL's measures of preferences that the bar shows -> their names there."""
WATCHED_STEPS = 3
"""Steps in which lanes are watched to say why steps are far off."""


@final
class RunReport(TrainerCallback):  # type: ignore[misc]  # the library has no types here
    """Follows a run as a callback of its Trainer. As a context manager it ends the bar and closes the files."""

    def __init__(
        self,
        console: Console,
        output: OutputFolder,
        trace: Path | None,
        peak_bytes: Mapping[Tier, int],
        comparison: PredictionComparison,
    ) -> None:
        """Report nothing yet.

        Args:
            console: A terminal gets a bar, anything else plain lines.
            output: Begun when training begins; gets ``plan.json`` and ``metrics.jsonl``.
            trace: File that gets a timeline of a few steps.
            peak_bytes: What the plan takes on each tier; activations come on top.
            comparison: Compares the predicted steps with those that come.
        """
        self._console, self._output, self._trace = console, output, trace
        self._closing = ExitStack()
        self._shown: ProgressFunctions
        self._file: TextIO
        self._optimizer: StreamedOptimizer
        self._peak_bytes, self._comparison = peak_bytes, comparison
        self._meter: _StepMeter
        self._reported = (0, 0)  # steps and tokens
        self._tracer: StepTracer | None = None
        self._begun_s = time.perf_counter()
        self._trained = (0, 0, 0.0, 0.0)  # steps, tokens and seconds of this run, and its last loss

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the files and the bar: from now on what the run writes stays."""
        self._optimizer = kwargs["optimizer"]
        self._begun_s = time.perf_counter()
        self._output.begin()
        self._optimizer.plan.save(self._output.path / PLAN)
        path = self._output.path / METRICS
        keep_until(path, state.global_step, is_evaluated=not args.eval_on_start)
        self._file = self._closing.enter_context(path.open("a"))
        shown = progress(self._console, state.max_steps, done=state.global_step)
        self._shown = self._closing.enter_context(shown)
        recorder = self._optimizer.engine.device.recorder
        self._closing.enter_context(timing(self._optimizer.engine.model, recorder))
        if self._trace is not None:
            self._tracer = StepTracer(self._trace, recorder, done=state.global_step, steps=state.max_steps)
            self._closing.callback(self._tracer.close)
        self._reported = (state.global_step, 0)
        self._meter = _StepMeter(self._optimizer)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let the meter go on, and begin to record if this is the first step to trace."""
        self._meter.go_on()
        if self._tracer is not None:
            self._tracer.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step, and pause the meter for what may follow: evaluation, saving, a trace."""
        self._shown.move_to(state.global_step)
        self._explain(state)
        if self._tracer is not None and self._tracer.is_last(state.global_step):
            self._meter.stop()
            self._tracer.close()
            self._meter.go_on()
        self._pause_before(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pause for evaluation and saving."""
        self._pause_before(control)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        """Write what a step did or an evaluation measured. The Trainer's summary at the end is left out."""
        line = {"step": state.global_step, "epoch": state.epoch}
        if "loss" in logs:
            now = (state.global_step, int(logs["num_tokens"]))
            steps, tokens = now[0] - self._reported[0], now[1] - self._reported[1]
            self._reported = now
            lap = self._meter.lap(steps=steps, tokens=tokens) | self._comparison.facts()
            done = self._trained
            self._trained = (done[0] + steps, done[1] + tokens, done[2] + steps * lap["step_s"], logs["loss"])
            found = LaneTimes({COMPUTE: lap["compute_s"]}, lap["exposed_s"], lap["moved_bytes"])
            self._comparison.add(lap["step_s"], steps, found)
            self._write(line | _training(logs) | _moving(lap) | {"peak_bytes": self._peak_bytes})
            self._shown.report(
                StepReport(
                    step=state.global_step,
                    seconds=steps * lap["step_s"],
                    loss=logs["loss"],
                    tokens=tokens,
                    moved_bytes=sum(self._optimizer.traffic().values()),
                    exposed_s={lane: steps * seconds for lane, seconds in lap["exposed_s"].items()},
                    of_predicted=self._comparison.so_far,
                    judged={name: logs[key] for key, name in _JUDGED.items() if key in logs},
                )
            )
            if self._comparison.is_off:
                self._meter.watch()
        elif any(name.startswith("eval_") for name in logs):
            values = {name: value for name, value in logs.items() if name not in _ELSEWHERE}
            self._write(line | values)
            said = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if name.endswith("loss"))
            self._console.print(f"step {state.global_step}: {said}", soft_wrap=True)

    def _explain(self, state: TrainerState) -> None:
        """Say why steps are far off their prediction, once lanes have been watched."""
        found = self._meter.watched(is_last=state.global_step == state.max_steps)
        if found is not None and self._comparison.is_off:  # steps may be as predicted again
            why = self._comparison.why(found)
            said = f"step {state.global_step}: {why}; outcore probe measures the machine again, --resume plans for it"
            self._console.print(said, markup=False, soft_wrap=True)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the files. The bar stays as it is."""
        self._closing.close()

    def summary(self) -> dict[str, str]:
        """Return what the run was: name -> text."""
        took = timedelta(seconds=round(time.perf_counter() - self._begun_s))
        planned = ", ".join(f"{tier} {format_bytes(n)}" for tier, n in self._peak_bytes.items() if n)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        steps, tokens, took_s, loss = self._trained
        speed = f"{tokens / took_s:,.0f} tokens/s, {took_s / steps:.3g} s per step" if steps else ""
        return (
            ({"final loss": f"{loss:.4f}", "speed": speed} if steps else {})
            | self._comparison.closing()
            | {
                "time": f"{took}, evaluation and saving included",
                "peak memory": f"{planned}, without device activations; this process {format_bytes(resident)} resident",
            }
        )

    def _pause_before(self, control: TrainerControl) -> None:
        """Stop the meter until the next step: ``on_save`` is no end of saving, as it comes some steps later."""
        if control.should_evaluate or control.should_save:
            self._meter.stop()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        self._file.flush()


def finite(value: Any) -> Any:
    """Return a value with None in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_until(metrics: Path, step: int, *, is_evaluated: bool = True) -> None:
    """Drop the lines of steps after ``step``, which will be trained again, and a line that was cut off in writing.

    The file is replaced atomically.

    Args:
        metrics: The file, which may be missing.
        step: The last step that is not trained again.
        is_evaluated: Whether the line of an evaluation after that step stays, too.
    """
    lines = _lines_of(metrics)
    kept = [line for line in lines if _place_of(line) <= (step, is_evaluated)]
    if kept != lines:
        partial = metrics.with_name(metrics.name + ".partial")
        partial.write_text("".join(kept))
        sync(partial)
        partial.replace(metrics)


def _lines_of(metrics: Path) -> list[str]:
    return metrics.read_text().splitlines(keepends=True) if metrics.exists() else []


def _place_of(line: str) -> tuple[float, bool]:
    """Return a line's step, and whether it is an evaluation's, which comes after the step's. Broken lines come last."""
    try:
        found = json.loads(line)
        return (float(found["step"]), "loss" not in found) if line.endswith("\n") else (math.inf, True)
    except (ValueError, LookupError, TypeError):
        return math.inf, True


@final
class _StepMeter:
    """Measures the steps since the last line, without what ran between them."""

    def __init__(self, optimizer: StreamedOptimizer) -> None:
        self._optimizer, self._device = optimizer, optimizer.engine.device
        self._begun = self._read()
        self._stopped: dict[tuple[str, str], float] | None = self._begun
        """What was read when it was stopped; None: it goes on. It is stopped until the first step."""
        self._watched: int | None = None
        """Steps in which lanes have been watched; None: they are not."""

    def watch(self) -> None:
        """Begin to watch lanes in the next steps, unless they are being recorded already."""
        if not self._device.recorder.is_on:
            self._device.recorder.begin(num_steps=WATCHED_STEPS)
            self._watched = 0

    def watched(self, *, is_last: bool) -> LaneTimes | None:
        """Count a step. Returns what lanes did, after the last one of those that are watched; else None.

        Args:
            is_last: No more steps come.
        """
        if self._watched is None:
            return None
        self._watched += 1
        if self._watched < WATCHED_STEPS and not is_last:
            return None
        steps, self._watched, recorder = self._watched, None, self._device.recorder
        self.stop()
        recorder.end()
        found = LaneTimes.of(recorder.timeline(), steps)
        self.go_on()
        return found

    def stop(self) -> None:
        """Pause, unless it is stopped. Waits for what the device was given, which belongs to the steps before."""
        if self._stopped is None:
            self._device.wait("steps over", self._device.mark("steps are over"))
            self._stopped = self._read()

    def go_on(self) -> None:
        """Go on if it is stopped, without counting what happened since: that was no training."""
        if self._stopped is not None:
            now, stopped = self._read(), self._stopped
            self._begun = {key: count + now[key] - stopped[key] for key, count in self._begun.items()}
            self._stopped = None

    def lap(self, *, steps: int, tokens: int) -> dict[str, Any]:
        """Return what happened since the last lap, per step."""
        now = self._read() if self._stopped is None else self._stopped
        per_step = {key: (count - self._begun[key]) / steps for key, count in now.items()}
        self._begun = now
        lanes = self._optimizer.traffic()
        exposed_s = {lane: per_step["exposed_s", lane] for lane in lanes}
        return {
            "tokens_per_s": tokens / steps / per_step["step_s", ""],
            "step_s": per_step["step_s", ""],
            "compute_s": per_step["phases_s", ""] - sum(exposed_s.values()),
            "moved_bytes": {lane: int(per_step["moved_bytes", lane]) for lane in lanes},
            "exposed_s": exposed_s,
        }

    def _read(self) -> dict[tuple[str, str], float]:
        """Read all counters: (what, lane) -> its value."""
        found: dict[tuple[str, str], float] = {("step_s", ""): time.perf_counter()}
        found["phases_s", ""] = self._device.recorder.phases_s()
        found |= {("moved_bytes", lane): count for lane, count in self._optimizer.traffic().items()}
        return found | {("exposed_s", lane): count for lane, count in self._optimizer.exposed_s().items()}


def _moving(lap: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out lanes that move nothing and are not waited for."""
    return {
        name: {lane: n for lane, n in value.items() if n} if isinstance(value, Mapping) else value
        for name, value in lap.items()
    }


def _training(logs: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in logs.items() if name not in _ELSEWHERE}
    return {**values, "lr": logs["learning_rate"], "grad_norm": logs.get("grad_norm")}
