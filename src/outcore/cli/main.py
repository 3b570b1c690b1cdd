"""``outcore``: one command per job. Errors become one message and an exit status.

0: done. 2: a user's mistake, said before the work begins. 130, 143: interrupted. 1: anything else.
"""

from __future__ import annotations

import atexit
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from outcore.cli.train import options
from outcore.core.errors import ConfigError, OutcoreError, PlanInfeasibleError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def outcore() -> None:
    """Train models that do not fit: device, host and disk as one memory, with the results of the plain PyTorch loop."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 250,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the accelerator by default.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier; by default the first of a few that is on a disk.")
    ] = None,
) -> None:
    """Train a small Llama on Python's own source over all three tiers, and compare with the plain loop."""
    # Imported here: torch takes seconds, and --help needs none of it.
    from outcore.cli.demo import run_demo

    if not run_demo(steps=steps, device=device, folder=folder):
        raise typer.Exit(1)


@app.command(cls=options.TrainCommand, help=options.HELP, no_args_is_help=True)
def train(  # noqa: PLR0913 (one argument for each option)
    context: typer.Context,
    config: options.Config = None,
    *,
    model: options.Model = None,
    data: options.Data = None,
    eval_data: options.EvalData = None,
    lora: options.Lora = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    grad_accum: options.GradAccum = None,
    seq_len: options.SeqLen = None,
    packing: options.Packing = None,
    lr: options.Lr = None,
    max_grad_norm: options.MaxGradNorm = None,
    precision: options.Precision = None,
    seed: options.Seed = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    plan: options.Plan = None,
    device: options.Device = None,
    out: options.Out = None,
    save_every: options.SaveEvery = None,
    keep: options.Keep = None,
    resume: options.Resume = None,
    on_nonfinite: options.OnNonfinite = None,
    report_to: options.ReportTo = None,
    trace: options.Trace = None,
    dry_run: options.DryRun = None,
    assignments: options.Assignments = None,
) -> None:
    """Train as options, ``--set`` and a YAML file say; see ``options``."""
    given = {name: value for name, value in context.params.items() if value not in (None, [], ())}
    flags = {name: value for name, value in given.items() if name not in ("config", "assignments")}
    from outcore.cli.train.notices import notices

    try:
        with notices():
            from outcore.cli.train.run import run_train
            from outcore.cli.train.settings import resolve

            run_train(resolve(config, flags, assignments or []))
    except (KeyboardInterrupt, SystemExit) as stop:
        _say("stopped", stop)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0)) from stop


def main() -> None:
    """Run the command line and exit."""
    # SIGTERM kills Python without unwinding; the disk tier's files are removed on the way out.
    signal.signal(signal.SIGTERM, _terminate)
    # When everything is closed, only threads may still be waited for: another Ctrl-C then ends the process at once.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    try:
        app()
    except OutcoreError as error:
        _say(str(error), error)
        sys.exit(2 if isinstance(error, ConfigError | PlanInfeasibleError) else 1)


def _say(message: str, error: BaseException) -> None:
    """One message, with what the error's notes add to it."""
    print("\n".join([f"outcore: {message}", *getattr(error, "__notes__", ())]), file=sys.stderr)


def _terminate(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
