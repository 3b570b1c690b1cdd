"""Rows that other tools wrote are converted to outcore's form, and the conversion is reported once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl import maybe_convert_to_chatml

from outcore.command.train.data.foreign_rows import ALPACA, SHARE_GPT
from outcore.command.train.data.load import load_data
from outcore.command.train.method import Method
from outcore.command.train.methods import FINE_TUNING, PREFERENCES
from outcore.core.errors import ConfigError

from .conftest import write_jsonl

USER, ASSISTANT, SYSTEM = ({"role": role, "content": role[:1]} for role in ("user", "assistant", "system"))


def said(who: str, what: str) -> dict[str, str]:
    return {"from": who, "value": what}


def load(tmp_path: Path, *rows: dict[str, Any], method: Method = FINE_TUNING) -> tuple[list[dict[str, Any]], Any]:
    data = load_data([str(write_jsonl(tmp_path / "a.jsonl", list(rows)))], flag="--data", cache=tmp_path, method=method)
    return data.rows.to_list(), data


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("ShareGPT", {"conversations": [said("human", "u"), said("gpt", "a")]}, {"messages": [USER, ASSISTANT]}, SHARE_GPT),
    (
        "with a system prompt beside it",
        {"system": "s", "conversations": [said("human", "u"), said("gpt", "a")]},
        {"messages": [SYSTEM, USER, ASSISTANT]},
        SHARE_GPT,
    ),
    (
        "with one inside it, and other roles",
        {"system": "x", "conversations": [said("system", "s"), said("tool", "t")]},
        {"messages": [SYSTEM, {"role": "tool", "content": "t"}]},
        SHARE_GPT,
    ),
    ("its name, our keys", {"conversations": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}, SHARE_GPT),
    ("our name, its keys", {"messages": [said("user", "u")]}, {"messages": [USER]}, SHARE_GPT),
    (
        "Alpaca",
        {"instruction": "u", "output": "a"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        ALPACA,
    ),
    (
        "with an input",
        {"instruction": "Add.", "input": "1, 2", "output": "a", "system": "s"},
        {"prompt": [SYSTEM, {"role": "user", "content": "Add.\n\n1, 2"}], "completion": [ASSISTANT]},
        ALPACA,
    ),
]
JUDGED: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    (
        "texts",
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        None,
    ),
    (
        "texts that begin alike",
        {"chosen": "same a", "rejected": "same b"},
        {"prompt": "same", "chosen": " a", "rejected": " b"},
        None,
    ),
    (
        "a text before messages",
        {"prompt": "u", "chosen": [ASSISTANT], "rejected": [SYSTEM]},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [SYSTEM]},
        None,
    ),
    (
        "a text that the messages repeat",
        {"prompt": "u", "chosen": [USER, ASSISTANT], "rejected": [USER, SYSTEM], "messages": [USER]},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [SYSTEM]},
        None,
    ),
    (
        "ShareGPT",
        {"conversations": [said("human", "u")], "chosen": said("gpt", "a"), "rejected": said("system", "s")},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [SYSTEM]},
        SHARE_GPT,
    ),
    (
        "Alpaca",
        {"instruction": "u", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "b"}]},
        ALPACA,
    ),
]


@pytest.mark.parametrize(
    ("method", "row", "wanted", "notice"),
    [pytest.param(FINE_TUNING, *case, id=name) for name, *case in CASES]
    + [pytest.param(PREFERENCES, *case, id=f"judged, {name}") for name, *case in JUDGED],
)
def test_becomes_ours(tmp_path, method, row, wanted, notice):
    rows, data = load(tmp_path, row, row, method=method)
    assert rows == [wanted, wanted]
    assert [n for n in data.notices if n in (SHARE_GPT, ALPACA)] == ([] if notice is None else [notice])


def test_is_what_trl_makes_of_it(tmp_path):
    row = {"conversations": [said("user", "hi"), {**said("assistant", "yo"), "weight": 1}]}
    rows, _ = load(tmp_path, row)
    assert rows == [maybe_convert_to_chatml(json.loads(json.dumps(row)))]


def test_a_table_too(tmp_path):
    rows = [{"instruction": "u", "input": None, "output": "a", "id": 7}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = load_data([str(tmp_path / "a.parquet")], flag="--data", cache=tmp_path, method=FINE_TUNING)
    assert data.rows.to_list() == [{"prompt": [USER], "completion": [ASSISTANT]}]
    assert data.notices == (ALPACA, "not used: id")


def test_rows_of_our_own_stay_as_they_are(tmp_path):
    rows, data = load(tmp_path, {"text": "a", "instruction": "b", "output": "c"})
    assert (rows, data.notices) == ([{"text": "a"}], ("not used: instruction, output",))


@pytest.mark.parametrize(
    ("method", "row", "says"),
    [
        (FINE_TUNING, {"prompt": "p", "chosen": "a", "rejected": "b"}, "train on them with outcore dpo"),
        (FINE_TUNING, {"chosen": [USER], "rejected": [USER]}, "train on them with outcore dpo"),
        (PREFERENCES, {"text": "a"}, "but found 'text'; train on it with outcore train"),
        (PREFERENCES, {"prompt": "p", "chosen": "a", "rejected": [USER]}, "'rejected' to be a string"),
        (PREFERENCES, {"prompt": [USER], "chosen": "a", "rejected": "b"}, "'chosen' to be a list of messages"),
        (PREFERENCES, {"prompt": "p", "chosen": "a", "rejected": None}, "a value for 'rejected', but it is null"),
        (FINE_TUNING, {"conversations": [said("human", None)]}, "expected 'content' to be a string, but got null"),
        (FINE_TUNING, {"conversations": "hi"}, "expected 'text', or 'prompt' and 'completion', or 'messages'"),
        (FINE_TUNING, {"conversations": [{"from": ["human"], "value": "hi"}]}, "expected 'role' to be a name such as"),
        (FINE_TUNING, {"instruction": "u", "input": 5, "output": "a"}, "'input' to be a string, but got a number"),
        (FINE_TUNING, {"instruction": "u", "input": ["1"], "output": "a"}, "'input' to be a string, but got a list"),
        (
            PREFERENCES,
            {"chosen": ASSISTANT, "rejected": SYSTEM},
            "'chosen' to be a string or a list of messages, but got",
        ),
        (PREFERENCES, {"chosen": 1, "rejected": 2}, "'chosen' to be a string or a list of messages, but got a number"),
        (FINE_TUNING, {"instruction": "u"}, "expected 'text', or 'prompt' and 'completion', or 'messages'"),
    ],
)
def test_is_refused_with_its_place(tmp_path, method, row, says):
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, row, method=method)
    assert says in str(refusal.value)
    assert "a.jsonl', line 1" in str(refusal.value)
