"""Output to streams whose reader may have gone: a closed pipe must not end a run of days."""

from __future__ import annotations

import os
import sys
from typing import TextIO, final

from rich.console import Console


@final
class Terminal(Console):
    """A console on standard output."""

    def on_broken_pipe(self) -> None:
        """Go on in silence. What matters about a run is in its files."""
        self.quiet = True
        _leave(sys.stdout)


def say(text: str) -> None:
    """Print a text on standard error."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _leave(sys.stderr)


def _leave(stream: TextIO) -> None:
    """Send later output, and what is still buffered, to the null device: a failing flush at exit changes the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
