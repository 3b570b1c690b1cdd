"""Settings as a user gave them, in a YAML file, as flags and with ``--set``, each with its place for messages."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from outcore.core.errors import ConfigError

SECTIONS = ("outcore", "lora")
_MOST_BYTES = 1 << 20  # a settings file is a page; a file of weights named by mistake is not read to its end
# What PyYAML raises for malformed text; its constructors pass on whatever Python raises for a wrong !!tag.
_MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)

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
    """One setting as it was given; ``Schema.check`` puts its full name and its converted value in place."""

    key: str
    """A dot separates a section from its setting."""
    value: Any
    where: str
    """How a message begins: with a flag, a ``--set``, or a line of a file."""
    text: str | None = None
    """What was typed, if that is known and not null."""

    def section(self, items: Mapping[object, object]) -> Iterator[GivenSetting]:
        """Take apart a mapping that was given for a section as a whole."""
        for key, value in items.items():
            yield GivenSetting(key=f"{self.key}.{key}", value=value, where=f"{self.where}, {key}")


class Given(NamedTuple):
    """All settings of a run as they were given. The command line goes over the file."""

    in_file: Sequence[GivenSetting]
    on_command_line: Sequence[GivenSetting]

    @classmethod
    def read(cls, config: Path | None, flags: Mapping[str, object], assignments: Sequence[str]) -> Given:
        """Read settings, and check nothing but their form.

        Args:
            config: A YAML file, or None.
            flags: Option -> value, only those that were given.
            assignments: ``KEY=VALUE`` texts.

        Raises:
            ConfigError: The file cannot be read, or an assignment is none.
        """
        in_file = [] if config is None else read_yaml(config)
        return cls(in_file, [*from_flags(flags), *from_assignments(assignments)])


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
    except _MALFORMED:
        return text


def read_yaml(path: Path) -> list[GivenSetting]:
    """Read a file of settings as a flat list: a setting in a section is ``section.name``. An empty file has none.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8, not YAML, not a mapping, or has a name twice.
    """
    text = _read(path)
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and loader.construct_object(root) is None):
            return []
        return list(_settings(loader, path, root))
    except ConfigError:
        raise
    except _MALFORMED as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        said = getattr(error, "problem", None) or " ".join(str(error).split())
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else said
        raise ConfigError(f"{where}: expected YAML, but this is not YAML: {problem}; correct the file") from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{shown(str(path))}: expected a YAML file of settings, but it cannot be read: {reason}; check the path"
        ) from error
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{path}: expected a YAML file of settings, but got more than 1 MiB; check the path")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: expected text in UTF-8, but got the byte 0x{raw[error.start]:02x}; "
            "save the file as UTF-8"
        ) from error


def _settings(loader: Loader, path: Path, node: yaml.Node, section: str = "") -> Iterator[GivenSetting]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}: expected settings such as 'learning_rate: 1e-5', a line each, but got "
            f"{shown(loader.construct_object(node, deep=True))}; write a mapping"
        )
    loader.flatten_mapping(node)
    items: dict[str, tuple[str, yaml.Node]] = {}  # a mapping's own value replaces that of a merged anchor
    for key_node, value in node.value:
        key, line = loader.construct_object(key_node, deep=True), f"{path}, line {key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise ConfigError(
                f"{line}: expected the name of a setting, but got {shown(key)}; put it in quotes if it is a name"
            )
        items[key] = line, value
    for key, (line, value) in items.items():
        if not section and key in SECTIONS and isinstance(value, yaml.MappingNode) and value.value:
            yield from _settings(loader, path, value, f"{key}.")
        else:
            yield _setting(loader, section + key, value, f"{line}: {section}{key}")


def _setting(loader: Loader, key: str, node: yaml.Node, where: str) -> GivenSetting:
    try:
        value = loader.construct_object(node, deep=True)
    except (yaml.YAMLError, RecursionError):
        raise
    except _MALFORMED as error:
        text = shown(node.value) if isinstance(node, yaml.ScalarNode) else "a part of it"
        raise ConfigError(
            f"{where}: expected a value, but YAML cannot read {text}; put it in quotes if it is text"
        ) from error
    has_text = isinstance(node, yaml.ScalarNode) and value is not None
    return GivenSetting(key=key, value=value, where=where, text=node.value if has_text else None)


def shown(value: object) -> str:
    """Write a value for a message, as YAML would, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    text = _shorten.repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
