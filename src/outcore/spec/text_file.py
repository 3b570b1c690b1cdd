"""Descriptions as files of text: plans, machines."""

from __future__ import annotations

from pathlib import Path

from outcore.core.errors import ConfigError


def replace_file(path: str | Path, text: str, what: str) -> None:
    """Replace a file at once.

    Args:
        path: Of the file.
        text: All of it.
        what: It is, for the error.

    Raises:
        ConfigError: It cannot be written.
    """
    target = Path(path)
    try:
        partial = target.with_name(target.name + ".partial")
        partial.write_text(text)
        partial.replace(target)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: expected a path to write to, but '{path}' cannot be written: {error}") from error


def content_of(path: str | Path, what: str) -> str:
    """Read a file.

    Args:
        path: Of the file.
        what: It is, for the error.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: expected a readable JSON file at '{path}', but got: {error}") from error
