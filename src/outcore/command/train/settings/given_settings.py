"""Settings as a user gave them: flags and ``--set``, and how values look in a message. For files see ``yaml_file``."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from outcore.core.errors import ConfigError

# What PyYAML raises for malformed text; its constructors pass on whatever Python raises for a wrong !!tag.
MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)

_SHOWN = 120  # the most characters of a value in a message
_MOST_BITS = 64
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80


class Loader(yaml.SafeLoader):
    """YAML as people write settings, with plain numbers; a date is text, and a mapping has no name twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a name that stands twice: PyYAML silently takes the last one."""
        node = super().compose_mapping_node(anchor)
        names: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (first := names.setdefault(key.value, key)) is not key:
                again = f"found {shown(key.value)} again, which stands on line {first.start_mark.line + 1} already"
                raise yaml.composer.ComposerError(None, None, again, key.start_mark)
        return node


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 010 as 8, 1:30 as 90, and 1e-5 as text. Here the first two are text, and the last one is a number.
_INT = r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$"
_FLOAT = (
    r"[-+]?(([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|"
    r"\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)
for _kind, _pattern in (("int", _INT), ("float", _FLOAT)):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), list("-+.0123456789"))


@dataclass(frozen=True, kw_only=True)
class GivenSetting:
    """One setting as it was given, before its name and value are checked."""

    key: str
    """As typed; a dot separates a section from its setting."""
    value: object
    where: str
    """How a message begins: with a flag, a ``--set``, or a line of a file."""
    text: str | None = None
    """What was typed, if that is known and not null."""

    def section(self, items: Mapping[object, object]) -> Iterator[GivenSetting]:
        """Take apart a mapping that was given for a section as a whole."""
        for key, value in items.items():
            yield GivenSetting(key=f"{self.key}.{key}", value=value, where=f"{self.where}, {key}")


def from_flags(flags: Mapping[str, object]) -> list[GivenSetting]:
    """Read what the command line's own options hold: name -> value."""
    return [
        GivenSetting(
            key=key,
            value=value if read is None else read,  # an empty text is not null
            where=f"--{key.replace('_', '-')}",
            text=value if isinstance(value, str) else None,
        )
        for key, value in flags.items()
        for read in [from_yaml(value) if isinstance(value, str) else value]
    ]


def from_assignments(assignments: Sequence[str]) -> list[GivenSetting]:
    """Read ``--set`` options. A value is YAML; what is not YAML is text.

    Raises:
        ConfigError: One has no equals sign, or nothing before it, or a key stands twice.
    """
    found = [_assignment(text) for text in assignments]
    keys = [given.key for given in found]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        said = " and ".join(text for text, key in zip(assignments, keys, strict=True) if key == twice)
        raise ConfigError(f"--set: expected {twice} once, but got {said}; give it once")
    return found


def _assignment(assignment: str) -> GivenSetting:
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set: expected KEY=VALUE, but got {shown(assignment)}; write for example --set learning_rate=1e-4"
        )
    value = from_yaml(text)
    return GivenSetting(
        key=key.strip(), value=value, where=f"--set {key.strip()}", text=None if value is None else text
    )


def from_yaml(text: str) -> object:
    """Read a value. What is not YAML is text."""
    try:
        return yaml.load(text, Loader)
    except MALFORMED:
        return text


def shown(value: object) -> str:
    """Write a value for a message, as YAML would, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    text = _shorten.repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
