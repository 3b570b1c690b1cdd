"""Values by annotation: what is taken, what it becomes, and that a value once taken is taken again as it is."""

from __future__ import annotations

import dataclasses
import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from outcore.cli.train.fields import Mismatch, coerce, in_words, narrowed, shown

Color = Enum("Color", {"RED": "red", "NO": "no"})


@dataclasses.dataclass
class Point:
    x: float
    name: str | None = None

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("left of zero")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        (3.0, int, 3),
        ("3", int, 3),
        ("3e2", int, 300),
        (2**53 + 1, int, 2**53 + 1),
        (3, float, 3),
        ("1e-5", float, 1e-5),
        (" 4 ", float, 4),
        (True, bool, True),
        ("TRUE", bool, True),
        ("8", int | str, "8"),
        ("8", int | None, 8),
        ("8", float | int | None, 8),
        ("None", int | None, None),
        ("none", str | None, "none"),
        (None, str | None, None),
        (Path("/a"), str, "/a"),
        (["a"], str | list[str], ["a"]),
        (("a",), list[str], ["a"]),
        ([1, "2"], list[int], [1, 2]),
        ([[1, 2]], list[tuple[int, int]], [(1, 2)]),
        ({"a": "1"}, dict[str, int], {"a": 1}),
        ({"a": {1: 2}}, dict, {"a": {1: 2}}),
        ("red", Color, "red"),
        (False, Color, "no"),
        ("x", Literal["x", False], "x"),
        (False, Literal["x", False], False),
        (False, str | None | Literal[False], False),
        ("n_7", Literal["n_[number]"], "n_7"),
        ({"x": "1"}, Point | None, Point(1)),
        (Point(2), Point, Point(2)),
        (object, Any, object),
    ],
    ids=str,
)
def test_taken(value: object, hint: Any, expected: object):
    got = coerce(value, hint)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (1.5, int),
        ("1.5", int),
        (2**63, int),
        (1e300, int),
        (float("inf"), int),
        ("", int),
        (None, int),
        (False, float),
        ("nan", float),
        (float("-inf"), float),
        (10**400, float),
        ([1], float),
        (0, bool),
        ("yes", bool),
        (3, str),
        (b"a", str),
        (datetime.date(2024, 1, 1), str | None),
        ("a", list[str]),
        ({"a"}, list[str]),
        ([1], list[str]),
        ([1, 2, 3], tuple[int, int]),
        ({1: 2}, dict),
        ({"a": "b"}, dict[str, int]),
        ([("a", 1)], dict[str, Any]),
        ("RED", Color),
        (1, Literal[True]),
        (True, Literal[1]),
        ("n_x", Literal["n_[number]"]),
        ("n_[number]x", Literal["n_[number]"]),
        (False, Literal["x"]),
        ({"y": 1}, Point),
        ({}, Point),
        ({"x": -1}, Point),
        ({"x": "a"}, Point),
        (3, Path),
    ],
    ids=str,
)
def test_refused(value: object, hint: Any):
    with pytest.raises(Mismatch):
        coerce(value, hint)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "a whole number or null"),
        (str | list[str] | None, "text or a list, each item text or null"),
        (bool | Literal["a", "b"], "true or false or one of a, b"),
        (Literal["a", False], "one of a, false"),
        (Literal["auto"] | int, "auto or a whole number"),
        (Color, "one of red, no"),
        (list, "a list"),
        (list[tuple[int, int]], "a list, each item a list of 2"),
        (dict[str, Any], "a mapping"),
        (Point, "a mapping with some of x, name"),
        (Literal[tuple("abcdefghijklmnop")], "one of 16 words, the nearest being p"),  # type: ignore[misc]
    ],
    ids=str,
)
def test_in_words(hint: Any, words: str):
    assert in_words(hint, "p").startswith(words)


@pytest.mark.parametrize(
    ("hint", "choices", "expected"),
    [
        (Color | str, None, Literal["red", "no"]),
        (str | None, ["a"], Literal["a"] | None),
        (str, ["a", "b"], Literal["a", "b"]),
        (int | str | None, ["auto"], Literal["auto"] | int | None),
        (str | None, None, str | None),
        (list[Color] | str, None, list[Color] | str),
    ],
    ids=str,
)
def test_narrowed(hint: Any, choices: list[str] | None, expected: Any):
    assert narrowed(hint, choices) == expected


def test_shown():
    assert [shown(v) for v in (None, True, False, "a", 3)] == ["null", "true", "false", "'a'", "3"]
    assert len(shown("x" * 10_000)) < 100
    assert len(shown([["x" * 1000] * 1000] * 1000)) <= 120
    assert shown(1 << 70_000) == "a number of 70001 bits"


WORDS = st.text()
FINITE = st.floats(allow_nan=False, allow_infinity=False)
INTS = st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = {
    int: INTS,
    float: FINITE | INTS,
    bool: st.booleans(),
    str: WORDS,
    int | None: INTS | st.none(),
    str | None: WORDS | st.none(),
    float | str: FINITE | WORDS,
    list[str] | None: st.lists(WORDS) | st.none(),
    list[str] | str: st.lists(WORDS) | WORDS,
    list[float]: st.lists(FINITE),
    list[tuple[int, int]]: st.lists(st.tuples(INTS, INTS)),
    dict[str, int]: st.dictionaries(WORDS, INTS),
    dict[str, Any] | str: st.dictionaries(WORDS, st.none() | WORDS | INTS) | WORDS,
    Color: st.sampled_from(["red", "no"]),
    bool | Literal["a", "b_[n]"]: st.booleans() | st.sampled_from(["a", "b_12"]),
}
FIT = st.sampled_from(list(VALUES)).flatmap(lambda hint: st.tuples(st.just(hint), VALUES[hint]))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(FIT)
def test_what_fits_stays(fit):
    hint, value = fit
    assert coerce(value, hint) == value


@given(FIT)
def test_round_trip_through_yaml(fit):
    """A value that was settled on, written to a settings file, is read as the same value."""
    hint, value = fit
    taken = coerce(value, hint)
    again = coerce(yaml.safe_load(yaml.safe_dump(taken)), hint)
    assert again == taken
    assert type(again) is type(taken)


@given(st.sampled_from([*VALUES, Point, Literal["x", False], narrowed(Color | str)]), ANYTHING)
def test_anything_is_taken_for_good_or_refused(hint, value):
    """Never another error, and what is made of a value needs no second reading."""
    try:
        taken = coerce(value, hint)
    except Mismatch as mismatch:
        assert mismatch.expected
        assert len(shown(value)) <= 120
        return
    assert coerce(taken, hint) == taken


def test_point_hints_resolve():
    assert get_type_hints(Point)["x"] is float
