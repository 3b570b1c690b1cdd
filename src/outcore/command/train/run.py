"""``outcore train``: from settings to a trained model in a folder, or to one message that says what is wrong."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from outcore.checkpoint.find_checkpoints import RECORD
from outcore.checkpoint.weights.export import save_model
from outcore.checkpoint.weights.small_files import SmallFilesError, Writers
from outcore.command.terminal import Terminal, aligned, broken
from outcore.command.train.command_ranks import ALONE, CommandRanks
from outcore.command.train.facts import facts_of_data, facts_of_model, steps_of
from outcore.command.train.loop.nonfinite import NonFiniteStepError
from outcore.command.train.loop.preemption import Preemption
from outcore.command.train.output.folder import MODEL, Checkpoint, OutputFolder
from outcore.command.train.output.record import RunRecord
from outcore.command.train.output.report import RunReport
from outcore.command.train.output.trace import trace_target
from outcore.command.train.planned_run import PlannedRun, RunData
from outcore.command.train.settings.description import describe
from outcore.command.train.settings.run_settings import RunSettings
from outcore.core.errors import ConfigError, OutcoreError, PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.engine.engine import engine_of
from outcore.memory.machine import host_free_bytes
from outcore.preparation.with_ranks import free_budget

_HELD_BACK_BYTES = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's names
# What libraries raise for settings and data that they cannot use. Anything else is a bug, and keeps its traceback.
_REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, ImportError, OSError, TemplateError)


@dataclass(frozen=True, kw_only=True)
class _RunParts:
    """A run that is about to train."""

    job: PlannedRun
    data: RunData
    terminal: Terminal
    ranks: CommandRanks
    output: OutputFolder
    report: RunReport
    preemption: Preemption


def run_train(settings: RunSettings, ranks: CommandRanks = ALONE) -> None:
    """Train as the settings say, or with ``dry_run`` only say what would be done.

    Args:
        settings: Settings of the run.
        ranks: The ranks of the run. This process is the first of them; the others train along.

    Raises:
        ConfigError: A setting, the model or the data cannot be used; nothing is left behind.
        PlanInfeasibleError: The budget does not suffice; nothing is left behind.
        OutcoreError: The run itself failed; its notes say how to go on.
    """
    terminal = Terminal(highlight=False)
    output = OutputFolder(settings.out, resume=settings.resume)
    trace = None if settings.trace is None else trace_target(settings.trace, out=settings.out)
    _say_items(terminal, "Settings", describe(settings))
    with _explained(output, settings):
        ranks.gather()
        budget = free_budget(settings.budget, device=settings.device)
        job = PlannedRun.of(dataclasses.replace(settings, budget=budget))
        output.refuse_full(job.written_bytes())
        _say_items(terminal, "Model", facts_of_model(job))
        record = RunRecord.of(settings, job.source)
        if output.checkpoint is not None:
            _changes(record, output.checkpoint)
        ranks.tell(job.plans)
        if settings.dry_run:
            _dry_run(terminal, job, output, record)
            ranks.tell(None)
            return
        with output.opened() as cache:
            data = job.load_data(cache)
            ranks.tell(data)
            if job.taken["disk"]:
                _give_freed_memory_back(job)
            _say(terminal, "Plan", job.plan_table())
            if output.incomplete:
                names = ", ".join(path.name for path in output.incomplete)
                _say(terminal, "Incomplete", f"{names}: the run was stopped while writing it, so it is removed")
            if output.damaged:
                why = "\n".join(output.damaged.values())
                _say(terminal, "Damaged", f"{why}\nset aside; the run goes on from the one before")
            with (
                Preemption(settings.save_every_minutes, settings.grace) as preemption,
                RunReport(terminal, output, trace, job.taken, job.comparison()) as report,
            ):
                run = _RunParts(
                    job=job,
                    data=data,
                    terminal=terminal,
                    ranks=ranks,
                    output=output,
                    report=report,
                    preemption=preemption,
                )
                _train(run, record)


def _give_freed_memory_back(job: PlannedRun) -> None:
    """Where host memory is scarce, keep glibc from holding on to freed activations and gradients.

    By default it raises its thresholds to the largest block that was ever freed, and keeps what is below them until
    ``memory.host`` asks for it: up to a gigabyte that no budget counts. With fixed thresholds, the kernel maps and
    clears blocks anew each time. A step on the CPU then takes half as much processor time again.
    """
    device_bytes = job.taken["device"] + job.model.plan.kept_bytes if job.args.device.type == "cpu" else 0
    left_bytes = host_free_bytes() - job.taken["host"] - device_bytes
    if left_bytes >= _HELD_BACK_BYTES:
        return
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**25)
        libc.malloc_trim(0)
        warnings.warn(
            f"the plan leaves {format_bytes(max(left_bytes, 0))} of host memory free, so freed memory is given back at "
            "once; steps on the CPU may take half as long again as predicted",
            stacklevel=2,
        )


def _dry_run(terminal: Terminal, job: PlannedRun, output: OutputFolder, record: RunRecord) -> None:
    """Do all that comes before training, in a temporary folder."""
    with tempfile.TemporaryDirectory() as cache:
        data = job.load_data(Path(cache))
        _say(terminal, "Plan", job.plan_table())
        elsewhere = dataclasses.replace(job, settings=dataclasses.replace(job.settings, out=Path(cache)))
        with _trainer(terminal, elsewhere, data, record, None) as trainer:
            trainer.rehearse()
            if output.checkpoint is not None:
                _changes(trainer.record, output.checkpoint)


def _train(run: _RunParts, record: RunRecord) -> None:
    """Train, save the model, and describe the run. Args: record: Of the run, without its data."""
    with _trainer(run.terminal, run.job, run.data, record, run) as trainer:
        if _is_over(run, trainer):
            return
        path = None if run.output.checkpoint is None else run.output.checkpoint.path
        run.ranks.tell((path, True))
        trainer.train(resume_from_checkpoint=None if path is None else str(path))
        others: Writers = {("tokenizer_config.json",): run.job.tokenizer.save_pretrained}
        try:
            with run.output.new_model() as folder:
                run.ranks.tell(None)
                save_model(engine_of(trainer.model, "the run"), folder, others)
        except SmallFilesError as error:
            raise SmallFilesError(run.output.path / MODEL, error.failed) from error  # the folder has its name now
        _say_end(run, trainer)


@contextmanager
def _trainer(
    terminal: Terminal, job: PlannedRun, data: RunData, record: RunRecord, run: _RunParts | None
) -> Iterator[Any]:
    """Tokenize the data, describe it, and yield a trainer that ends with the block.

    Args:
        terminal: Shows the description.
        job: The trainer's job.
        data: Data to train on.
        record: The record of the run, without its data.
        run: The run that the trainer is for; None: it does not train.
    """
    with terminal.status("Preparing the data"):
        trainer = job.trainer(data, () if run is None else (run.preemption, run.report))
    try:
        steps = steps_of(trainer)
        trainer.record = record.with_data(job.settings.data_name, trainer.train_dataset, trainer.args, steps[1])
        trainer.preemption = None if run is None else run.preemption
        _say_items(terminal, "Data", facts_of_data(trainer.record.data, steps, trainer, data.training.sources))
        yield trainer
    finally:
        trainer.end()


def _is_over(run: _RunParts, trainer: Any) -> bool:
    """Say where the run resumes. Returns: Whether nothing is left to do."""
    terminal, output, resumed, steps = run.terminal, run.output, run.output.checkpoint, trainer.record.steps
    if resumed is None:
        if run.job.settings.resume:
            _say(terminal, "Resume", f"nothing was saved in {output.path}: the run begins at step 0")
        return False
    changes = _changes(trainer.record, resumed)
    _say(terminal, "Resume", "\n".join([f"from {resumed.path}, at step {resumed.step} of {steps}", *changes]))
    if resumed.step < steps:
        return False
    output.begin()
    run.ranks.tell((resumed.path, False))  # nothing is left to train
    output.model_of(resumed, best=trainer.args.load_best_model_at_end)
    _say(terminal, "Done", f"nothing is left to do: {resumed.path} is at step {resumed.step} of {steps}")
    if run.job.settings.trace is not None:
        terminal.print(f"no trace was recorded: {run.job.settings.trace}", markup=False, soft_wrap=True)
    return True


def _say_end(run: _RunParts, trainer: Any) -> None:
    left_out = f", {trainer.num_skipped:,} of them without an update" if trainer.num_skipped else ""
    job, model = run.job, run.output.path / MODEL
    steps = f"{trainer.state.global_step:,}{left_out}"
    facts = {"steps": steps, **run.report.summary(), **run.preemption.saves.summary(), "model": str(model)}
    _say_items(run.terminal, "Done", facts)
    if job.settings.lora is None or job.source.weights is not None:  # adapters need the model below them
        _say(run.terminal, "Try it", _line_to_try(model, job, is_chat=run.data.training.is_conversational))
        if job.settings.lora is not None:
            folders = (shlex.quote(str(path)) for path in (run.output.path, f"{run.output.path}-merged"))
            _say(run.terminal, "Merge", f"outcore export {' '.join(folders)} --merge")


def _line_to_try(model: Path, job: PlannedRun, *, is_chat: bool) -> str:
    """A line for a shell that asks the model something. It needs no other packages than training does."""
    python = "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)
    said = [{"role": "user", "content": "Hello"}] if is_chat else "Hello"
    given = json.dumps(str(model))
    given += f", tokenizer={given}" if job.settings.lora is not None else ""  # else that of the base, if it has one
    asked = f'pipeline("text-generation", {given})({json.dumps(said)}, max_new_tokens=50)'
    code = f'from transformers import pipeline; print({asked}[0]["generated_text"])'
    return f"{python} -c {shlex.quote(code)}"


def _changes(record: RunRecord, checkpoint: Checkpoint) -> list[str]:
    """Return what differs from the checkpoint's run and is used from here on, a line each."""
    before = RunRecord.load(checkpoint.path)
    if before is None:
        return [f"its settings are not known: there is no {RECORD} in it, and nothing was compared"]
    changes = record.changes_since(before, checkpoint.path)
    return aligned(changes.items()).splitlines() if changes else []


@contextmanager
def _explained(output: OutputFolder, settings: RunSettings) -> Iterator[None]:
    """Explain errors: before the run begins, one is a user's mistake; later, it says what is left and how to go on."""
    try:
        yield
    except PlanInfeasibleError as error:
        need, folders = error.required_bytes, settings.budget.paths
        size = {tier: format_bytes(nbytes, is_need=True).replace(" ", "") for tier, nbytes in need.items()}
        less = "" if settings.plan is not None else "; with --disk DIR less host memory will do"
        free = f"; {format_bytes(need['disk'], is_need=True)} must be free in {', '.join(folders) or 'DIR'}"
        disk = ("" if folders else " --disk DIR") + free if need["disk"] else less
        error.add_note(f"as options: --device-memory {size['device']} --host-memory {size['host']}{disk}")
        raise
    except ConfigError as error:
        if not output.has_begun:
            raise
        late = OutcoreError(str(error))  # no mistake in the command: what it needs was damaged while it ran
        late.add_note(_what_is_left(output))
        raise late from error
    except SmallFilesError:
        raise
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
    """Return the package whose code raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _say(terminal: Terminal, title: str, text: str) -> None:
    terminal.print(f"[bold]{title}[/bold]")
    terminal.print(text, markup=False, soft_wrap=True)


def _say_items(terminal: Terminal, title: str, items: Mapping[str, str]) -> None:
    text = aligned(items.items())
    _say(terminal, title, broken(text, terminal.width) if terminal.is_terminal else text)
