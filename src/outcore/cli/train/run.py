"""``outcore train``: from settings to a trained model in a folder, or to one message that says what is wrong."""

from __future__ import annotations

import ctypes
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console

import outcore
from outcore.cli.train.job import Job, RunData
from outcore.cli.train.nonfinite import NonFiniteStepError
from outcore.cli.train.output import MODEL, SETTINGS, Checkpoint, OutputFolder
from outcore.cli.train.record import RunRecord
from outcore.cli.train.report import RunReport
from outcore.cli.train.settings import Settings, describe
from outcore.cli.train.trace import TraceFile
from outcore.core.errors import ConfigError, OutcoreError, PlanInfeasibleError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's names
# What libraries raise for settings and data that they cannot use. Anything else is a bug, and keeps its traceback.
_REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, ImportError, OSError, TemplateError)


def run_train(settings: Settings) -> None:
    """Train as the settings say, or with ``dry_run`` only say what would be done.

    Raises:
        ConfigError: A setting, the model or the data cannot be used; nothing is left behind.
        PlanInfeasibleError: The budget does not suffice; nothing is left behind.
        OutcoreError: The run itself failed; its notes say how to go on.
    """
    console = Console(highlight=False)
    output = OutputFolder(settings.out, resume=settings.resume)
    trace = None if settings.trace is None else TraceFile(settings.trace, out=settings.out)
    _say(console, "Settings", _aligned(describe(settings)))
    with _explained(output):
        job = Job.of(settings)
        output.refuse_full(job.written_bytes())
        record = RunRecord.of(settings, job.source)
        if output.checkpoint is not None:
            _changes(record, output.checkpoint)
        if settings.dry_run:
            with tempfile.TemporaryDirectory() as cache:
                job.load_data(Path(cache))
            _say(console, "Plan", job.plan_table())
            return
        with output.opened() as cache:
            data = job.load_data(cache)
            if job.taken["disk"]:
                _give_freed_memory_back()
            _say(console, "Plan", job.plan_table())
            if output.incomplete:
                names = ", ".join(path.name for path in output.incomplete)
                _say(console, "Incomplete", f"{names}: the run was stopped while writing it, so it is removed")
            with RunReport(console, output, trace, peak_bytes=job.taken) as report:
                _train(console, job, data, output, report, record)


def _give_freed_memory_back() -> None:
    """Keep glibc from holding back activations and gradients that were freed: up to a gigabyte, in nobody's budget.

    By itself it raises its thresholds to the largest block that was ever freed, and returns nothing below them. For
    plans that need the disk only: mapping blocks anew each time may cost a step on the CPU a quarter of its time.
    """
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**25)
        libc.malloc_trim(0)


def _train(
    console: Console, job: Job, data: RunData, output: OutputFolder, report: RunReport, record: RunRecord
) -> None:
    with console.status("Preparing the data"):
        trainer = job.trainer(data, report)
    try:
        steps = _steps(trainer)
        trainer.record = record.with_data(job.settings.data, trainer.train_dataset, trainer.args, steps)
        _go_on(console, job, trainer, output, steps)
    finally:
        trainer.end()


def _go_on(console: Console, job: Job, trainer: Any, output: OutputFolder, steps: int) -> None:
    resumed = output.checkpoint
    if job.settings.resume and resumed is None:
        _say(console, "Resume", f"nothing was saved in {output.path}: the run begins at step 0")
    elif resumed is not None:
        changes = _changes(trainer.record, resumed)
        _say(console, "Resume", "\n".join([f"from {resumed.path}, at step {resumed.step} of {steps}", *changes]))
    if resumed is not None and resumed.step >= steps:
        output.begin()
        output.model_of(resumed, best=trainer.args.load_best_model_at_end)
        _say(console, "Done", f"nothing is left to do: {resumed.path} is at step {resumed.step} of {steps}")
        if job.settings.trace is not None:
            console.print(f"no trace was recorded: {job.settings.trace}", markup=False, soft_wrap=True)
        return
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed.path))
    with output.new_model() as folder:
        outcore.save_pretrained(trainer.model, folder)
        job.tokenizer.save_pretrained(folder)
    _say(console, "Done", f"{trainer.state.global_step} steps; the model is in {output.path / MODEL}")


def _steps(trainer: Any) -> int:
    """Of the whole run. Asking for a data loader draws a random number, which training must not miss."""
    with torch.random.fork_rng(devices=[]):
        *_, steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    return int(steps)


def _changes(record: RunRecord, checkpoint: Checkpoint) -> list[str]:
    """What is other than in the checkpoint's run and is used from here on, a line each."""
    before = RunRecord.load(checkpoint.path)
    if before is None:
        return [f"its settings are not known: there is no {SETTINGS} in it, and nothing was compared"]
    changes = record.changes_since(before, checkpoint.path)
    return _aligned(changes).splitlines() if changes else []


@contextmanager
def _explained(output: OutputFolder) -> Iterator[None]:
    """Before the run begins an error is a user's mistake; afterwards it says what is left and how to go on."""
    try:
        yield
    except PlanInfeasibleError as error:
        need = error.required_bytes
        less = "" if need["disk"] else "; with --disk DIR less host memory will do"
        error.add_note(f"as options: --device-memory {need['device']} --host-memory {need['host']}{less}")
        raise
    except ConfigError as error:
        if not output.has_begun:
            raise
        late = OutcoreError(str(error))  # no mistake in the command: what it needs was damaged while it ran
        late.add_note(_what_is_left(output))
        raise late from error
    except NonFiniteStepError as error:
        error.add_note(_what_is_left(output, "with --resume and a change the run goes on there"))
        raise
    except BaseException as error:
        if output.has_begun:
            error.add_note(_what_is_left(output))
        elif isinstance(error, OutcoreError):
            raise ConfigError(str(error)) from error
        elif isinstance(error, _REFUSALS) and (library := _raised_by(error)) != __package__.partition(".")[0]:
            said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ConfigError(
                f"expected a model, data and settings that can be trained with, but {library} says: {said}; change "
                "what it names"
            ) from error
        raise


def _what_is_left(output: OutputFolder, how: str = "the same command with --resume goes on there") -> str:
    latest = output.latest()
    if latest is None:
        return f"no checkpoint was saved in {output.path}: --resume auto begins anew; --save-every N saves some"
    return f"{latest.path} holds everything up to step {latest.step}; {how}"


def _raised_by(error: BaseException) -> str:
    """The package whose code raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _say(console: Console, title: str, text: str) -> None:
    console.print(f"[bold]{title}[/bold]")
    console.print(text, markup=False, soft_wrap=True)


def _aligned(items: Mapping[str, str]) -> str:
    width = max(len(name) for name in items)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in items.items())
