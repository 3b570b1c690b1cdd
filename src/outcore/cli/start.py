"""Where ``outcore`` begins: the command line itself needs a package, too."""

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
    atexit.register(_end_of_plan, ended := list[object]())  # the first that is registered is the last that is called
    from outcore.cli.main import main as run

    with rarely_collecting() if _is_plan() else nullcontext():
        try:
            run()
        except SystemExit as status:
            ended.append(status.code)
            gc.freeze()  # else, collecting often again, Python goes through all that was made once more
            raise


def _is_plan() -> bool:
    return sys.argv[1:2] == ["plan"]


def _end_of_plan(ended: list[object]) -> None:
    """End at once: for half a second Python would take apart all that was made. Args: ended: Statuses."""
    if _is_plan() and ended in ([0], [None]):
        with suppress(OSError):  # Python says so
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
