"""What is said where perhaps nobody listens any more: a reader that is gone must not end a run of days."""

from __future__ import annotations

import os
import sys
from typing import TextIO, final

from rich.console import Console


@final
class Terminal(Console):
    """Standard output."""

    def on_broken_pipe(self) -> None:
        """Go on in silence. What matters of a run is in its files."""
        self.quiet = True
        _leave(sys.stdout)


def say(text: str) -> None:
    """Say it on standard error."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _leave(sys.stderr)


def _leave(stream: TextIO) -> None:
    """Let what comes, and what is still in its buffer, go nowhere: at the exit that would change the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
