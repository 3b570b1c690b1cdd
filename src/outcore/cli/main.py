"""``outcore``: one command per job. Errors become one message and an exit status.

0: done. 2: a user's mistake, said before the work begins. 1: anything else.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

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


def main() -> None:
    """Run the command line and exit."""
    # SIGTERM kills Python without unwinding; the disk tier's files are removed on the way out.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except OutcoreError as error:
        print(f"outcore: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | PlanInfeasibleError) else 1)


def _terminate(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
