"""Output to streams whose reader may have gone: a closed pipe must not end a run of days."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import Any, TextIO, final

from rich.console import Console


@final
class Terminal(Console):
    """A console on standard output."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print as ``Console`` does. Args: soft_wrap: Leave lines whole, but on a terminal break between words."""
        super().print(*objects, soft_wrap=bool(soft_wrap) and not self.is_terminal, **how)

    def on_broken_pipe(self) -> None:
        """Go on in silence. What matters about a run is in its files."""
        self.quiet = True
        _leave(sys.stdout)


def aligned(items: Iterable[tuple[str, str]]) -> str:
    """Put names and values into two columns, a line each."""
    rows = [*items]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def fitted(text: str, stream: TextIO) -> str:
    """Break lines between words where a stream is a terminal; elsewhere they stay whole."""
    return broken(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def broken(text: str, columns: int) -> str:
    """Break lines between words, so that they have at most so many characters where words allow."""
    return "\n".join(_broken(line, columns) for line in text.splitlines())


def _broken(line: str, columns: int) -> str:
    """Break a line. What follows a name in a column of its own stays in the next column."""
    named = re.match(r"\s*\S+( \S+)*  +|\s+", line)
    indent = len(named[0]) if named is not None and len(named[0]) <= columns // 2 else 2
    return (
        line
        if len(line) <= columns
        else textwrap.fill(
            line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
    )


def say(text: str) -> None:
    """Print a text on standard error."""
    try:
        print(fitted(text, sys.stderr), file=sys.stderr)
    except OSError:
        _leave(sys.stderr)


def _leave(stream: TextIO) -> None:
    """Send later output, and what is still buffered, to the null device: a failing flush at exit changes the status."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
