"""Plain data as JSON text in files that people read and edit: plans and machines."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Self

from outcore.core.errors import ConfigError


class Described(ABC):
    """Base of dataclasses that are kept as JSON text."""

    what: ClassVar[str]
    """Its name in error messages."""

    def to_json(self) -> str:
        """Return it as JSON text, the same in every run."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"  # type: ignore[call-overload]

    @classmethod
    @abstractmethod
    def from_json(cls, text: str, *, where: str) -> Self:
        """Read JSON text. Args: where: Beginning of error messages."""

    def save(self, path: str | Path) -> None:
        """Write it as JSON, replacing the file atomically.

        Raises:
            ConfigError: The file cannot be written.
        """
        target = Path(path)
        try:
            partial = target.with_name(target.name + ".partial")
            try:
                partial.write_text(self.to_json())
                partial.replace(target)
            except OSError:
                with suppress(OSError):
                    partial.unlink()
                raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.what}: expected a path to write to, but '{path}' cannot be written: {error}"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that ``save`` wrote, or that a person edited since.

        Raises:
            ConfigError: The file cannot be read, or holds something else.
        """
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{cls.what}: expected a readable JSON file at '{path}', but got: {error}") from error
        return cls.from_json(text, where=f"{cls.what} '{path}'")

    @classmethod
    def _fields_in(cls, text: str, where: str) -> dict[str, Any]:
        """Return the values of its fields as they are in the JSON text.

        Raises:
            ConfigError: The text is not JSON, or a key is missing or unknown.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: expected a {cls.what} as JSON text, but this is not JSON: {error}") from error
        return fields_of(cls, data, where)


def fields_of(kind: type, data: object, where: str) -> dict[str, Any]:
    """Check the keys of a JSON object against the fields of a dataclass. Returns a copy of the object.

    Raises:
        ConfigError: The data is not a JSON object, or a key is missing or unknown.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object, but got {type(data).__name__}")
    fields = dataclasses.fields(kind)
    unknown = sorted(set(data) - {f.name for f in fields})
    if unknown:
        raise ConfigError(f"{where}: unknown key '{unknown[0]}'; known keys are {', '.join(f.name for f in fields)}")
    for f in fields:
        is_needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if is_needed and f.name not in data:
            raise ConfigError(f"{where}: key '{f.name}' is missing")
    return dict(data)


def packaged_text(package: str, name: str) -> str:
    """Return the text of a data file of this program. Rooms that open no files read their tables so."""
    return (files(package) / name).read_text(encoding="utf-8")
