"""A settings file: YAML, read so that every setting knows its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from outcore.command.train.settings.given_settings import MALFORMED, GivenSetting, Loader, shown
from outcore.core.errors import ConfigError

_MOST_BYTES = 1 << 20  # a settings file is a page; a file of weights named by mistake is not read to its end


def read_yaml(path: Path, sections: tuple[str, ...]) -> list[GivenSetting]:
    """Read a file of settings as a flat list: a setting in a section is ``section.name``. An empty file has none.

    Args:
        path: Relative to the current directory, as are the paths in the file.
        sections: Names of top-level mappings to take apart.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8, not YAML, not a mapping, or has a name twice.
    """
    text = _read(path)
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and loader.construct_object(root) is None):
            return []
        return list(_settings(loader, path, root, sections))
    except ConfigError:
        raise
    except MALFORMED as error:
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


def _settings(
    loader: Loader, path: Path, node: yaml.Node, sections: tuple[str, ...], prefix: str = ""
) -> Iterator[GivenSetting]:
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
        if key in sections and isinstance(value, yaml.MappingNode) and value.value:
            yield from _settings(loader, path, value, (), f"{key}.")
        else:
            yield _setting(loader, prefix + key, value, f"{line}: {prefix}{key}")


def _setting(loader: Loader, key: str, node: yaml.Node, where: str) -> GivenSetting:
    try:
        value = loader.construct_object(node, deep=True)
    except (yaml.YAMLError, RecursionError):
        raise
    except MALFORMED as error:
        text = shown(node.value) if isinstance(node, yaml.ScalarNode) else "a part of it"
        raise ConfigError(
            f"{where}: expected a value, but YAML cannot read {text}; put it in quotes if it is text"
        ) from error
    has_text = isinstance(node, yaml.ScalarNode) and value is not None
    return GivenSetting(key=key, value=value, where=where, text=node.value if has_text else None)
