"""What a setting's annotation admits, and how a value from YAML or the command line becomes one of that type.

YAML and flags know other types than Python's annotations: ``1e-5`` is text in YAML, ``no`` is false, an enumeration is
its word, and a mapping stands for a dataclass. A value that already fits is kept as it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import os
import re
import reprlib
import types
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LONG = 12  # so many choices are named in a message; of more, the nearest ones
_INT_BOUND = 2**63  # what torch and numpy take

_BOOLS = {"true": True, "false": False}
_SHOWN = 120  # so many characters of a value stand in a message
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 80


class Mismatch(Exception):  # noqa: N818 (not an error of its own: it becomes a message that says where)
    """A value is not of its setting's type.

    Attributes:
        expected: The type in a person's words.
    """

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected


def narrowed(hint: Any, choices: Collection[str] | None = None) -> Any:
    """Let an annotation say all that is known: text with given choices, or beside an enumeration, is one of them."""
    members = _members(hint)
    enums = [m for m in members if isinstance(m, type) and issubclass(m, Enum)]
    words = [v for enum in enums for v in _words(enum)] or list(choices or ())
    if not words:
        return hint
    others = [m for m in members if m is not str and m not in enums]
    return Union[tuple([Literal[tuple(words)], *others])]  # noqa: UP007 (made at run time)


def coerce(value: object, hint: Any) -> Any:
    """Turn a value as YAML or the command line has it into one that ``hint`` admits.

    Raises:
        Mismatch: It stands for no such value. Numbers that are not finite never do.
    """
    members = _members(hint)
    # As it is, where it can be: "8" stays text where text is admitted, and becomes a number elsewhere.
    if Any in members or (type(value) in members and isinstance(value, str | bool)):
        return value
    for member in members:
        try:
            return _reader(member)(value)
        except Mismatch:
            continue
    raise Mismatch(in_words(hint, value))


def in_words(hint: Any, value: object = None) -> str:
    """Say what ``hint`` admits; of many choices those nearest to ``value``."""
    members = [m for m in _members(hint) if m is not type(None)]
    words = [_in_words(m, value) for m in members]
    if len(members) < len(_members(hint)):
        words.append("null")
    return " or ".join(dict.fromkeys(words))


def shown(value: object) -> str:
    """Write a value for a message, as YAML would, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= _INT_BOUND:
        return f"a number of {value.bit_length()} bits"
    text = value.isoformat() if isinstance(value, datetime.date) else _shorten.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> tuple[Any, ...]:
    """What an enumeration or a Literal consists of, as it is written."""
    return get_args(hint) if get_origin(hint) is Literal else tuple(member.value for member in hint)


def _is_choice(hint: Any) -> bool:
    return get_origin(hint) is Literal or (isinstance(hint, type) and issubclass(hint, Enum))


def _reader(hint: Any) -> Callable[[object], Any]:
    kind = get_origin(hint) or hint
    if _is_choice(hint):
        return lambda value: _read_choice(value, _words(hint))
    if dataclasses.is_dataclass(kind):
        return lambda value: _read_dataclass(value, hint)
    if kind in (list, tuple, dict):
        return lambda value: _READ_MANY[kind](value, get_args(hint))
    if kind in _READ_ONE:
        return _READ_ONE[kind]
    return lambda value: _read_instance(value, kind)


def _read_none(value: object) -> None:
    if value is not None and not (isinstance(value, str) and value.lower() in ("none", "null")):
        raise Mismatch("null")


def _read_bool(value: object) -> bool:
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    if not isinstance(value, bool):
        raise Mismatch("true or false")
    return value


def _read_int(value: object) -> int:
    number = _read_float(value)
    if number != int(number) or abs(number) >= _INT_BOUND:
        raise Mismatch("a whole number")
    return int(number)


def _read_float(value: object) -> int | float:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise Mismatch("a number")
        number = _parse_number(value) if isinstance(value, str) else value
        if not math.isfinite(number):
            raise Mismatch("a finite number")
    except (ValueError, OverflowError) as error:
        raise Mismatch("a number") from error
    return number


def _parse_number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _read_str(value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise Mismatch("text")
    return str(os.fspath(value))


def _read_choice(value: object, words: Collection[Any]) -> Any:
    if value is False and False not in words and "no" in words:
        return "no"  # YAML reads a bare no as false
    for word in words:
        if type(word) is type(value) and (word == value or _fits_pattern(value, word)):
            return value
    raise Mismatch("one of a few words")


def _fits_pattern(value: object, word: object) -> bool:
    """PEFT writes ``pissa_niter_[number of iters]`` for any such number."""
    if not isinstance(value, str) or not isinstance(word, str) or "[" not in word:
        return False
    return re.fullmatch(re.sub(r"\\\[.*?\\\]", r"\\d+", re.escape(word)), value) is not None


def _read_list(value: object, items: tuple[Any, ...]) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise Mismatch("a list")
    return [coerce(item, items[0]) if items else item for item in value]


def _read_tuple(value: object, items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != len(items):
        raise Mismatch(f"{len(items)} values")
    return tuple(coerce(item, hint) for item, hint in zip(value, items, strict=True))


def _read_dict(value: object, items: tuple[Any, ...]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Mismatch("a mapping")
    return {key: coerce(item, items[1]) if items else item for key, item in value.items()}


def _read_dataclass(value: object, kind: Any) -> Any:
    if isinstance(value, kind):
        return value
    hints = get_type_hints(kind)
    if not isinstance(value, Mapping) or not set(value) <= set(hints):
        raise Mismatch("a mapping")
    try:
        return kind(**{name: coerce(item, hints[name]) for name, item in value.items()})
    except (TypeError, ValueError) as error:
        raise Mismatch("a mapping") from error


def _read_instance(value: object, kind: Any) -> Any:
    if not isinstance(kind, type) or not isinstance(value, kind):
        raise Mismatch("another type")
    return value


_READ_ONE: Mapping[Any, Callable[[object], Any]] = {
    type(None): _read_none,
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_str,
}
_READ_MANY: Mapping[Any, Callable[[object, tuple[Any, ...]], Any]] = {
    list: _read_list,
    tuple: _read_tuple,
    dict: _read_dict,
}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}


def _in_words(hint: Any, value: object) -> str:
    kind = get_origin(hint) or hint
    if _is_choice(hint):
        return _choices_in_words([word if isinstance(word, str) else shown(word) for word in _words(hint)], value)
    if kind is list:
        return f"a list, each item {in_words(get_args(hint)[0])}" if get_args(hint) else "a list"
    if kind is tuple:
        return f"a list of {len(get_args(hint))}"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"a mapping with some of {', '.join(f.name for f in dataclasses.fields(hint) if f.init)}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _choices_in_words(words: list[str], value: object) -> str:
    if len(words) <= _LONG:
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    begun = [word for word in words if word.startswith(str(value))]
    nearest = begun[:3] or difflib.get_close_matches(str(value), words, n=3, cutoff=0)
    return f"one of {len(words)} words, the nearest being {', '.join(nearest)}"
