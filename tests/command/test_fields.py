"""Values by annotation: what is accepted, what it becomes, and that an accepted value is read again unchanged."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.command.train.settings.given_settings import GivenSetting, from_yaml, shown
from outcore.command.train.settings.schema import SettingKind
from outcore.core.errors import ConfigError

Color = Enum("Color", {"RED": "red", "NO": "no"})


@dataclasses.dataclass
class Point:
    x: float
    name: str | None = None

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("left of zero")


def repr_of(value: object) -> str:
    return shown(value)[:30]


def read(value: object, hint: Any, text: str | None = None, words: list[str] | None = None) -> Any:
    return SettingKind(hint, dataclasses.MISSING, words or ()).read(
        GivenSetting(key="x", value=value, where="here", text=text)
    )


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        (3.0, int, 3),
        ("3", int, 3),
        (2**53 + 1, int, 2**53 + 1),
        (3, float, 3),
        ("1e-5", float, 1e-5),
        (" 4 ", float, 4.0),
        ([1, 2], list[float], [1.0, 2.0]),
        (".5", float, 0.5),
        (True, bool, True),
        ("TRUE", bool, True),
        ("8", int | str, "8"),
        ("8", int | None, 8),
        ("None", int | None, None),
        ("none", str | None, "none"),
        (None, str | None, None),
        (["a"], str | list[str], ["a"]),
        ([[1, 2]], list[tuple[int, int]], [(1, 2)]),
        ({"a": 1}, dict[str, int], {"a": 1}),
        (False, str | None | Literal[False], False),
        ({"x": 1}, Point | None, Point(1.0)),
        ({"x": 1}, Point, Point(1.0)),
        ({"a": [None, 1e-5]}, Any, {"a": [None, 1e-5]}),
    ],
    ids=repr_of,
)
def test_taken(value: object, hint: Any, expected: object):
    got = read(value, hint)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("no", bool, False),
        ("no", Color | str, "no"),
        ("no", str, "no"),
        ("no", bool | Literal["no"], False),
        ("7", str, "7"),
        ("007", str | None, "007"),
        ("7", str | int, 7),
        ("2024-13-45", str, "2024-13-45"),
        ("[a", str, "[a"),
        ("a: b", str, "a: b"),
    ],
    ids=repr_of,
)
def test_what_was_typed_counts_where_text_is_wanted(text: str, hint: Any, expected: object):
    assert read(from_yaml(text), hint, text) == expected


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        (True, int, "a valid integer, but got true"),
        (1.5, int, "a valid integer"),
        ("1.5", int, "a valid integer, but got '1.5'"),
        (float("inf"), int, "a finite number"),
        ("", int, "a valid integer"),
        ("", int | None, "a valid integer"),
        (None, int, "a valid integer, but got null"),
        (False, float, "a valid number"),
        ("nan", float, "a finite number"),
        (float("nan"), float, "a finite number, but got nan"),
        (float("-inf"), float, "a finite number"),
        ("yep", bool, "a valid boolean"),
        (3, str, "a valid string"),
        ("a", list[str], "a valid list"),
        ([1, 2, 3], tuple[int, int], "Tuple should have at most 2 items"),
        ({"y": 1}, Point, "Unexpected keyword argument 'y'"),
        ({}, Point, "Field required 'x'"),
        ({"x": -1}, Point, "left of zero)"),
    ],
    ids=repr_of,
)
def test_refused(value: object, hint: Any, words: str):
    with pytest.raises(ConfigError) as refused:
        read(value, hint)
    assert str(refused.value).startswith("here: expected ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("hint", "words", "expected"),
    [
        (str | None, ["a"], {"a": True, None: True, "b": False}),
        (str | list[str], ["a"], {"a": True, "b": False}),
        (int | str | None, ["auto"], {"auto": True, 2: True, None: True, "x": False}),
    ],
    ids=repr_of,
)
def test_words(hint: Any, words: list[str], expected: dict[Any, bool]):
    for value, is_taken in expected.items():
        try:
            read(value, hint, words=words)
            assert is_taken, value
        except ConfigError as error:
            assert not is_taken, value
            assert f"expected one of {words[0]}" in str(error)


def test_shown():
    assert [shown(v) for v in (None, True, False, "a", 3)] == ["null", "true", "false", "'a'", "3"]
    assert len(shown("x" * 10_000)) < 100
    assert len(shown([["x" * 1000] * 1000] * 1000)) <= 120
    assert shown(1 << 70_000) == "a number of 70001 bits"


WORDS = st.text(st.characters(exclude_categories=["Cs"]))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
INTS = st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = {
    int: INTS,
    float: FINITE,
    bool: st.booleans(),
    str: WORDS,
    int | None: INTS | st.none(),
    str | None: WORDS | st.none(),
    float | str: FINITE | WORDS,
    list[str] | str: st.lists(WORDS) | WORDS,
    list[tuple[int, int]]: st.lists(st.tuples(INTS, INTS)),
    dict[str, Any] | str: st.dictionaries(WORDS, st.none() | WORDS | INTS) | WORDS,
    Color | str: WORDS,
}
FIT = st.sampled_from(list(VALUES)).flatmap(lambda hint: st.tuples(st.just(hint), VALUES[hint]))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(FIT)
def test_what_fits_stays_and_is_read_again_from_a_file(fit):
    """An accepted value, written to a settings file, is read as the same value."""
    hint, value = fit
    taken = read(value, hint)
    assert taken == value
    again = read(from_yaml(yaml.safe_dump(taken, default_style='"')), hint)
    assert again == taken
    assert type(again) is type(taken)


@settings(deadline=None)
@given(st.sampled_from([*VALUES, Point, Literal["x", False]]), ANYTHING)
def test_anything_is_taken_for_good_or_refused(hint, value):
    """Any value is accepted or refused with ConfigError, and an accepted value is read again unchanged."""
    try:
        taken = read(value, hint)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 600
        return
    if not isinstance(taken, Point):
        assert read(taken, hint) == taken
