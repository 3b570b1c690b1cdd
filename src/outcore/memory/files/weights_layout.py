"""The Hugging Face layout of files of tensors: their names, their headers, and which tensor is in which file.

[Note: safetensors] A file has 8 bytes with the header's size (little-endian), a JSON header that gives every tensor's
dtype, shape and byte range, and the tensors' bytes. Ranges neither overlap nor leave holes
(https://huggingface.co/docs/safetensors/index#format). A directory holds ``model.safetensors``, or shards and
``model.safetensors.index.json``, which maps names to shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from outcore.core.errors import UnsupportedError
from outcore.core.quantities import PAGE_BYTES, align_up

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
STORED_DTYPES = frozenset(DTYPE_NAMES)
"""Dtypes of tensors that files can hold."""

TensorSpec = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor that will be written."""
MAX_SHARD_BYTES = 5 * 10**9
"""Largest size of a file's tensors; a file grows beyond it only for a single larger tensor."""


class LaidOut(NamedTuple):
    """One file that will be written front to back."""

    name: str
    header: bytes
    nbytes: int
    """Size with the header."""
    tensors: list[str]
    """Names, in their order in the file."""


def tensor_files(
    stem: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]
) -> tuple[list[LaidOut], tuple[str, bytes] | None]:
    """Lay tensors out in files whose bytes come in the order of ``specs``.

    A new file begins where items become larger. So every tensor is aligned to its items, which readers that map the
    file rely on.

    Returns:
        The files; and the name and text of their index, or None if there is one file.
    """
    runs: list[list[TensorSpec]] = []
    for spec in specs:
        if not runs or spec[1].itemsize > runs[-1][-1][1].itemsize:
            runs.append([])
        runs[-1].append(spec)
    shards = [shard for run in runs for shard in shards_of(run, MAX_SHARD_BYTES)] or [[]]
    names = shard_names(stem, len(shards))
    files = []
    for name, shard in zip(names, shards, strict=True):
        header = safetensors_header(shard, {"format": "pt", **metadata}, align=PAGE_BYTES)
        nbytes = len(header) + sum(map(nbytes_of, shard))
        files.append(LaidOut(name, header, nbytes, [spec[0] for spec in shard]))
    return files, (index_name(stem), index_text(names, shards)) if len(files) > 1 else None


def nbytes_of(spec: TensorSpec) -> int:
    """Size of a tensor in bytes."""
    return math.prod(spec[2]) * spec[1].itemsize


def shards_of(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Distribute tensors over shards, in order."""
    shards: list[list[TensorSpec]] = [[]]
    used_bytes = 0
    for spec in specs:
        if shards[-1] and used_bytes + nbytes_of(spec) > max_shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(spec)
        used_bytes += nbytes_of(spec)
    return shards


def single_name(stem: str) -> str:
    """Name of the file, if one file has all tensors."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """Name of the index, which says which tensor is in which shard."""
    return f"{stem}.safetensors.index.json"


def shard_names(stem: str, num_shards: int) -> list[str]:
    """Names of all files except the index."""
    if num_shards == 1:
        return [single_name(stem)]
    return [f"{stem}-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]


def safetensors_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str], *, align: int = 8) -> bytes:
    """Return the beginning of a file of tensors: size and header. See [Note: safetensors].

    Args:
        specs: Tensors in the order of their bytes, without holes between them.
        metadata: Strings for the header's metadata.
        align: Alignment of the first tensor's first byte.

    Raises:
        UnsupportedError: A tensor has a dtype that files cannot hold.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in specs:
        if dtype not in DTYPE_NAMES:
            raise UnsupportedError(
                f"weights: expected dtypes that files can hold, but '{name}' is {dtype}; register a buffer that need "
                "not be saved with persistent=False, or keep a complex one as a real one (torch.view_as_real)"
            )
        stop = start + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    header = json.dumps(fields, separators=(",", ":")).encode()
    header = header.ljust(align_up(8 + len(header), align) - 8)
    return len(header).to_bytes(8, "little") + header


def index_text(names: Sequence[str], shards: Sequence[Sequence[TensorSpec]]) -> bytes:
    """Text of the index, which says which tensor is in which file."""
    weight_map = {spec[0]: name for name, shard in zip(names, shards, strict=True) for spec in shard}
    total_bytes = sum(nbytes_of(spec) for shard in shards for spec in shard)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"
