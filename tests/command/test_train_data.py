"""Training data: every kind is read unchanged and trains; everything else is refused with file and line."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.arrow_writer import ArrowWriter
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from outcore.command.train.data import readers
from outcore.command.train.data.load import Data, load_data
from outcore.command.train.data.sources import shares, sources_of
from outcore.command.train.methods import FINE_TUNING
from outcore.command.train.model.byte_tokenizer import END, TURN, byte_tokenizer
from outcore.core.errors import ConfigError

from .conftest import CHECKPOINTING

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo \u2028é"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 0.1}}}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"limit": 52.520006599999}}}]


@pytest.fixture(autouse=True)
def _no_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Nothing may end up in the libraries' own caches, except data sets of the hub."""
    home = tmp_path_factory.mktemp("home") / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    yield
    assert not home.exists() or "hub" in {path.name for path in home.iterdir()}


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def load(path: Path, cache: Path | None = None):
    return load_data([str(path)], flag="--data", cache=cache or path.parent / "cache", method=FINE_TUNING)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return load(path).rows.to_list()


class TestKinds:
    def test_text_file_is_a_document(self, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes("one\r\ntwo é\n\nthree".encode())
        data = load(tmp_path / "a.txt")
        assert (data.kind, data.is_conversational, data.notices) == ("text", False, ())
        assert data.rows.to_list() == [{"text": "one\r\ntwo é\n\nthree"}]

    def test_byte_order_mark_is_no_text(self, tmp_path: Path):
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
        (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl({"text": "one"}).encode())
        (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbftext\none\n")
        assert [rows_of(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.csv")] == 3 * [[{"text": "one"}]]

    def test_long_text_is_cut_at_line_ends_and_nothing_is_lost(self, tmp_path: Path):
        lines = [f"line {n} {'é' * (n % 97)}\n" for n in range(3000)] + ["x" * 200_000 + "\n", "end"]
        (tmp_path / "a.txt").write_text("".join(lines))
        texts = [row["text"] for row in rows_of(tmp_path / "a.txt")]
        assert "".join(texts) == "".join(lines)
        assert [text for text in texts if len(text.encode()) > readers.TEXT_ROW_BYTES] == ["x" * 200_000 + "\n"]
        assert all(text.endswith("\n") for text in texts[:-1])
        assert len(texts) < 10

    def test_text_in_jsonl_with_blank_lines_and_other_keys(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text(
            jsonl({"text": "one", "id": 1}) + " \n\n" + jsonl({"text": "two", "meta": {}})
        )
        data = load(tmp_path / "a.jsonl")
        assert data.rows.to_list() == [{"text": "one"}, {"text": "two"}]
        assert data.notices == ("not used: id, meta",)

    def test_what_looks_like_a_date_or_a_number_stays_text(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text(jsonl({"text": "2024-01-01"}))
        (tmp_path / "b.csv").write_text("text\n007\nNA\n")
        assert load(tmp_path / "a.jsonl").rows["text"][:] == ["2024-01-01"]
        assert load(tmp_path / "b.csv").rows["text"][:] == ["007", "NA"]

    def test_prompts_and_completions_in_csv(self, tmp_path: Path):
        with (tmp_path / "a.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [["completion", "prompt"], ["c,1", 'p "1"\nand more'], [], ["", "p2"], ["c" * 200_000, ""]]
            )
        data = load(tmp_path / "a.csv")
        assert (data.kind, data.is_conversational) == ("prompt_completion", False)
        assert data.rows.to_list() == [
            {"prompt": 'p "1"\nand more', "completion": "c,1"},
            {"prompt": "p2", "completion": ""},
            {"prompt": "", "completion": "c" * 200_000},
        ]

    def test_messages_keep_exactly_the_keys_that_they_have(self, tmp_path: Path):
        rows = [
            {"messages": HELLO},
            {"messages": [*HELLO, CALL, {"role": "tool", "name": "f", "content": "5"}], "tools": TOOLS},
            {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}, "source": "web", "tools": None},
        ]
        (tmp_path / "a.jsonl").write_text(jsonl(*rows))
        data = load(tmp_path / "a.jsonl")
        assert (data.kind, data.is_conversational, data.notices) == ("messages", True, ("not used: source",))
        assert data.rows["messages"][:] == [row["messages"] for row in rows]
        assert [tools and json.loads(tools) for tools in data.rows["tools"]] == [None, TOOLS, None]
        assert data.rows["chat_template_kwargs"][:] == [{}, {}, {"enable_thinking": False}]

    def test_columns_that_no_row_needs_are_not_there(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text(jsonl({"messages": HELLO, "tools": [], "chat_template_kwargs": {}}))
        assert load(tmp_path / "a.jsonl").rows.column_names == ["messages"]

    def test_prompts_and_completions_as_messages(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text(jsonl({"prompt": HELLO[:1], "completion": HELLO[1:], "messages": None}))
        data = load(tmp_path / "a.jsonl")
        assert (data.kind, data.is_conversational) == ("prompt_completion", True)
        assert data.rows.to_list() == [{"prompt": HELLO[:1], "completion": HELLO[1:]}]

    def test_parquet_leaves_out_what_its_structures_fill_up(self, tmp_path: Path):
        rows = [{"messages": HELLO, "id": 1}, {"messages": [*HELLO, CALL], "id": 2}]
        data = load(parquet(tmp_path / "a.parquet", *rows))
        assert data.rows["messages"][:] == [row["messages"] for row in rows]
        assert data.notices == ("not used: id",)

    def test_richest_kind_counts(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text(jsonl({"prompt": "hi", "completion": "yo", "messages": HELLO}))
        data = load(tmp_path / "a.jsonl")
        assert (data.kind, data.notices) == ("messages", ("not used: prompt, completion",))

    def test_empty_rows_are_left_out_and_told(self, tmp_path: Path):
        (tmp_path / "a.csv").write_text('text,n\n"",1\nx,2\n"",3\n')
        data = load(tmp_path / "a.csv")
        assert data.rows.to_list() == [{"text": "x"}]
        assert data.notices == (
            "not used: n",
            f"left out as empty: 2 rows, the first is '{tmp_path / 'a.csv'}', line 2",
        )

    def test_directory_in_order_without_hidden_files(self, tmp_path: Path):
        folder = tmp_path / "corpus"
        (folder / "b" / "deep").mkdir(parents=True)
        (folder / ".git").mkdir()
        (folder / ".git" / "config").write_text("no")
        (folder / ".hidden.txt").write_text("no")
        (folder / "c.TXT").write_text("3")
        (folder / "b" / "deep" / "x.txt").write_text("2")
        (folder / "a.jsonl").write_text(jsonl({"text": "1"}))
        (tmp_path / "elsewhere.txt").write_text("4")
        (folder / "d.txt").symlink_to(tmp_path / "elsewhere.txt")
        assert [row["text"] for row in load(folder, tmp_path / "cache").rows] == ["1", "2", "3", "4"]

    def test_several_follow_one_another(self, tmp_path: Path):
        (tmp_path / "b.txt").write_text("b")
        (tmp_path / "a.jsonl").write_text(jsonl({"text": "a"}, {"text": "c"}))
        data = load_data(
            [str(tmp_path / n) for n in ("b.txt", "a.jsonl")],
            flag="--data",
            cache=tmp_path / "cache",
            method=FINE_TUNING,
        )
        assert [row["text"] for row in data.rows] == ["b", "a", "c"]
        assert data.sources == (f"{tmp_path}/b.txt: 1 rows", f"{tmp_path}/a.jsonl: 2 rows")

    def test_weights_draw_rows_by_the_seed_alone(self, tmp_path: Path):
        names = []
        for name, count, weight in (("a", 30, 1), ("b", 10, 3)):
            (tmp_path / name).with_suffix(".jsonl").write_text(jsonl(*({"text": f"{name}{n}"} for n in range(count))))
            names.append(f"{tmp_path}/{name}.jsonl:{weight}")

        def draw(seed: int) -> list[str]:
            data = load_data(names, flag="--data", cache=tmp_path / "cache", method=FINE_TUNING, seed=seed)
            assert data.sources[1] == f"{tmp_path}/b.jsonl: 10 rows, 30 drawn (weight 3)"
            return [row["text"] for row in data.rows]

        rows = draw(1)
        times = Counter(rows)
        assert [times[f"b{n}"] for n in range(10)] == 10 * [3]  # each once before any comes again
        assert sorted(n for text, n in times.items() if text.startswith("a")) == 10 * [1]
        assert draw(1) == rows != draw(2)

    @pytest.mark.parametrize(
        ("counts", "weights", "wanted"), [((60, 20), (1, 1), [40, 40]), ((5, 5, 1), (1, 1, 1), [4, 4, 3])]
    )
    def test_rows_are_shared_out_by_weight(self, counts, weights, wanted):
        assert shares(counts, weights) == wanted

    def test_a_path_may_look_like_a_weight(self, tmp_path: Path):
        (tmp_path / "a:2.txt").write_text("one")
        (tmp_path / "a:2.txt").rename(tmp_path / "a.txt:2")
        (tmp_path / "a.txt").write_text("other")
        assert sources_of([f"{tmp_path}/a.txt:2"]) == [(f"{tmp_path}/a.txt:2", None)]
        assert sources_of([f"{tmp_path}/a.txt:3"]) == [(f"{tmp_path}/a.txt", 3.0)]
        assert sources_of(["org/corpus:test", "org/corpus"]) == [("org/corpus:test", None), ("org/corpus", None)]
        assert sources_of(["org/corpus:test:2"]) == [("org/corpus:test", 2.0)]

    def test_hub_data_set_from_the_cache(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
        write_hub_cache("owner___name", "main", {"train": ["a", "b"], "test": ["c"]})
        for name, texts in {
            "owner/name": ["a", "b"],
            "owner/name:test": ["c"],
            "owner/name:main:train[1:]": ["b"],
        }.items():
            data = load_data([name], flag="--data", cache=tmp_path / "cache", method=FINE_TUNING)
            assert [row["text"] for row in data.rows] == texts
            assert data.notices == ("not used: label",)
            assert Path(data.rows.cache_files[0]["filename"]).is_relative_to(tmp_path)


def write_hub_cache(folder: str, config: str, splits: dict[str, list[str]]) -> None:
    """Write what ``datasets`` leaves behind after it has loaded a data set from the hub."""
    root = datasets.config.HF_DATASETS_CACHE
    place = root / folder / config / "0.0.0" / ("0" * 40)
    place.mkdir(parents=True)
    (root / "hub").touch()
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.Value("int64")})
    name = folder.split("___")[-1]
    for split, texts in splits.items():
        with ArrowWriter(features=features, path=str(place / f"{name}-{split}.arrow")) as writer:
            writer.write_batch({"text": texts, "label": [0] * len(texts)})
            writer.finalize()
    info = datasets.DatasetInfo(
        features=features,
        config_name=config,
        dataset_name=name,
        splits=[{"name": split, "num_examples": len(texts), "dataset_name": name} for split, texts in splits.items()],
    )
    info.write_to_directory(str(place))


class TestTraining:
    """What TRL makes of every kind of data: nothing is lost, and the loss covers the right tokens."""

    def test_packed_text(self, tmp_path: Path):
        lines = [f"line {n} é\n" for n in range(8000)]
        (tmp_path / "a.txt").write_text("".join(lines))
        data = load(tmp_path / "a.txt")
        assert len(data.rows) == 2
        rows = tokenized(data, packing=True, packing_strategy="wrapped", shuffle_dataset=False)
        tokens = [token for row in rows for token in row["input_ids"]]
        assert len(tokens) == len("".join(lines).encode()) + len(data.rows)
        assert "".join(lines) == byte_tokenizer().decode(tokens).replace(END, "")

    def test_prompts_and_completions(self, tmp_path: Path):
        (tmp_path / "a.csv").write_text("prompt,completion\n1+1=,2\n,x\n")
        assert learned(tokenized(load(tmp_path / "a.csv"))) == [("1+1=2<|end|>", "2<|end|>"), ("x<|end|>", "x<|end|>")]

    def test_prompts_and_completions_as_messages(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_text(jsonl({"prompt": HELLO[:1], "completion": HELLO[1:]}))
        whole, loss = f"{TURN}user\nhi{END}{TURN}assistant\nyo \u2028é{END}", f"yo \u2028é{END}"
        assert learned(tokenized(load(tmp_path / "a.jsonl"))) == [(whole, loss)]

    @pytest.mark.parametrize("assistant_only", [False, True])
    def test_messages(self, tmp_path: Path, assistant_only: bool):
        rows = [
            {"messages": HELLO},
            {"messages": [*HELLO, CALL, {"role": "tool", "content": "5"}, HELLO[1]], "tools": TOOLS},
            {"messages": HELLO, "chat_template_kwargs": {"unknown": 1}},
        ]
        (tmp_path / "a.jsonl").write_text(jsonl(*rows))
        hello = f"{TURN}user\nhi{END}{TURN}assistant\nyo \u2028é{END}"
        call = json.dumps(CALL["tool_calls"]) + END
        used = f"{TURN}tools\n{json.dumps(TOOLS)}{END}{hello}{TURN}assistant\n{call}{TURN}tool\n5{END}"
        said = f"yo \u2028é{END}"
        found = learned(tokenized(load(tmp_path / "a.jsonl"), assistant_only_loss=assistant_only))
        wholes = [hello, f"{used}{TURN}assistant\n{said}", hello]
        assert [whole for whole, _ in found] == wholes
        assert [loss for _, loss in found] == ([said, said + call + said, said] if assistant_only else wholes)


def tokenized(data: Data, **options: Any) -> datasets.Dataset:
    config = LlamaConfig(vocab_size=259, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    options = {"max_length": 512, "report_to": "none", "use_cpu": True, "bf16": False, **options}
    folder = str(Path(data.rows.cache_files[0]["filename"]).parent / "out")
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig(output_dir=folder, **{CHECKPOINTING: False}, **options),
        train_dataset=data.rows,
        processing_class=byte_tokenizer(),
    )
    assert len(list(Path(folder).parent.glob("cache-*"))) > 0  # its intermediate results are beside the data
    return trainer.train_dataset


def learned(rows: datasets.Dataset) -> list[tuple[str, str]]:
    """For each row: the text that is read, and the text that is learned."""
    decode = byte_tokenizer().decode
    return [(decode(row["input_ids"]), decode([n for n in row["labels"] if n != -100])) for row in rows]


class TestCache:
    def test_everything_is_in_the_cache(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("one")
        data = load(tmp_path / "a.txt", tmp_path / "cache")
        assert sorted(os.listdir(tmp_path)) == ["a.txt", "cache"]
        assert data.rows.cache_files[0]["filename"].startswith(str(tmp_path / "cache"))

    def test_changed_file_is_read_again(self, tmp_path: Path):
        (tmp_path / "a.txt").write_text("one")
        first = load(tmp_path / "a.txt")
        (tmp_path / "a.txt").write_text("two")
        assert load(tmp_path / "a.txt").rows.to_list() == [{"text": "two"}]
        assert first.rows.to_list() == [{"text": "one"}]

    def test_full_disk_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        (tmp_path / "a.txt").write_text("one")
        monkeypatch.setattr(ArrowWriter, "write", full)
        with pytest.raises(ConfigError, match="a.txt': expected to write its rows to .*No space left"):
            load(tmp_path / "a.txt")


def file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder / name

    return make


def directory(*makers: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "corpus").mkdir()
        for maker in makers:
            maker(folder / "corpus")
        return folder / "corpus"

    return make


def truncated_parquet(folder: Path) -> Path:
    path = parquet(folder / "a.parquet", *({"text": f"text {n}" * 50} for n in range(100)))
    path.write_bytes(path.read_bytes()[:-200])
    return path


def damaged_parquet(folder: Path) -> Path:
    path = parquet(folder / "a.parquet", *({"text": os.urandom(50).hex()} for _ in range(100)))
    content = bytearray(path.read_bytes())
    content[10:400] = bytes(390)
    path.write_bytes(content)
    return path


def latin_parquet(folder: Path) -> Path:
    latin = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
    pq.write_table(pa.table({"text": latin}), folder / "a.parquet")
    return folder / "a.parquet"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.txt")
    return folder / "a.txt"


def linked_to_itself(folder: Path) -> Path:
    (folder / "a.txt").symlink_to(folder / "a.txt")
    return folder / "a.txt"


def message(role: Any = "user", content: Any = "hi", **more: Any) -> str:
    return jsonl({"messages": [{"role": role, "content": content, **more}]})


TEXT = jsonl({"text": "x"})
BAD: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "missing": (lambda folder: folder / "a.jsonl", ("a.jsonl'", "there is none")),
    "missing directory": (lambda folder: folder / "no" / "such" / "place", ("there is none",)),
    "empty text": (file("a.txt", ""), ("a.txt'", "at least one row", "left out as empty: 1 rows")),
    "empty jsonl": (file("a.jsonl", "\n \n"), ("a.jsonl'", "at least one row")),
    "empty csv": (file("a.csv", ""), ("a.csv'", "at least one row")),
    "header alone": (file("a.csv", "text\n"), ("at least one row",)),
    "empty parquet": (lambda f: parquet(f / "a.parquet", {"text": ""}), ("at least one row", "left out as empty: 1")),
    "all rows empty": (file("a.jsonl", 3 * jsonl({"text": ""})), ("at least one row", "3 rows", "line 1")),
    "empty directory": (directory(), ("corpus'", ".txt, .jsonl, .csv, .parquet", "has none")),
    "directory of hidden files": (directory(file(".a.txt", "x")), ("has none",)),
    "unknown kind": (file("a.docx", "x"), ("a.docx'", ".txt, .jsonl", "convert")),
    "compressed": (file("a.jsonl.gz", "x"), ("a.jsonl.gz'", ".txt, .jsonl", "decompress")),
    "json": (file("a.json", "[]"), ("a.json'", "one object per line", ".jsonl")),
    "unknown kind in directory": (directory(file("a.txt", "x"), file("README.md", "x")), ("README.md'", "move it out")),
    "pipe": (pipe, ("a.txt'", "pipe, socket or device")),
    "pipe in directory": (directory(pipe), ("corpus/a.txt'", "pipe, socket or device")),
    "device": (lambda folder: Path("/dev/zero"), ("/dev/zero'", "pipe, socket or device")),
    "link to itself": (linked_to_itself, ("a.txt'", "symbolic links")),
    "link to nothing": (directory(lambda f: (f / "b.txt").symlink_to(f / "gone.txt")), ("b.txt'", "No such file")),
    "link upwards": (directory(lambda f: (f / "up").symlink_to(f)), ("corpus/up'", "a folder that contains it")),
    "broken json": (file("a.jsonl", TEXT + '{"text": "x"\n'), ("a.jsonl', line 2", "one JSON object per line")),
    "no json": (file("a.jsonl", TEXT + "\nhello\n"), ("line 3", "one JSON object per line")),
    "pretty-printed json": (file("a.jsonl", "{\n"), ("line 1", "one JSON object per line")),
    "deep json": (file("a.jsonl", "[" * 10**5), ("line 1", "cannot be parsed")),
    "nan": (file("a.jsonl", '{"text": NaN}\n'), ("line 1", "NaN is not JSON")),
    "a key twice": (file("a.jsonl", TEXT + '{"text": "x", "text": "y"}\n'), ("line 2", "has 'text' twice")),
    "a key twice inside": (
        file("a.jsonl", '{"messages": [{"role": "a", "role": "b"}]}\n'),
        ("line 1", "has 'role' twice"),
    ),
    "array line": (file("a.jsonl", TEXT + "[1]\n"), ("line 2", "a JSON object, but got a list")),
    "null line": (file("a.jsonl", "null\n"), ("line 1", "a JSON object, but got null")),
    "missing keys": (
        file("a.jsonl", jsonl({"question": "x", "answer": "y"})),
        ("line 1", "'text', or 'prompt' and 'completion', or 'messages'", "'question', 'answer'"),
    ),
    "no keys": (file("a.jsonl", "{}\n"), ("line 1", "found nothing")),
    "prompt alone": (
        file("a.jsonl", jsonl({"prompt": "x"})),
        ("line 1", "'prompt' and 'completion'", "found 'prompt'"),
    ),
    "missing column": (lambda f: parquet(f / "a.parquet", {"body": "x", "n": 1}), ("row 1", "found 'body', 'n'")),
    "null": (file("a.jsonl", TEXT + '{"text": null}'), ("line 2", "a value for 'text', but it is null")),
    "null in parquet": (lambda f: parquet(f / "a.parquet", {"text": "x"}, {"text": None}), ("row 2", "null")),
    "number": (file("a.jsonl", TEXT + '{"text": 3}'), ("line 2", "'text' to be a string, but got a number")),
    "number in parquet": (lambda f: parquet(f / "a.parquet", {"text": 1.5}), ("row 1", "got a number")),
    "list as text": (file("a.jsonl", '{"text": ["x"]}'), ("line 1", "'text' to be a string, but got a list")),
    "messages as text": (file("a.csv", 'messages\n"[]"\n'), ("line 2", "a list of messages, but got a string")),
    "prompt text, completion messages": (
        file("a.jsonl", jsonl({"prompt": "x", "completion": HELLO})),
        ("line 1", "'completion' to be a string", "got a list"),
    ),
    "prompt messages, completion text": (
        file("a.jsonl", jsonl({"prompt": HELLO, "completion": "x"})),
        ("line 1", "'completion' to be a list of messages, but got a string"),
    ),
    "no messages": (file("a.jsonl", '{"messages": []}'), ("line 1", "'messages' to be a list", "an empty list")),
    "message is text": (file("a.jsonl", '{"messages": ["hi"]}'), ("line 1, 'messages'[0]", "but got a string")),
    "other keys in messages": (
        file("a.jsonl", jsonl({"messages": [{"who": "human", "what": "hi"}]})),
        ("line 1, 'messages'[0]", "'role'", "found 'who', 'what'"),
    ),
    "role is number": (file("a.jsonl", message(role=1)), ("'messages'[0]", "'role'", "a number")),
    "role is empty": (file("a.jsonl", message(role="")), ("'messages'[0]", "'role'")),
    "content is null": (file("a.jsonl", message(content=None)), ("'content' to be a string, but got null",)),
    "content in parts": (
        file("a.jsonl", message(content=[{"type": "text", "text": "hi"}])),
        ("'content' to be a string, but got a list", "join"),
    ),
    "tools are object": (file("a.jsonl", jsonl({"messages": HELLO, "tools": {}})), ("line 1", "'tools' to be a list")),
    "tools are broken": (file("a.jsonl", jsonl({"messages": HELLO, "tools": "[" * 9})), ("'tools' to be JSON",)),
    "template arguments": (
        file("a.jsonl", jsonl({"messages": HELLO, "chat_template_kwargs": [1]})),
        ("line 1", "'chat_template_kwargs' to be an object, but got a list"),
    ),
    "huge number in message": (file("a.jsonl", message(extra=10**30)), ("line 1", "'messages' to be JSON")),
    "deep message": (file("a.jsonl", message(extra=nested(900))), ("line 1", "'messages' to have at most 100 lists")),
    "deep tools": (file("a.jsonl", jsonl({"messages": HELLO, "tools": "[" * 10**5})), ("line 1", "'tools' to be JSON")),
    "half a surrogate pair": (file("a.jsonl", TEXT + r'{"text": "x\ud83d"}'), ("line 2", "surrogate", r"\ud83d")),
    "half a surrogate pair in message": (file("a.jsonl", message(content="\ud83d")), ("line 1", "surrogate")),
    "latin-1": (file("a.txt", "one\ntwo é".encode("latin-1")), ("a.txt', line 2", "UTF-8", "byte 4", "0xe9")),
    "latin-1 in jsonl": (file("a.jsonl", TEXT.encode() + b'{"text": "\xe9"}\n'), ("line 2", "0xe9")),
    "latin-1 in csv": (file("a.csv", b"text\n\xe9\n"), ("line 2", "0xe9")),
    "utf-16": (file("a.txt", "one".encode("utf-16")), ("a.txt'", "0xff", "iconv")),
    "utf-16 without mark": (file("a.txt", "one".encode("utf-16-le")), ("line 1", "a zero byte", "another encoding")),
    "binary": (file("a.txt", b"\x7fELF\n\0\0"), ("line 2", "a zero byte", "binary")),
    "long line": (file("a.txt", "one\n" + "x" * (2**20 + 1)), ("a.txt', line 2", "at most 1.00 MiB", "too long")),
    "text named parquet": (file("a.parquet", "hello"), ("a.parquet'", "a Parquet file")),
    "truncated parquet": (truncated_parquet, ("a.parquet'", "a Parquet file", "fetch it again")),
    "latin-1 in parquet": (latin_parquet, ("a.parquet'", "after row 0", "UTF-8")),
    "damaged parquet": (damaged_parquet, ("a.parquet'", "a Parquet file", "after row 0")),
    "csv without header": (file("a.csv", "one,two\nx,y\n"), ("line 2", "'text', or", "found 'one', 'two'")),
    "csv with two columns of one name": (file("a.csv", "text,text\n"), ("line 1", "every name once")),
    "csv with a field too many": (file("a.csv", 'text,n\n"a\nb",1\nx,2,3\n'), ("line 4", "2 fields", "got 3")),
    "csv with a field too few": (file("a.csv", "text,n\nx\n"), ("line 2", "2 fields", "got 1")),
    "csv with open quotes": (file("a.csv", 'text\nx\n"open\n'), ("line 3", "comma-separated values")),
    "csv with stray quotes": (file("a.csv", 'text\n"a"b\n'), ("line 2", "comma-separated values")),
    "two kinds in a file": (
        file("a.jsonl", TEXT + message()),
        ("line 2: expected 'text' as in", "line 1, but found 'messages'"),
    ),
    "two forms in a file": (
        file("a.jsonl", jsonl({"prompt": "", "completion": "x"}, {"prompt": HELLO, "completion": HELLO})),
        ("line 2: expected 'prompt' and 'completion' as in", "line 1, but found", "lists of messages"),
    ),
    "two kinds in a directory": (
        directory(file("a.txt", "x"), file("b.jsonl", message())),
        ("b.jsonl', line 1: expected 'text' as in", "a.txt', line 1, but found 'messages'"),
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("case", BAD)
    def test_says_what_is_wrong(self, tmp_path: Path, case: str):
        make, words = BAD[case]
        path = make(tmp_path)
        with pytest.raises(ConfigError) as refusal:
            load(path, tmp_path / "cache")
        said = str(refusal.value)
        assert said.startswith(f"--data '{path}")
        assert [word for word in ("expected", *words) if word not in said] == []
        assert "\n" not in said

    @pytest.mark.parametrize(
        ("names", "says"),
        [
            (["{}/a.txt", "{}/empty.txt"], "empty.txt': expected at least one row"),
            (["{}/a.txt:1e6", "{}/b.txt:1"], "b.txt': expected a weight that draws some of 2 rows, but 1 draws none"),
        ],
    )
    def test_one_of_several_gives_nothing(self, tmp_path: Path, names: list[str], says: str):
        for name, text in (("a", "one"), ("b", "two"), ("empty", "")):
            (tmp_path / f"{name}.txt").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_data(
                [name.format(tmp_path) for name in names], flag="--data", cache=tmp_path / "cache", method=FINE_TUNING
            )

    def test_nothing_named(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="--eval-data '': expected a file"):
            load_data([""], flag="--eval-data", cache=tmp_path / "cache", method=FINE_TUNING)

    @pytest.mark.parametrize("name", ["owner/name", "owner/name:test", "name"])
    def test_unknown_data_set(self, tmp_path: Path, name: str):
        with pytest.raises(ConfigError, match=f"^--data '{name}': expected a file or directory here, or the ID"):
            load_data([name], flag="--data", cache=tmp_path / "cache", method=FINE_TUNING)

    def test_unknown_split_and_config(self, tmp_path: Path):
        write_hub_cache("owner___name", "main", {"train": ["a"]})
        for name, said in {"owner/name:nope": "nope", "owner/name:other:train": "Available configs"}.items():
            with pytest.raises(ConfigError, match=f"^--data '{name}': expected .*{said}"):
                load_data([name], flag="--data", cache=tmp_path / "cache", method=FINE_TUNING)

    def test_local_folder_has_no_splits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "corpus").mkdir()
        with pytest.raises(ConfigError, match="'corpus:test': expected a file or a directory"):
            load_data(["corpus:test"], flag="--data", cache=tmp_path / "cache", method=FINE_TUNING)

    def test_unreadable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def refused(path: Path, *_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        (tmp_path / "a.txt").write_text("x")
        for act, name in (("open", "a.txt"), ("iterdir", "")):
            with (
                monkeypatch.context() as patch,
                pytest.raises(ConfigError, match="readable, but got: Permission denied"),
            ):
                patch.setattr(Path, act, refused)
                load(tmp_path / name, tmp_path / "cache")

    def test_long_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(readers, "ROW_BYTES", 2**10)
        for name, start in (("a.jsonl", TEXT), ("a.csv", "text\n")):
            (tmp_path / name).write_text(start + "x" * 2**11)
            with pytest.raises(ConfigError, match="line 2: expected at most 1.00 KiB in a line.*too long"):
                load(tmp_path / name)
        (tmp_path / "a.csv").write_text('text\n"' + "x\n" * 2**10)
        with pytest.raises(ConfigError, match="line 2: expected comma-separated values.*field"):
            load(tmp_path / "a.csv")
