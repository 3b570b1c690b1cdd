"""``outcore``: one command per job. Errors become one message and an exit status.

0: done. 2: a user's mistake, reported before the work begins. 130, 143: interrupted. 1: anything else.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from outcore.command.command import CommandLine
from outcore.command.files import refuse_unwritable
from outcore.command.hardware_list import print_hardware
from outcore.command.train.method import Method
from outcore.command.train.methods import FINE_TUNING, PREFERENCES
from outcore.command.train.settings import options
from outcore.core.collecting import rarely_collecting
from outcore.core.errors import ConfigError, OutcoreError, PlanInfeasibleError
from outcore.core.extra import TRAINING, refuse_missing
from outcore.core.ranks import launched

if TYPE_CHECKING:
    from outcore.command.plan.question import Question
    from outcore.command.train.command_ranks import CommandRanks

app = CommandLine(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(value: bool) -> None:  # noqa: FBT001 (Typer calls it)
    if value:
        from importlib.metadata import version

        print(f"outcore {version('outcore')}")
        raise typer.Exit


@app.callback()
def outcore(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Train models that do not fit: device, host and disk as one memory, with the results of the plain PyTorch loop."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 250,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the accelerator by default.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier; by default one of a few that is on a disk.")
    ] = None,
    *,
    fit: Annotated[
        bool, typer.Option("--fit", help="Train the largest Llama predicted to take at most three minutes.")
    ] = False,
) -> None:
    """Train a small Llama on Python's own source over all three tiers, and compare with the plain loop."""
    refuse_missing("transformers")
    # Imported here: torch takes seconds, and --help needs none of it.
    from outcore.command.train.output.notices import notices

    with notices():
        from outcore.command.demo.demo import run_demo  # within notices(): its libraries print while they are imported

        equal = run_demo(steps=steps, device=device, folder=folder, fit=fit)
    if not equal:
        raise typer.Exit(1)


@app.command()
def env(
    *, as_json: Annotated[bool, typer.Option("--json", help="As a JSON object, with sizes in bytes.")] = False
) -> None:
    """Say what is installed, what this machine has, and what outcore would take of it."""
    from outcore.command.environment import report

    print(report(as_json=as_json))


@app.command()
def probe(
    *,
    disk_dir: Annotated[list[Path] | None, typer.Option(help="Folder of the disk tier to measure; repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the accelerator by default.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write the measurements to, for --hardware.")
    ] = None,
) -> None:
    """Measure this machine in under half a minute, for plans: links, updates, compute, and what they share.

    Under torchrun, with one process per GPU, it also measures their links.
    """
    from outcore.command.probe import probe as measured

    text = measured(disks=disk_dir or [], device=device, out=out)
    if text:  # it is empty on all ranks but the first
        print(text)


@app.command(no_args_is_help=True)
def plan(  # noqa: PLR0913 (one option each)
    *,
    model: Annotated[
        str | None, typer.Option(help="ID on the hub, directory, or config.json; no weights are needed.")
    ] = None,
    fit: Annotated[bool, typer.Option("--fit", help="In place of a model: the largest known ones that fit.")] = False,
    at_least: Annotated[float, typer.Option(min=0, help="With --fit: tokens per second that a model reaches.")] = 0,
    list_hardware: Annotated[
        bool, typer.Option("--list-hardware", help="List known parts.", is_eager=True, callback=print_hardware)
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="A hardware.json, or names of parts: rtx-4090+64GiB, h100+pcie5+server-nvme, with figures of your own "
            "as in rtx-4090,memory=22GiB; by default this machine, as outcore probe measures it."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a micro-batch.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 2048,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="An input of the model that is not made right: pixel_values=1x3x224x224:float32."),
    ] = None,
    grad_accum: Annotated[int, typer.Option(min=1, help="Micro-batches in a step.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines of this kind that train together.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks per machine, with a batch and device each.")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, bf16, pure_bf16 or fp16.")] = "bf16",
    lora: Annotated[int | None, typer.Option(min=1, help="Train LoRA adapters of this rank, not the weights.")] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Under --lora: the base in 4 bits (nf4), with bitsandbytes.")
    ] = False,
    load_in_8bit: Annotated[bool, typer.Option("--load-in-8bit", help="The same in 8 bits.")] = False,
    master_format: Annotated[str, typer.Option(help="Of the masters beside bf16 weights: fp32 or compact.")] = "fp32",
    optim: Annotated[
        str, typer.Option(help="A name in Transformers: adamw_torch, adamw_8bit, lion_32bit; or muon.")
    ] = "adamw_torch",
    clipping: Annotated[bool, typer.Option(help="Without clipping, updates may run inside backward.")] = True,
    device_memory: Annotated[str | None, typer.Option(help="Such as 20GiB; by default 0.9 of its memory.")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Such as 48GiB; by default 0.8 of host memory.")] = None,
    disk_size: Annotated[str | None, typer.Option(help="Such as 1TB; by default 0.9 of the disk.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the plan to, for --plan of a run.")] = None,
    html: Annotated[Path | None, typer.Option(help="File to write a page to, for any browser.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON object.")] = False,
) -> None:
    """Say whether a model fits a machine, how fast it would train there, and what limits it."""
    given = {**locals(), "model": model or ""}
    refuse_missing(*TRAINING)
    if fit == (model is not None):
        raise ConfigError(
            "outcore plan: expected either --model or --fit, but got "
            f"{'both; leave one out' if fit else 'neither; name a model, or ask for the largest that fit'}"
        )
    if fit and (out is not None or html is not None):
        raise ConfigError("--fit: expected it without --out and --html, which are for one model; leave them out")
    if at_least and not fit:
        raise ConfigError("--at-least: expected it with --fit, but got it alone; add --fit, or leave it out")
    from outcore.command.plan.question import Question  # all that it refuses is refused before torch is imported

    asked = Question(**{field.name: given[field.name] for field in dataclasses.fields(Question)})
    _answer(asked, out, html, at_least if fit else None, as_json=as_json)


def _answer(asked: Question, out: Path | None, html: Path | None, at_least: float | None, *, as_json: bool) -> None:
    asked.refuse_absent()
    refuse_unwritable("--out", out)
    refuse_unwritable("--html", html)
    if out is not None and html is not None and os.path.realpath(out) == os.path.realpath(html):
        raise ConfigError(f"--html: expected another file than --out, but got '{out}' for both; name two")
    from outcore.command.train.output.notices import notices

    with rarely_collecting(), notices():
        _fit(asked, at_least, as_json=as_json) if at_least is not None else _plan(asked, out, html, as_json=as_json)


def _fit(asked: Question, at_least: float, *, as_json: bool) -> None:
    from outcore.command.plan import fit as fitting
    from outcore.command.plan.known_models import known_models
    from outcore.command.terminal import fitted

    try:
        models = fitting.fits(asked, known_models(), at_least=at_least, told=partial(print, file=sys.stderr))
    except PlanInfeasibleError as error:
        from outcore.command.plan.misfit import Misfit

        if as_json:
            print(Misfit(question=asked, machine=asked.hardware or "this machine", error=error, advice=()).to_json())
        raise
    print(fitting.to_json(models) if as_json else fitted(fitting.to_text(models), sys.stdout))


def _plan(asked: Question, out: Path | None, html: Path | None, *, as_json: bool) -> None:
    from outcore.command.plan.answer import answer_for, machine_for, source_of
    from outcore.command.plan.page import write_misfit, write_page
    from outcore.command.plan.recipes import gains
    from outcore.command.plan.text import to_json, to_text
    from outcore.command.terminal import fitted

    source, hardware = source_of(asked.model), machine_for(asked)
    try:
        found = answer_for(asked, source, hardware)
    except PlanInfeasibleError as error:
        from outcore.command.plan.misfit import Misfit

        misfit = Misfit.of(asked, source, hardware, error)
        if html is not None:
            write_misfit(misfit, html)
        if as_json:
            print(misfit.to_json())
        error.add_note(misfit.to_text())
        raise
    if out is not None:
        found.found.plan.save(out)
    helping = gains(found)
    if html is not None:
        write_page(found, helping, html)
    print(to_json(found, helping) if as_json else fitted(to_text(found, helping), sys.stdout))


def _run(method: Method, given: Mapping[str, Any]) -> None:
    """Train as options, ``--set`` and a YAML file say; see ``options``."""
    refuse_missing(*TRAINING)
    given = {name: value for name, value in given.items() if value not in (None, [], ())}
    flags = {name: value for name, value in given.items() if name not in ("config", "assignments", "nproc")}
    from outcore.command.train.settings.given_settings import Given

    read = partial(Given.read, given.get("config"), flags, given.get("assignments", []))
    asked = None
    if launched() is None:  # else the first rank speaks for all
        from outcore.command.train.settings.at_once import refuse_at_once

        refuse_at_once(asked := read())
    if "nproc" in given:
        from outcore.command.train.spawn import num_processes, spawn

        count = num_processes(given["nproc"])
        if count is not None:
            raise typer.Exit(spawn(count, ("-m", "outcore", *sys.argv[1:])))
    from outcore.command.train.command_ranks import CommandRanks
    from outcore.command.train.output.notices import notices

    ranks = CommandRanks.join()
    try:
        with notices(are_shown=ranks.is_first):
            from outcore.command.train.follow import follow_train
            from outcore.command.train.run import run_train
            from outcore.command.train.settings.run_settings import resolve

            settings = resolve(asked or read(), method)
            run_train(settings, ranks) if ranks.is_first else follow_train(settings, ranks)
        ranks.end()
    except (KeyboardInterrupt, SystemExit) as stop:
        if ranks.is_first:
            _say("stopped", stop)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0)) from stop
    except Exception as error:
        if ranks.size == 1:
            raise
        raise typer.Exit(_said_once(ranks, error)) from error


def _said_once(ranks: CommandRanks, error: Exception) -> int:
    """Report an error on one rank only. Returns: The exit status. See ``command_ranks``, [Note: who speaks]."""
    told = None if ranks.is_first else ranks.told(error)
    if told is not None:
        return told
    if isinstance(error, OutcoreError):
        _say(str(error), error)
    else:
        traceback.print_exception(error)
    if ranks.is_first:
        ranks.has_said(_status(error), error)
    return _status(error)


def _status(error: Exception) -> int:
    return 2 if isinstance(error, ConfigError | PlanInfeasibleError) else 1


def _add(method: Method, hints: Mapping[str, Any], text: str) -> None:
    """Add a command that trains. Its options are a table, since commands share most of them."""

    def command(**given: Any) -> None:
        _run(method, given)

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hints[name]) for name in hints]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = dict(hints)
    app.command(method.command, cls=options.TrainCommand, help=text, no_args_is_help=True)(command)


checkpoints = CommandLine(no_args_is_help=True, help="List, check and remove checkpoints.")
app.add_typer(checkpoints, name="checkpoint")
_Directory = Annotated[Path, typer.Argument(help="A folder of checkpoints, or one of them.")]


@checkpoints.command("ls")
def list_checkpoints(directory: _Directory) -> None:
    """List checkpoints, the newest first, and whether their files are there."""
    _show_checkpoints(directory, check=False)


@checkpoints.command("verify")
def verify_checkpoints(directory: _Directory) -> None:
    """Read every checkpoint in full, and compare it with its checksums. Status 1 if one is damaged."""
    _show_checkpoints(directory, check=True)


@checkpoints.command("prune")
def prune_checkpoints(
    directory: _Directory, *, keep: Annotated[int, typer.Option(min=1, help="Number of the newest to keep.")]
) -> None:
    """Read checkpoints from the newest on, keep the first ones that are as they were saved, and remove all older ones.

    A Trainer's best checkpoint stays, too, as with outcore train --keep.
    """
    from outcore.command.checkpoint import pruned

    print(pruned(directory, keep=keep))


@app.command("export")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A run's folder, a checkpoint or a folder of them, a model, or adapters.")
    ],
    directory: Annotated[Path, typer.Argument(help="Folder to write to: empty, or not there yet.")],
    *,
    form: Annotated[
        str, typer.Option("--format", help="hf: for from_pretrained. dcp: for torch.distributed.checkpoint.")
    ] = "hf",
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapters into the base model.")] = False,
) -> None:
    """Write what was trained for other programs: a model, adapters, or adapters merged into their base model.

    Of a run's folder it is the model at its end, or the newest whole checkpoint if that is newer.
    """
    if form not in ("hf", "dcp"):
        raise ConfigError(f"--format: expected hf or dcp, but got '{form}'")
    refuse_missing(*TRAINING)
    from outcore.command.train.output.notices import notices

    with notices():
        from outcore.checkpoint.export_checkpoint import export_checkpoint  # its libraries print while imported

        said = export_checkpoint(checkpoint, directory, "dcp" if form == "dcp" else "hf", merge=merge)
    print(f"wrote {directory}: {said}" if said else f"wrote {directory}")


def _show_checkpoints(directory: Path, *, check: bool) -> None:
    from outcore.command.checkpoint import listed

    text, are_whole = listed(directory, check=check)
    print(text)
    if not are_whole:
        raise typer.Exit(1)


_add(FINE_TUNING, options.TRAIN, options.TRAIN_HELP)
_add(PREFERENCES, options.DPO, options.DPO_HELP)


def main() -> None:
    """Run the command line and exit."""
    # By default these kill Python without unwinding, and unwinding is what removes the disk tier's files.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _terminate)
    # At exit, everything is closed and Python waits for threads only: another Ctrl-C then ends the process at once.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    try:
        app(prog_name="outcore")
    except OutcoreError as error:
        _say(str(error), error)
        sys.exit(_status(error))


def _say(message: str, error: BaseException) -> None:
    """Print one message, followed by the error's notes."""
    from outcore.command.terminal import say

    spoken = message if message.startswith("outcore ") else f"outcore: {message}"
    say("\n".join([spoken, *getattr(error, "__notes__", ())]))


def _terminate(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)  # for either signal: a program that restarts runs waits for one status
