"""Records from files, one at a time, each with the place where it stands; no file is ever in memory as a whole.

What cannot be read raises ConfigError. Its message begins with file and line, so that the caller can say which setting
named the file.

[Note: not datasets' own readers] The readers of ``datasets`` change what they read: a JSON text such as 2024-01-01
becomes a date, a line with a list becomes rows, large integers become floats, in CSV 007 becomes 7. And for what they
cannot read, they name a row of a block, or no place. Parquet, which has types, is read by ``pyarrow`` in both.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pyarrow
import pyarrow.parquet

from outcore.command.train.data.foreign_rows import type_name
from outcore.command.train.data.records import COLUMNS, Record
from outcore.command.train.data.sources import SUFFIXES
from outcore.core.errors import ConfigError
from outcore.core.quantities import format_bytes

TEXT_ROW_BYTES = 2**16
"""A longer text file becomes several rows, cut at line ends. TRL holds 1000 rows at a time, as lists of tokens."""
TEXT_LINE_BYTES = 2**20
"""The most bytes in a line of a text file."""
ROW_BYTES = 2**26
"""The most bytes in a line of any other file."""

_PARQUET_ROWS, _BUFFER_BYTES = 64, 2**20  # decoded and read at once; without a buffer a whole group of rows is read


def find_files(path: Path) -> list[Path]:
    """Return the file, or all files below a directory, in the order of their names.

    Raises:
        ConfigError: There is anything but readable files of the known kinds.
    """
    with _readable(path):
        path.stat()
        files = sorted(_files_below(path)) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"'{path}': expected files that end in {', '.join(SUFFIXES)}, but the directory has none")
    for file in files:
        with _readable(file):
            file.stat()
        if not file.is_file():
            raise ConfigError(f"'{file}': expected a file or a directory, but it is a pipe, socket or device")
        if file.suffix.lower() not in SUFFIXES:
            is_json = file.suffix.lower() == ".json"
            raise ConfigError(
                f"'{file}': expected a file that ends in {', '.join(SUFFIXES)}; "
                + ("write it with one object per line and name it .jsonl" if is_json else "decompress or convert it, ")
                + ("" if is_json else "or move it out of the directory")
            )
    return files


def read_records(path: Path) -> Iterator[Record]:
    """Read a file that ``find_files`` found.

    Of a Parquet file only the columns that training can use are read; the others are null.

    Raises:
        ConfigError: The file is not what its name says.

    Memory: host, a row; of a Parquet file, a few dozen.
    """
    return _READERS[path.suffix.lower()](path)


def without_nulls_inside(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table as JSON would have it: Arrow's structures have all keys, and null if absent."""
    return {name: _without_nulls(value) for name, value in fields.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _files_below(path: Path) -> Iterator[Path]:
    """Yield all files in a folder and in those below it, but no hidden ones."""
    for entry in path.iterdir():
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield entry
        elif entry.resolve() in path.resolve().parents or entry.samefile(path):
            raise ConfigError(f"'{entry}': expected folders and files, but it is a link to a folder that contains it")
        else:
            with _readable(entry):
                yield from _files_below(entry)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"'{path}': expected something readable, but got: {error.strerror or error}") from error


def _text(path: Path) -> Iterator[Record]:
    rows: list[str] = []
    length, first = 0, _where(path, 1)
    for where, line in _lines(path, TEXT_LINE_BYTES):
        nbytes = len(line.encode())
        if rows and length + nbytes > TEXT_ROW_BYTES:
            yield Record(first, {"text": "".join(rows)})
            rows, length, first = [], 0, where
        rows.append(line)
        length += nbytes
    yield Record(first, {"text": "".join(rows)})


def _jsonl(path: Path) -> Iterator[Record]:
    for where, text in _lines(path, ROW_BYTES):
        if not text.strip():
            continue
        try:
            fields = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}: expected one JSON object per line, but it cannot be parsed: {error}"
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: expected a JSON object, but got {type_name(fields)}")
        yield Record(where, fields)


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(ROW_BYTES)  # of the whole process; the default of 128 KiB is less than a document
    reader = csv.reader((line for _, line in _lines(path, ROW_BYTES)), strict=True)
    header: list[str] | None = None
    where = _where(path, 1)
    try:
        for fields in reader:
            if header is None and fields:
                header = fields
                if len(set(header)) != len(header):
                    raise ConfigError(f"{where}: expected a header with every name once, but got {', '.join(header)}")
            elif header is not None and fields:
                if len(fields) != len(header):
                    raise ConfigError(f"{where}: expected {len(header)} fields as in the header, but got {len(fields)}")
                yield Record(where, dict(zip(header, fields, strict=True)))
            where = _where(path, reader.line_num + 1)
    except csv.Error as error:
        raise ConfigError(f"{where}: expected comma-separated values, but got: {error}") from error


def _parquet(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            names = file.schema_arrow.names
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[n for n in names if n in COLUMNS] or names[:1]):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"'{path}', row {number}", dict.fromkeys(names) | without_nulls_inside(fields))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"'{path}': expected a Parquet file, but reading it fails after row {number}: "
            f"{' '.join(str(error).split())}; it may be truncated, fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"'{path}': expected text in UTF-8, but one after row {number} has the byte "
            f"0x{error.object[error.start]:02x} ({error.reason}); convert it to UTF-8"
        ) from error


_READERS: Mapping[str, Callable[[Path], Iterator[Record]]] = dict(
    zip(SUFFIXES, (_text, _jsonl, _csv, _parquet), strict=True)
)


def _lines(path: Path, limit_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield lines with their ends, each behind its place. They are read as bytes: the place of a wrong one is known."""
    with _readable(path), path.open("rb") as file:
        number = 0
        while content := file.readline(limit_bytes + 1):
            number += 1
            where = _where(path, number)
            if len(content) > limit_bytes:
                raise ConfigError(
                    f"{where}: expected at most {format_bytes(limit_bytes)} in a line, but it is too long; break it "
                    "into several"
                )
            try:
                text = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{where}: expected UTF-8, but byte {error.start} of the line is 0x{content[error.start]:02x} "
                    f"({error.reason}); convert it: iconv -f ENCODING -t UTF-8"
                ) from error
            if "\0" in text:
                raise ConfigError(
                    f"{where}: expected text, but the line has a zero byte; it is a binary file, or text in another "
                    "encoding than UTF-8"
                )
            yield where, text


def _where(path: Path, line_number: int) -> str:
    return f"'{path}', line {line_number}"


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has '{next(name for name in names if names.count(name) > 1)}' twice")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
