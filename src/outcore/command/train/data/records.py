"""What a row of training data may look like: text, prompt and completion, messages, preferences; all rows alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import datasets

from outcore.command.train.data.foreign_rows import read_foreign, type_name
from outcore.command.train.method import Kind, Method
from outcore.core.errors import ConfigError

COLUMNS = (
    *("messages", "prompt", "completion", "text", "chosen", "rejected", "tools", "chat_template_kwargs"),
    *("conversations", "system", "instruction", "input", "output"),
)
"""All columns that training can use, under outcore's names and those of other tools."""

_KEYS: Mapping[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "preferences": ("prompt", "chosen", "rejected"),
}
_DEEPEST = 100  # Transformers walks through messages by recursion, and Python limits that
_SHOWN = 20  # names of keys in a message; a file of machine-made keys may have any number


class Record(NamedTuple):
    """A row as a file has it."""

    where: str
    """File and line."""
    fields: Mapping[str, Any]
    """Values by name; nothing about them has been checked."""


class RowFormat(NamedTuple):
    """What all rows of one data set share."""

    kind: Kind
    is_conversational: bool
    """Whether its keys hold lists of messages, not strings."""

    def features(self) -> datasets.Features:
        """Return the columns of the data set.

        Messages and template arguments are JSON, since rows differ in their keys. Tools are JSON, too, but in a column
        of strings, which TRL decodes: a column like the others would round numbers.
        """
        value = datasets.List(datasets.Json()) if self.is_conversational else datasets.Value("string")
        columns = dict.fromkeys(_KEYS[self.kind], value)
        if self.is_conversational:
            columns |= {"tools": datasets.Value("string"), "chat_template_kwargs": datasets.Json()}
        return datasets.Features(columns)

    def __str__(self) -> str:
        what = " and ".join(f"'{key}'" for key in _KEYS[self.kind])
        return f"{what} as lists of messages" if len(_KEYS[self.kind]) > 1 and self.is_conversational else what


@final
class Rows:
    """Checks records and makes rows of one data set of them."""

    def __init__(self, method: Method) -> None:
        """Start without rows.

        Args:
            method: What the rows are for.
        """
        self._method = method
        self.first: tuple[str, RowFormat] | None = None
        """Place and form of the first row."""
        self.used: set[str] = set()
        """Optional columns that some row needs."""
        self._unused: dict[str, None] = {}
        self._converted: dict[str, None] = {}
        self._num_empty = 0
        self._first_empty = ""

    def check(self, record: Record) -> dict[str, Any] | None:
        """Return the row of a record as it is stored, with conversations as JSON; None: the record is empty.

        Raises:
            ConfigError: The record is not a row, or not one like those before.
        """
        record = self._in_our_words(record)
        form = _form_of(record, self._method)
        read = _conversation if form.is_conversational else _string
        row: dict[str, Any] = {key: read(record, key) for key in _KEYS[form.kind]}
        is_empty = not any(row.values())
        if form.is_conversational:
            options = _options(record)
            self.used |= {name for name, value in options.items() if value not in (None, "{}")}
            row |= options
        self._note(record, row)
        if is_empty:
            self._first_empty = self._first_empty or record.where
            self._num_empty += 1
            return None
        where, expected = self.first or (record.where, form)
        if form != expected:
            raise ConfigError(
                f"{record.where}: expected {expected} as in {where}, but found {form}; train on one of them"
            )
        self.first = where, expected
        return row

    def notices(self) -> tuple[str, ...]:
        """Say what was renamed, and what was left out."""
        notices = list(self._converted)
        if self._unused:
            names = list(self._unused)[:_SHOWN]
            notices.append(f"not used: {', '.join(names)}{', ...' if len(self._unused) > _SHOWN else ''}")
        if self._num_empty:
            notices.append(f"left out as empty: {self._num_empty} rows, the first is {self._first_empty}")
        return tuple(notices)

    def _in_our_words(self, record: Record) -> Record:
        fields, notice = read_foreign(record.where, record.fields)
        if notice is not None:
            self._converted[notice] = None
        return record._replace(fields=self._method.read_row(record.where, fields))

    def _note(self, record: Record, row: Mapping[str, Any]) -> None:
        if len(self._unused) <= _SHOWN:
            self._unused |= dict.fromkeys(str(key) for key in record.fields if key not in row)


def _form_of(record: Record, method: Method) -> RowFormat:
    fields = record.fields
    for kind in method.kinds:
        if all(fields.get(key) is not None for key in _KEYS[kind]):
            return RowFormat(kind, kind != "text" and (kind == "messages" or isinstance(fields["prompt"], list)))
    misfit = method.misfit(fields)
    if misfit is not None:
        raise ConfigError(f"{record.where}: {misfit}")
    wanted = [_KEYS[kind] for kind in reversed(method.kinds)]
    null = next((key for keys in wanted for key in keys if key in fields and fields[key] is None), None)
    if null is not None:
        raise ConfigError(f"{record.where}: expected a value for '{null}', but it is null; leave out such rows")
    expected = ", or ".join(" and ".join(f"'{key}'" for key in keys) for keys in wanted)
    found = ", ".join(f"'{key}'" for key in list(fields)[:_SHOWN]) or "nothing"
    raise ConfigError(f"{record.where}: expected {expected}, but found {found}; rename the keys that hold it")


def _string(record: Record, key: str) -> str:
    value = record.fields[key]
    if not isinstance(value, str):
        also = "" if key == "text" else ", or lists of messages as prompt and completion"
        raise ConfigError(f"{record.where}: expected '{key}' to be a string{also}, but got {type_name(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{record.where}: expected Unicode text in '{key}', but it has half of a surrogate pair "
            f"({value[error.start]!a}); remove it"
        ) from error
    return value


def _conversation(record: Record, key: str) -> list[str]:
    messages = record.fields[key]
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else type_name(messages)
        raise ConfigError(f"{record.where}: expected '{key}' to be a list of messages, but got {what}")
    for i, message in enumerate(messages):
        _check_message(f"{record.where}, '{key}'[{i}]", message)
    return [_json(record, key, message) for message in messages]


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, dict):
        raise ConfigError(f"{where}: expected a message with 'role' and 'content', but got {type_name(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        found = ", ".join(f"'{name}'" for name in message) if "role" not in message else type_name(role)
        raise ConfigError(f"{where}: expected 'role' to be a name such as user or assistant, but found {found}")
    if content is None and message.get("tool_calls"):
        return
    if not isinstance(content, str):
        advice = "; join the texts of its parts" if isinstance(content, list) else ""
        raise ConfigError(f"{where}: expected 'content' to be a string, but got {type_name(content)}{advice}")


def _options(record: Record) -> dict[str, Any]:
    """Return tools and template arguments as JSON."""
    tools, arguments = record.fields.get("tools"), record.fields.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{record.where}: expected 'tools' to be JSON, but it is not: {error}") from error
    if not isinstance(tools, list | None):
        raise ConfigError(f"{record.where}: expected 'tools' to be a list, but got {type_name(tools)}")
    if not isinstance(arguments, dict | None):
        raise ConfigError(
            f"{record.where}: expected 'chat_template_kwargs' to be an object, but got {type_name(arguments)}"
        )
    return {
        "tools": _json(record, "tools", tools) if tools else None,
        "chat_template_kwargs": _json(record, "chat_template_kwargs", arguments or {}),
    }


def _json(record: Record, key: str, value: object) -> str:
    if _is_deeper(value, _DEEPEST):
        raise ConfigError(
            f"{record.where}: expected '{key}' to have at most {_DEEPEST} lists and objects inside each other, but it "
            "has more; correct it"
        )
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # This refuses what json accepts: numbers of more than 64 bits, halves of surrogate pairs.
        datasets.Json().decode_example(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{record.where}: expected '{key}' to be JSON, but it is not: {error}") from error
    return text


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)
