"""Weights in the Hugging Face layout, tensor by tensor: a file or its shards are never resident as a whole.

See [Note: safetensors]. Files are read with plain reads: truncating a mapped file would kill the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Self, final

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.memory.disk_file import disk_error
from outcore.memory.files.staged_files import sync
from outcore.memory.files.weights_layout import (
    DTYPES,
    MAX_SHARD_BYTES,
    TensorSpec,
    index_name,
    index_text,
    nbytes_of,
    safetensors_header,
    shard_names,
    shards_of,
    single_name,
)

_ADVICE_ON_DTYPES = (
    "complex weights (C64) must be saved as real ones (torch.view_as_real) for a model that takes them so; others are "
    "quantized: name the model that they were made from"
)
_MAX_HEADER_BYTES = 100 * 10**6  # what the format allows

_SAMPLE_BYTES = 256  # bytes of each tensor that ``digest`` reads, to tell weights apart


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    """Where a tensor lies."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@final
class WeightsDirectory:
    """The tensors of a checkpoint directory. Only headers are kept."""

    def __init__(self, path: Path, entries: Mapping[str, _TensorEntry], metadata: Mapping[str, str]) -> None:
        """For ``open`` only."""
        self.path = path
        self.metadata = dict(metadata)
        self._entries = dict(entries)

    @classmethod
    def open(cls, path: str | Path, stem: str = "model") -> Self:
        """Read and check all headers.

        Args:
            path: The directory.
            stem: What the files' names begin with.

        Raises:
            ConfigError: There are no weights, or a file is not what it should be.
        """
        folder = Path(path)
        single, index = folder / single_name(stem), folder / index_name(stem)
        if single.exists():
            return cls(folder, *_read_header(single))
        if not index.exists():
            raise ConfigError(f"weights '{folder}': expected {single.name} or {index.name} there, but found neither")
        weight_map = _read_index(index)
        headers = {name: _read_header(folder / name) for name in sorted(set(weight_map.values()))}
        shards = {name: entries for name, (entries, _) in headers.items()}
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise ConfigError(
                    f"weights '{index}': expected tensor '{name}' in '{shard}', but it is not there; "
                    "the files belong to different saves, fetch them again"
                )
        metadata = {name: text for _, texts in headers.values() for name, text in texts.items()}
        return cls(folder, {name: shards[shard][name] for name, shard in weight_map.items()}, metadata)

    @staticmethod
    def is_there(path: str | Path, stem: str = "model") -> bool:
        """Whether a directory has such files."""
        return any((Path(path) / name).is_file() for name in (single_name(stem), index_name(stem)))

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor as it stands in the file."""
        return self._entry(name).dtype

    def file(self, name: str) -> str:
        """Path of the file with a tensor, relative to the directory."""
        return str(self._entry(name).file.relative_to(self.path))

    def digest(self) -> str:
        """A digest of names, dtypes, shapes and some bytes in the middle of each tensor, to tell weights apart.

        Raises:
            DiskError: A file cannot be read.
        """
        found = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self._entries.items()):
            found.update(f"{name} {entry.dtype} {entry.shape} ".encode())
            try:
                with entry.file.open("rb", buffering=0) as file:
                    file.seek(entry.offset + max(0, entry.nbytes // 2 - _SAMPLE_BYTES // 2))
                    found.update(file.read(min(entry.nbytes, _SAMPLE_BYTES)))
            except OSError as error:
                raise disk_error(f"weights '{entry.file}', tensor '{name}': expected its bytes", error) from error
        return found.hexdigest()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into fresh host memory.

        Raises:
            ConfigError: There is no such tensor, or the file was truncated since ``open``.
            DiskError: The file cannot be read.
        """
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for _ in self._read_in_pieces(name, tensor.reshape(-1).view(torch.uint8), entry.nbytes):
            pass
        return tensor

    def pieces(self, name: str, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield a tensor's bytes in order (1D uint8), ``nbytes`` at a time, in memory that is reused; see ``read``."""
        size = min(nbytes, self._entry(name).nbytes)
        return self._read_in_pieces(name, torch.empty(size, dtype=torch.uint8, device="cpu"), nbytes)

    def _read_in_pieces(self, name: str, memory: torch.Tensor, nbytes: int) -> Iterator[torch.Tensor]:
        entry = self._entry(name)
        what = f"weights '{entry.file}', tensor '{name}': expected {entry.nbytes} bytes at byte {entry.offset}"
        try:
            with entry.file.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                for start in range(0, entry.nbytes, max(1, nbytes)):
                    piece = memory[: min(nbytes, entry.nbytes - start)]
                    done = start + _read_into(file, _bytes_of(piece))
                    if done < start + piece.numel():
                        ends = f"the file ends after {done} of them; it was truncated, fetch it again"
                        raise ConfigError(f"{what}, but {ends}")
                    yield piece
        except OSError as error:
            raise disk_error(what, error) from error

    def _entry(self, name: str) -> _TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(f"weights '{self.path}': expected a tensor '{name}', but there is none") from None


def write_safetensors(
    directory: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    stem: str = "model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    is_synced: bool = True,
) -> list[Path]:
    """Write tensors so that ``from_pretrained`` reads them, one tensor resident at a time.

    Every file is written under a temporary name, synced, and renamed when all are complete. The files through which an
    older save loads are removed before the first rename, and the new index comes last. So a crash may leave weights
    that do not load, but never a mixture of two saves. Shards of an older save are removed.

    Args:
        directory: Created if missing.
        specs: Every tensor, in the order of ``tensors``.
        tensors: Names and values, on any device.
        stem: What the files' names begin with.
        max_shard_bytes: A file grows beyond it only for a single larger tensor.
        metadata: Strings for the files' headers, beside ``format: pt``.
        is_synced: False: the files are not synced; the caller makes them durable. For new files in a new folder.

    Returns:
        The files that were written, the index last if there is one.

    Raises:
        DiskError: The directory cannot be written or is full. Until all files are complete, an older save is untouched.
    """
    folder = Path(directory)
    shards = shards_of(specs, max_shard_bytes)
    names = shard_names(stem, len(shards))
    texts = {"format": "pt", **(metadata or {})}
    stream = iter(tensors)
    partial: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            partial.append(folder / f".{name}.{os.getpid()}.partial")
            _write_shard(partial[-1], shard, stream, texts, is_synced=is_synced)
        extra = next(stream, None)
        if extra is not None:
            raise AssertionError(f"'{extra[0]}' comes after the last of the specs")
        if len(names) > 1:
            index = index_name(stem)
            partial.append(folder / f".{index}.{os.getpid()}.partial")
            with partial[-1].open("wb", buffering=0) as file:
                _write_all(file, memoryview(index_text(names, shards)))
                os.fsync(file.fileno())
            names = [*names, index]
        return _put_in_place(folder, partial, names, stem, is_synced=is_synced)
    except OSError as error:
        raise disk_error(f"weights '{folder}': expected to write {len(names)} files", error) from error
    finally:
        for path in partial:
            with suppress(OSError):  # renamed already, or the disk fails: the first error is the one to report
                path.unlink()


def _read_index(path: Path) -> dict[str, str]:
    index = _parse(_read_bytes(path), path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"weights '{path}': expected a 'weight_map' from names to files, but there is none")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard in (".", "..") or Path(shard).name != shard:
            raise ConfigError(
                f"weights '{path}': expected a file name in the same folder for '{name}', but got {shard!r}"
            )
        if not (path.parent / shard).is_file():
            raise ConfigError(f"weights '{path}': expected the file '{shard}' beside it, but it is missing; fetch it")
    return weight_map


def _read_header(path: Path) -> tuple[dict[str, _TensorEntry], dict[str, str]]:
    """Entries and metadata."""
    what = f"weights '{path}': expected a safetensors file"
    try:
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(_read_exactly(file, 8), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise ConfigError(f"{what}, but its header's size is {header_bytes} in a file of {file_bytes} bytes")
            header = _parse(_read_exactly(file, header_bytes), path)
    except OSError as error:
        raise ConfigError(f"{what}, but it cannot be read: {error}") from error
    metadata = header.pop("__metadata__", None)
    entries = {name: _entry_of(name, fields, path, 8 + header_bytes) for name, fields in header.items()}
    end = 8 + header_bytes
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise ConfigError(f"{what}, but tensor '{name}' starts at byte {entry.offset} where {end} is next")
        end += entry.nbytes
    if end != file_bytes:
        raise ConfigError(f"{what} of {end} bytes, but it has {file_bytes}; it is truncated or damaged, fetch it again")
    return entries, metadata if isinstance(metadata, dict) else {}


def _entry_of(name: str, fields: object, path: Path, base: int) -> _TensorEntry:
    where = f"weights '{path}', tensor '{name}'"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise ConfigError(f"{where}: expected dtype, shape and data_offsets, but got {fields!r}")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise ConfigError(
            f"{where}: expected a dtype of {', '.join(DTYPES)}, but got {fields['dtype']!r}; {_ADVICE_ON_DTYPES}"
        )
    shape, offsets = _sizes(fields["shape"], where), _sizes(fields["data_offsets"], where)
    entry = _TensorEntry(path, base + (offsets[0] if offsets else 0), dtype, shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != entry.nbytes:
        raise ConfigError(f"{where}: expected {entry.nbytes} bytes for {dtype} {shape}, but its range is {offsets}")
    return entry


def _sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ConfigError(f"{where}: expected a list of non-negative integers, but got {value!r}")
    return tuple(value)


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"weights '{path}': expected JSON in it, but it cannot be parsed: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"weights '{path}': expected a JSON object, but got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"weights '{path}': expected a readable file, but got: {error}") from error


def _read_exactly(file: BinaryIO, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: _read_into(file, memoryview(buffer))])


def _read_into(file: BinaryIO, memory: memoryview) -> int:
    done = 0
    while done < memory.nbytes:
        moved = file.readinto(memory[done:])  # type: ignore[attr-defined]  # raw files have it
        if not moved:
            break
        done += moved
    return done


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def refuse_layout(name: str, tensor: torch.Tensor) -> None:
    """Raise for a tensor that is not strided: files cannot hold it."""
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"weights: expected tensors that files can hold, but '{name}' has the layout {tensor.layout}; "
            "register a buffer that need not be saved with persistent=False, or keep its parts in buffers"
        )


def _write_shard(
    path: Path,
    specs: Sequence[TensorSpec],
    stream: Iterator[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
    *,
    is_synced: bool,
) -> None:
    # Larger items first: so every tensor is aligned to its items, which readers that map the file rely on.
    ordered = sorted(specs, key=lambda spec: -spec[1].itemsize)
    offsets = dict(zip([spec[0] for spec in ordered], accumulate(map(nbytes_of, ordered), initial=0), strict=False))
    header = safetensors_header(ordered, metadata)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(header))
        for spec in specs:
            name, tensor = next(stream, ("", torch.empty(0, device="cpu")))
            if (name, tensor.dtype, tuple(tensor.shape)) != spec:
                raise AssertionError(f"expected {spec}, but got ({name!r}, {tensor.dtype}, {tuple(tensor.shape)})")
            refuse_layout(name, tensor)
            file.seek(len(header) + offsets[name])
            _write_all(file, _bytes_of(tensor.detach().cpu().contiguous()))
        if is_synced:
            os.fsync(file.fileno())


def _write_all(file: BinaryIO, memory: memoryview) -> None:
    done = 0
    while done < memory.nbytes:
        done += file.write(memory[done:])


def _put_in_place(
    folder: Path, partial: Sequence[Path], names: Sequence[str], stem: str, *, is_synced: bool
) -> list[Path]:
    single = single_name(stem)
    stale = [folder / index_name(stem)] + ([folder / single] if single not in names else [])
    for path in stale:
        path.unlink(missing_ok=True)
    for path, name in zip(partial, names, strict=True):
        path.rename(folder / name)
    shard = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.safetensors")
    for path in list(folder.iterdir()):
        if shard.fullmatch(path.name) and path.name not in names:
            path.unlink()
    if is_synced:
        sync(folder)
    return [folder / name for name in names]
