"""What is told of a run while it goes: on the terminal and, a line a step, in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO, final

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from outcore.cli.progress import Show, StepReport, progress
from outcore.cli.train.output import METRICS, PLAN, OutputFolder
from outcore.planning.reservations import tier_bytes
from outcore.runtime.optimizer import StreamedOptimizer
from outcore.spec.plan import Tier

# Of what a Trainer logs: renamed, counted over the whole run, or there per lane.
_ELSEWHERE = ("learning_rate", "num_tokens", "moved_bytes", "exposed_s", "epoch")


@final
class RunReport(TrainerCallback):  # type: ignore[misc]  # the library has no types here
    """Follows a run as a callback of its Trainer. As a context manager it ends the bar and closes the file."""

    def __init__(self, console: Console, output: OutputFolder) -> None:
        """Remember where to.

        Args:
            console: A terminal gets a bar, anything else plain lines.
            output: Begun when training begins; gets ``plan.json`` and ``metrics.jsonl``.
        """
        self._console, self._output = console, output
        self._closing = ExitStack()
        self._show: Show
        self._file: TextIO
        self._optimizer: StreamedOptimizer
        self._peak_bytes: Mapping[Tier, int]
        self._before: _Counts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Everything is ready: from now on the run leaves something behind."""
        self._optimizer = kwargs["optimizer"]
        # Nothing is taken later; activations come on top.
        self._peak_bytes = tier_bytes(self._optimizer.model_spec, self._optimizer.plan)
        self._output.begin()
        self._optimizer.plan.save(self._output.path / PLAN)
        path = self._output.path / METRICS
        keep_until(path, state.global_step)
        self._file = self._closing.enter_context(path.open("a"))
        shown = progress(self._console, state.max_steps, done=state.global_step)
        self._show = self._closing.enter_context(shown)
        self._before = _Counts(self._optimizer, tokens=0, step=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        """Training logs what a step did, then perhaps an evaluation; at the end a summary, which we leave out."""
        line = {"step": state.global_step, "epoch": state.epoch}
        if "loss" in logs:
            now = _Counts(self._optimizer, tokens=logs["num_tokens"], step=state.global_step)
            self._write(line | _training(logs) | now.since(self._before) | {"peak_bytes": self._peak_bytes})
            self._show(now.report(self._before, logs["loss"]))
            self._before = now
        elif any(name.startswith("eval_") for name in logs):
            values = {name: value for name, value in logs.items() if name not in _ELSEWHERE}
            self._write(line | values)
            said = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if name.endswith("loss"))
            self._console.print(f"step {state.global_step}: {said}", soft_wrap=True)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The next step begins only now."""
        self._before.restart()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The next step begins only now."""
        self._before.restart()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def keep_until(metrics: Path, step: int) -> None:
    """Drop the lines of steps after ``step``, which will be trained again, and what was cut off while it was written.

    The file is replaced at once.
    """
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    kept = [line for line in lines if _step_of(line) <= step]
    if kept != lines:
        partial = metrics.with_name(metrics.name + ".partial")
        partial.write_text("".join(kept))
        partial.replace(metrics)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, LookupError, TypeError):
        return math.inf


@final
class _Counts:
    """Where all counters of a run stood after a step."""

    def __init__(self, optimizer: StreamedOptimizer, *, tokens: float, step: int) -> None:
        self.step, self.tokens = step, int(tokens)
        self.moved_bytes = optimizer.traffic()
        self.exposed_s = dict(optimizer.engine.device.exposed_s)
        self.time_s = time.perf_counter()

    def restart(self) -> None:
        """Let the next step begin now; what lay between was no training."""
        self.time_s = time.perf_counter()

    def since(self, before: _Counts) -> dict[str, Any]:
        """What happened between two counts, per step where there were several."""
        steps, seconds = self.step - before.step, self.time_s - before.time_s
        return {
            "tokens_per_s": (self.tokens - before.tokens) / seconds,
            "step_s": seconds / steps,
            "predicted_step_s": None,  # nothing predicts it yet
            "moved_bytes": {lane: (n - before.moved_bytes[lane]) // steps for lane, n in self.moved_bytes.items()},
            "exposed_s": {lane: (s - before.exposed_s[lane]) / steps for lane, s in self.exposed_s.items()},
        }

    def report(self, before: _Counts, loss: float) -> StepReport:
        moved_bytes = sum(self.moved_bytes.values())
        tokens = self.tokens - before.tokens
        return StepReport(loss=loss, tokens=tokens, moved_bytes=moved_bytes, exposed_s=self.exposed_s)


def _training(logs: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in logs.items() if name not in _ELSEWHERE}
    return {**values, "lr": logs["learning_rate"], "grad_norm": logs.get("grad_norm")}
