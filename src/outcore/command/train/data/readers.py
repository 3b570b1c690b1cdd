"""Records from files, one at a time, each with the place where it stands; no file is ever in memory as a whole.

What cannot be read raises ConfigError. Its message begins with file and line, so that the caller can say which setting
named the file.

[Note: not datasets' own readers] For what they cannot read, the readers of ``datasets`` name a row of a block, or no
place. And they silently accept what is wrong: in CSV, 007 becomes 7.0, NA and absent fields become null, and a name
that stands twice is changed; in JSON, NaN becomes null; a text may hold zero bytes. Parquet is read by ``pyarrow`` in
both.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow
import pyarrow.parquet

from outcore.command.train.data.json_types import type_name
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
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")


class _SourceLine(NamedTuple):
    number: int
    offset: int
    """Bytes before the line in the file."""
    content: bytes


def find_files(path: Path) -> list[Path]:
    """Return the file, or all files below a directory, in the order of their names.

    Raises:
        ConfigError: There is anything but readable files of the known kinds.
    """
    with _readable(path):
        files = list(_files_at(path, path.stat(), ()))
    if not files:
        raise ConfigError(f"'{path}': expected files that end in {', '.join(_READERS)}, but the directory has none")
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


def _files_at(path: Path, status: os.stat_result, above: Sequence[tuple[int, int]]) -> Iterator[Path]:
    if stat.S_ISDIR(status.st_mode):
        here = status.st_dev, status.st_ino
        if here in above:
            raise ConfigError(f"'{path}': expected folders and files, but it is a link to a folder that contains it")
        for entry in sorted(path.iterdir()):
            if not entry.name.startswith("."):
                with _readable(entry):
                    yield from _files_at(entry, entry.stat(), (*above, here))
        return
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"'{path}': expected a file or a directory, but it is a pipe, socket or device")
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        advice = "decompress it" if suffix in _COMPRESSED else "convert it, or move it out of the directory"
        if suffix == ".json":
            advice = "write it with one object per line and name it .jsonl"
        raise ConfigError(f"'{path}': expected a file that ends in {', '.join(_READERS)}; {advice}")
    yield path


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"'{path}': expected something readable, but got: {error.strerror or error}") from error


def _text(path: Path) -> Iterator[Record]:
    rows: list[str] = []
    size_bytes, first = 0, 1
    for line in _lines(path, TEXT_LINE_BYTES):
        if rows and size_bytes + len(line.content) > TEXT_ROW_BYTES:
            yield Record(_where(path, first), {"text": "".join(rows)})
            rows, size_bytes, first = [], 0, line.number
        rows.append(_decoded(path, line))
        size_bytes += len(line.content)
    yield Record(_where(path, first), {"text": "".join(rows)})


def _jsonl(path: Path) -> Iterator[Record]:
    for line in _lines(path, ROW_BYTES):
        text = _decoded(path, line)
        if not text.strip():
            continue
        where = _where(path, line.number)
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
    reader = csv.reader((_decoded(path, line) for line in _lines(path, ROW_BYTES)), strict=True)
    header: list[str] | None = None
    line_number = 1
    while (fields := _next_row(reader, path, line_number)) is not None:
        where = _where(path, line_number)
        line_number = reader.line_num + 1
        if not fields:
            continue
        if header is None:
            header = fields
            if len(set(header)) != len(header):
                raise ConfigError(f"{where}: expected a header with every name once, but got {', '.join(header)}")
            continue
        if len(fields) != len(header):
            raise ConfigError(f"{where}: expected {len(header)} fields as in the header, but got {len(fields)}")
        yield Record(where, dict(zip(header, fields, strict=True)))


def _next_row(reader: Iterator[list[str]], path: Path, line_number: int) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        raise ConfigError(f"{_where(path, line_number)}: expected comma-separated values, but got: {error}") from error


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


def _lines(path: Path, limit_bytes: int) -> Iterator[_SourceLine]:
    """Yield lines with their ends, as bytes: the place of what cannot be decoded must be known."""
    with _readable(path), path.open("rb") as file:
        offset = _skip_mark(path, file)
        number = 0
        while content := file.readline(limit_bytes + 1):
            number += 1
            if len(content) > limit_bytes:
                raise ConfigError(
                    f"{_where(path, number)}: expected at most {format_bytes(limit_bytes)} in a line, but it is too "
                    "long; break it into several"
                )
            if b"\0" in content:
                raise ConfigError(
                    f"{_where(path, number)}: expected text, but there is a zero byte at byte "
                    f"{offset + content.index(0)}; it is a binary file, or text in another encoding than UTF-8"
                )
            yield _SourceLine(number, offset, content)
            offset += len(content)


def _skip_mark(path: Path, file: BinaryIO) -> int:
    start = file.read(3)
    if start.startswith(_UTF16):
        raise ConfigError(f"'{path}': expected UTF-8, but it is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    skipped = len(codecs.BOM_UTF8) if start == codecs.BOM_UTF8 else 0
    file.seek(skipped)
    return skipped


def _decoded(path: Path, line: _SourceLine) -> str:
    try:
        return line.content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{_where(path, line.number)}: expected UTF-8, but byte {line.offset + error.start} of the file is "
            f"0x{line.content[error.start]:02x} ({error.reason}); convert it to UTF-8"
        ) from error


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
