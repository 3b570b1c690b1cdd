"""Training data from files or the hub, checked row by row and written as a dataset that TRL can train on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from datasets.arrow_writer import ArrowWriter
from datasets.exceptions import DatasetsError

from outcore.command.train.data.readers import find_files, read_records, without_nulls_inside
from outcore.command.train.data.records import COLUMNS, Record, Rows
from outcore.command.train.data.sources import DataSource, drawn, hub_name, shares, sources_of
from outcore.command.train.method import Kind, Method
from outcore.core.errors import ConfigError

_BATCH_ROWS = 400  # written at once, and so decoded at once later; a row may have megabytes


@dataclass(frozen=True)
class Data:
    """Data that was loaded."""

    rows: datasets.Dataset
    """Columns ``text``, or ``prompt`` and ``completion``, or ``messages``, or ``prompt``, ``chosen`` and ``rejected``;
    of conversations also ``tools`` and ``chat_template_kwargs`` where any row has them. At least one row."""
    kind: Kind
    is_conversational: bool
    """Whether rows hold lists of messages, so that a chat template is needed."""
    notices: tuple[str, ...]
    """What was renamed and what was left out, to be told once."""
    sources: tuple[str, ...] = ()
    """Rows of each source, in words; empty if all rows of a single one are there."""


def load_data(names: Sequence[str], *, flag: str, cache: Path, method: Method, seed: int = 0) -> Data:
    """Load and check training or evaluation data.

    Args:
        names: Each a .txt, .jsonl, .csv or .parquet file, a directory of them, or a data set on the hub: ``ID``,
            ``ID:split`` or ``ID:config:split``. Their rows follow one another. Or all end in ``:WEIGHT``: then as many
            rows as they have together are drawn, of each by its weight.
        flag: What the user calls it (``--data``), for messages.
        cache: Folder for the data set, made if missing; its owner removes it. What is on the hub is also in the hub's
            own cache; nothing is written anywhere else.
        method: What the rows are for.
        seed: Of the draw.

    Raises:
        ConfigError: It cannot be used.

    Memory: host, a few hundred rows; a few words for each row that is drawn.
    """
    datasets.disable_progress_bars()  # of this data set, and of what TRL makes of it
    try:
        sources = sources_of(names)
        cache.mkdir(exist_ok=True)
        return _build(sources, Path(tempfile.mkdtemp(prefix="data-", dir=cache)), method, seed)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from error
    except OSError as error:
        raise ConfigError(
            f"{flag} '{', '.join(names)}': expected to write its rows to '{cache}', but got: "
            f"{error.strerror or error}; free space, or name another output directory"
        ) from error


def _build(sources: Sequence[DataSource], folder: Path, method: Method, seed: int) -> Data:
    checked, counts = Rows(method), list[int]()
    rows = _rows(sources, checked, counts)
    first = next(rows)
    if checked.first is None:
        raise AssertionError("a row has a form")
    form = checked.first[1]
    file = folder / "rows.arrow"
    # Dataset.from_generator would hold 1000 rows in memory, of any size, and guess the types from the first of them.
    with ArrowWriter(path=str(file), features=form.features(), writer_batch_size=_BATCH_ROWS) as writer:
        for row in chain([first], rows):
            writer.write(row)
        writer.finalize()
    data = datasets.Dataset.from_file(str(file))
    unneeded = [column for column in ("tools", "chat_template_kwargs") if column in data.column_names]
    data = data.remove_columns([column for column in unneeded if column not in checked.used])
    data, said = _drawn(data, sources, counts, seed)
    return Data(data, form.kind, form.is_conversational, checked.notices(), said)


def _rows(sources: Sequence[DataSource], checked: Rows, counts: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all sources. Args: counts: Gets the number of rows of each."""
    for source in sources:
        counts.append(0)
        for record in _records(source.name):
            if (row := checked.check(record)) is not None:
                counts[-1] += 1
                yield row
        if not counts[-1]:
            left_out = "".join(f"; {notice}" for notice in checked.notices())
            raise ConfigError(f"'{source.name}': expected at least one row with some text, but got none{left_out}")


def _drawn(
    data: datasets.Dataset, sources: Sequence[DataSource], counts: Sequence[int], seed: int
) -> tuple[datasets.Dataset, tuple[str, ...]]:
    """Draw rows by weight, if there are weights. Returns: The rows, and how many of each source they are, in words."""
    weights = [source.weight for source in sources if source.weight is not None]
    said = [f"{source.name}: {count:,} rows" for source, count in zip(sources, counts, strict=True)]
    if not weights:
        return data, tuple(said) if len(said) > 1 else ()
    wanted = shares(counts, weights)
    for source, want in zip(sources, wanted, strict=True):
        if not want:
            raise ConfigError(
                f"'{source.name}': expected a weight that draws some of {len(data):,} rows, but {source.weight:g} "
                "draws none; give it more, or leave it out"
            )
    drawn_by_weight = zip(said, wanted, weights, strict=True)
    return data.select(drawn(counts, wanted, seed)), tuple(
        f"{text}, {want:,} drawn (weight {weight:g})" for text, want, weight in drawn_by_weight
    )


def _records(name: str) -> Iterator[Record]:
    if not name.strip():
        raise ConfigError("'': expected a file, a directory, or the ID of a data set on the hub, but got nothing")
    path = Path(os.path.expanduser(name))
    if os.path.lexists(path):
        for file in find_files(path):
            yield from read_records(file)
    else:
        yield from _hub_records(name)


def _hub_records(name: str) -> Iterator[Record]:
    found = hub_name(name)
    try:
        rows = datasets.load_dataset(found["id"], found["config"], split=found["split"] or "train")
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"'{name}': expected a file or directory here, or the ID of a data set that is on the hub or in its cache, "
            f"but loading it fails: {' '.join(str(error).split())}; give a path, or ID:split or ID:config:split, and "
            "be online"
        ) from error
    names = rows.column_names
    wanted = [column for column in names if column in COLUMNS] or names[:1]
    for number, row in enumerate(rows.select_columns(wanted), 1):
        yield Record(f"'{name}', row {number}", dict.fromkeys(names) | without_nulls_inside(row))
