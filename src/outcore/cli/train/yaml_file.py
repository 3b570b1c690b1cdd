"""A settings file: YAML, read so that every setting knows its line and none is given twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from outcore.cli.train.fields import shown
from outcore.cli.train.given import MALFORMED, Given
from outcore.core.errors import ConfigError

_MOST_BYTES = 1 << 20  # a settings file is a page; a file of weights named by mistake is not read to its end


def read_yaml(path: Path, sections: tuple[str, ...]) -> list[Given]:
    """Read a file of settings, flat: what stands in a section comes as ``section.name``. An empty file has none.

    Args:
        path: Relative to the current directory, as are the paths in the file.
        sections: Names of top-level mappings to take apart.

    Raises:
        ConfigError: The file cannot be read, is not UTF-8, not YAML, not a mapping, or says something twice.
    """
    text = _read(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None or (isinstance(root, yaml.ScalarNode) and loader.construct_object(root) is None):
            return []
        _refuse_duplicates(path, root)
        return list(_settings(loader, path, root, sections))
    except ConfigError:
        raise
    except MALFORMED as error:
        where, problem = _problem(path, error)
        raise ConfigError(f"{where}: expected YAML, but this is none: {problem}; correct the file") from error


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
            f"{path}, line {line}: expected text in UTF-8, but got the byte 0x{raw[error.start]:02x}; save the file "
            "as UTF-8"
        ) from error


def _problem(path: Path, error: BaseException) -> tuple[str, str]:
    """Say where and what is wrong, in one line each."""
    if isinstance(error, RecursionError):
        return str(path), "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"{path}, line {mark.line + 1}, column {mark.column + 1}", str(getattr(error, "problem", error))
    return str(path), " ".join(str(error).split())


def _refuse_duplicates(path: Path, root: yaml.Node) -> None:
    """PyYAML takes the last of two equal keys without a word."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))  # an anchor's node stands in several places, even inside itself
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    raise ConfigError(
                        f"{path}, line {line}: expected every setting once, but {shown(key.value)} stands on line "
                        f"{lines[key.value]} already; remove one of them"
                    )
                lines[key.value] = line
            nodes.append(value)


def _settings(loader: yaml.SafeLoader, path: Path, root: yaml.Node, sections: tuple[str, ...]) -> Iterator[Given]:
    for key, node, where in _items(loader, path, root, ""):
        if key in sections and isinstance(node, yaml.MappingNode) and node.value:
            for name, inner, inner_where in _items(loader, path, node, f"{key}."):
                yield Given(key=f"{key}.{name}", value=_value(loader, inner, inner_where), where=inner_where)
        else:
            yield Given(key=key, value=_value(loader, node, where), where=where)


def _value(loader: yaml.SafeLoader, node: yaml.Node, where: str) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, RecursionError):
        raise
    except MALFORMED as error:
        text = shown(node.value) if isinstance(node, yaml.ScalarNode) else "a part of it"
        raise ConfigError(
            f"{where}: expected a value, but YAML cannot read {text}; put it in quotes if it is text"
        ) from error


def _items(loader: yaml.SafeLoader, path: Path, node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Name, node and place of what a mapping holds; where a merged anchor says the same, the mapping's own word."""
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path}: expected settings such as 'learning_rate: 1e-5', a line each, but got "
            f"{shown(loader.construct_object(node, deep=True))}; write a mapping"
        )
    loader.flatten_mapping(node)
    items: dict[str, tuple[str, yaml.Node, str]] = {}
    for key_node, value in node.value:
        key, line = loader.construct_object(key_node, deep=True), key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(
                f"{path}, line {line}: expected the name of a setting, but got {shown(key)}; put it in quotes if it "
                "is a name"
            )
        items[key] = (key, value, f"{path}, line {line}: {prefix}{key}")
    yield from items.values()
