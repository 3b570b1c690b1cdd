"""Settings as a user gave them: flags and ``--set`` here, a YAML file in ``yaml_file``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml

from outcore.cli.train.fields import shown
from outcore.core.errors import ConfigError

# What PyYAML raises for malformed text; its constructors let through whatever Python says to a wrong !!tag.
MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Given:
    """One setting as it was given, before its name and value are checked."""

    key: str
    """As typed; a dot separates a section from its setting."""
    value: object
    where: str
    """Begins a message: a flag, a ``--set``, or a line of a file."""
    text: str | None = None
    """The value's text where it came as nothing but text."""

    def section(self, items: Mapping[object, object]) -> Iterator[Given]:
        """Take a mapping apart that was given for a section as a whole."""
        for key, value in items.items():
            yield Given(key=f"{self.key}.{key}", value=value, where=f"{self.where}, {key}")


def from_flags(flags: Mapping[str, object]) -> list[Given]:
    """Read what the command line's own options hold: name -> value."""
    return [Given(key=key, value=value, where=f"--{key.replace('_', '-')}") for key, value in flags.items()]


def from_assignments(assignments: Sequence[str]) -> list[Given]:
    """Read ``--set`` options. A value is YAML; what is not YAML is text.

    Raises:
        ConfigError: One has no equals sign, or nothing before it.
    """
    return [_assignment(text) for text in assignments]


def _assignment(assignment: str) -> Given:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set: expected KEY=VALUE, but got {shown(assignment)}; write for example --set learning_rate=1e-4"
        )
    try:
        value = yaml.safe_load(text)
    except MALFORMED:
        value = text
    return Given(key=key.strip(), value=value, where=f"--set {key.strip()}", text=text)
