"""Contents of a checkpoint as data: its files with checksums, its tensors and the places of their parts.

[Note: manifest] ``manifest.json`` ties together all that was saved at one step. Its text is canonical and carries a
checksum of itself, so that a reader notices every changed byte. A tensor may be cut into flat parts in several files,
one for each rank that saved a part of it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self

MANIFEST_NAME = "manifest.json"
BLOCK_BYTES = 4 * 2**20
"""Most bytes that one checksum covers."""
_FORMAT = "outcore checkpoint 1"


class ChecksummedBlock(NamedTuple):
    """Bytes of a file that one checksum covers. The blocks of a file follow one another."""

    nbytes: int
    crc32: int


class PartRecord(NamedTuple):
    """The elements [start, stop) of a tensor in memory order, stored flat in a file under the tensor's name."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One saved tensor."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartRecord, ...]
    """Where it lies. Empty: it has no elements, or the weights files hold it in another form, from which it is made."""
    order: tuple[int, ...] | None = None
    """Its dimensions in memory order, outermost first. None: row-major."""
    name: str | None = None
    """Its name in the files. None: as in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a checkpoint says about itself. See [Note: manifest]."""

    step: int
    files: Mapping[str, tuple[ChecksummedBlock, ...]]
    """All files but the manifest, by name."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Saved tensors, named ``model.<parameter or buffer>`` or ``optimizer.<parameter>.<state>``."""
    frozen: Mapping[str, int] = field(default_factory=dict)
    """Checksums of frozen parameters. These are not saved, since the model is built with them."""
    full: Mapping[str, int] = field(default_factory=dict)
    """Checksums of the full-precision weights from which frozen parameters were quantised while they were read."""
    wrapped: Mapping[str, str] = field(default_factory=dict)
    """Of each parameter that wraps other tensors, the settings that decide how the bytes inside are read."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Number of updates of each trained parameter."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Settings of the param groups."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(block.nbytes for blocks in self.files.values() for block in blocks)

    def to_json(self) -> bytes:
        """Return the only text that ``from_json`` accepts for this manifest."""
        fields = {"format": _FORMAT, **asdict(self)}
        return _signed(fields)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: The text is anything else.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ValueError(f"it does not say that it is an '{_FORMAT}'")
        fields.pop("crc32", None)
        if _signed({"format": _FORMAT, **fields}) != text:
            raise ValueError("its checksum does not match")
        try:
            manifest = cls(
                step=fields["step"],
                files={name: tuple(ChecksummedBlock(*b) for b in blocks) for name, blocks in fields["files"].items()},
                tensors={name: _tensor(record) for name, record in fields["tensors"].items()},
                frozen=fields["frozen"],
                full=fields.get("full", {}),
                wrapped=dict(fields.get("wrapped", {})),
                steps=fields["steps"],
                groups=tuple(fields["groups"]),
            )
            manifest._refuse_unfit()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an entry is missing, or is of another kind: {error!r}") from error
        return manifest

    def _refuse_unfit(self) -> None:
        """Refuse names that leave the folder and numbers that no checkpoint has. Raises: ValueError: One was found."""
        numbers = [self.step, *self.steps.values(), *self.frozen.values(), *self.full.values()]
        for name, blocks in self.files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name or name in (".", MANIFEST_NAME):
                raise ValueError(f"'{name}' cannot be a file of a checkpoint")
            if any(block.nbytes > BLOCK_BYTES for block in blocks):
                raise ValueError(f"a block of '{name}' is too large")
            numbers += [number for block in blocks for number in block]
        for name, record in self.tensors.items():
            if any(part.file not in self.files for part in record.parts):
                raise ValueError(f"tensor '{name}' lies in a file that it does not list")
            if record.order is not None and sorted(record.order) != list(range(len(record.shape))):
                raise ValueError(f"tensor '{name}' has an invalid order of dimensions")
            ends = [0, *(p.stop for p in record.parts)]
            if record.parts and [p.start for p in record.parts] + [math.prod(record.shape)] != ends:
                raise ValueError(f"parts of tensor '{name}' do not follow one another")
            numbers += [*record.shape, *(n for part in record.parts for n in part[1:])]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a number in it is not a non-negative integer")
        if not all(isinstance(group, dict) for group in self.groups):
            raise ValueError("a param group in it is not an object")


def _signed(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    return json.dumps({"crc32": zlib.crc32(text.encode())})[:-1].encode() + b"," + text[1:].encode() + b"\n"


def _tensor(record: Mapping[str, Any]) -> TensorRecord:
    order = record["order"]
    return TensorRecord(
        record["dtype"],
        tuple(record["shape"]),
        tuple(PartRecord(*part) for part in record["parts"]),
        None if order is None else tuple(order),
        record.get("name"),
    )
