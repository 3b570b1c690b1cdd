"""The entry point of ``outcore``. It first checks for the packages that the command line itself needs."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import nullcontext, suppress

from outcore.core.collecting import rarely_collecting
from outcore.core.errors import ConfigError
from outcore.core.extra import COMMAND_LINE, refuse_missing


def main() -> None:
    """Run the command line and exit."""
    try:
        refuse_missing(*COMMAND_LINE)
    except ConfigError as error:
        print(f"outcore: {error}", file=sys.stderr)
        sys.exit(2)
    sys.meta_path.insert(0, LoadingNotice(" ".join(["outcore", *sys.argv[1:2]])))
    atexit.register(_end_of_plan, ended := list[object]())  # the first handler registered is the last one called
    from outcore.command.main import main as run

    with rarely_collecting() if _is_plan() else nullcontext():
        try:
            run()
        except SystemExit as status:
            ended.append(status.code)
            gc.freeze()  # else Python, which collects often again from here on, would traverse all these objects
            raise


class LoadingNotice:
    """Says that a command is loading when it begins to import torch, which takes seconds. It finds no module itself."""

    def __init__(self, command: str) -> None:
        """Args: command: As it was typed."""
        self._command: str | None = command if os.environ.get("RANK", "0") == "0" else None

    def find_spec(self, name: str, *_: object) -> None:
        """Look on as a module is imported."""
        if name == "torch" and self._command is not None:
            with suppress(OSError):  # nobody reads
                print(f"{self._command}: loading PyTorch", file=sys.stderr, flush=True)
            self._command = None


def _is_plan() -> bool:
    return sys.argv[1:2] == ["plan"]


def _end_of_plan(ended: list[object]) -> None:
    """End the process at once: freeing all objects would take Python half a second. Args: ended: Exit statuses."""
    if _is_plan() and ended in ([0], [None]):
        with suppress(OSError):  # Python's own exit then reports it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
