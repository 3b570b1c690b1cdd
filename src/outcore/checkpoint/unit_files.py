"""The file of one unit in a checkpoint: which bytes of its homes it holds, and under which names.

[Note: files of units] Weights and states are written as they lie in their homes, behind a header that ends at a
multiple of 4 KiB. So a home goes to the file in large pieces and need not be taken apart. Bytes between tensors are
written as tensors of padding, since files of tensors may have no holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outcore.checkpoint.begin_checkpoint import refuse_full
from outcore.checkpoint.weights.load_plan import LoadPlan
from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.engine.checkpoint_saves import Save
from outcore.engine.engine import Engine
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import torch_dtype
from outcore.engine.values.access import ValueAccess, own_states
from outcore.memory.files.checkpoint_file import CheckpointFile, PartOfCheckpoint
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.memory.files.weights_layout import TensorSpec, safetensors_header
from outcore.optim.compact import masters_of
from outcore.order.ledger import Home
from outcore.spec.layout import CODES
from outcore.spec.manifest import BLOCK_BYTES, Manifest, PartRecord, TensorRecord
from outcore.spec.model import ParamSpec, Part, UnitSpec

_OPTIMIZER = "optimizer."
UNIT = "unit-"
"""What names of files of units begin with."""
Shown = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor, as users see it."""
OpenFile = Callable[[str], WeightsDirectory]
"""Opens a file of a checkpoint by its name."""
ReadFile = Callable[[str, str], torch.Tensor]
"""Reads a tensor of a checkpoint. Arguments: the file, and the tensor's name in it."""


class Section(NamedTuple):
    """The bytes [start, stop) of a home, and the tensors in them."""

    home: Home[Any]
    start: int
    stop: int
    entries: list[tuple[str, ParamSpec, Part, int]]
    """Of each tensor: name, parameter, part, and first byte in the home."""


def sections(unit: Unit) -> list[Section]:
    """What is saved of a unit, in the order of the unit's file."""
    spec, cut = unit.spec, unit.ledger.cut
    first = cut.updated[0]
    weights = [
        (f"model.{p.name}", _here(spec, p, part), part, first + part.offset)
        for p, part in zip(spec.params, cut.own_parts, strict=False)
        if spec.num_ranks == 1 or part.numel
    ]
    if not weights:
        return state_sections(unit)
    start = first + cut.own_start
    return [Section(unit.ledger.weights, start, start + spec.run_bytes, weights), *state_sections(unit)]


def state_sections(unit: Unit) -> list[Section]:
    """What is saved of a unit besides its weights."""
    spec, ledger = unit.spec, unit.ledger
    states = [
        (f"optimizer.{p.name}.{state.name}", _here(spec, state.described(p, i), part), part, state.start + part.offset)
        for state in ledger.state_specs.values()
        for i, p, part in zip(range(unit.num_trainable), spec.params, state.parts, strict=False)
        if state in own_states(unit, i) and (spec.num_ranks == 1 or part.numel)
    ]
    if not states:
        return []
    start = min(offset for *_, offset in states) // PAGE_BYTES * PAGE_BYTES
    stop = max(offset + part.nbytes for _, _, part, offset in states)
    return [Section(ledger.states, start, stop, states)]


def _here(spec: UnitSpec, param: ParamSpec, part: Part) -> ParamSpec:
    """A parameter as this rank saves it: with several ranks, each saves a flat part."""
    return param if spec.num_ranks == 1 else replace(param, shape=(part.numel,), strides=None)


def tensors_in(section: Section) -> Iterator[TensorSpec]:
    """Yield a section's tensors and, as padding, what lies between them: files of tensors may have no holes."""
    at = section.start
    in_order = sorted(section.entries, key=lambda entry: (entry[-1], entry[-2].numel))  # empty ones come first
    for name, param, part, offset in in_order:
        if offset > at:
            yield f"padding before {name}", torch.uint8, (offset - at,)
        yield name, torch_dtype(part.dtype), _stored_shape(param)
        at = offset + part.nbytes
    rest = section.start + align_up(section.stop - section.start, PAGE_BYTES) - at
    if rest:
        yield f"padding after {in_order[-1][0]}", torch.uint8, (rest,)


def _stored_shape(param: ParamSpec) -> tuple[int, ...]:
    """Shape with the dimensions in their order in memory."""
    return param.shape if param.strides is None else tuple(param.shape[i] for i in param.order)


def file_name(unit: Unit, rank: int) -> str:
    """Name of the file with what a rank saves of a unit."""
    shard = f"-{rank:03d}" if unit.spec.num_ranks > 1 else ""
    return f"{UNIT}{unit.ledger.index:05d}{shard}.safetensors"


def is_state(name: str) -> bool:
    """Whether a tensor of a manifest is an optimizer state. Args: name: Its name in the manifest."""
    return name.startswith(_OPTIMIZER)


def records(unit: Unit) -> Iterator[tuple[str, TensorRecord]]:
    """Yield what the manifest says of a unit's tensors, whichever rank saves them."""
    spec = unit.spec
    for i, param in enumerate(spec.params[: unit.num_trainable]):
        owned = [spec.held(rank, i) for rank in range(spec.num_ranks)]
        yield f"model.{param.name}", _record(unit, param, param.dtype, owned)
        for state in own_states(unit, i):
            owned = [state.owned(spec, i, rank) for rank in range(spec.num_ranks)]
            form = state.described(param, i)
            yield f"optimizer.{param.name}.{state.name}", _record(unit, form, state.parts[i].dtype, owned)


def _record(unit: Unit, form: ParamSpec, dtype: str, owned: Sequence[tuple[int, int]]) -> TensorRecord:
    """Args: owned: By rank, its first element and the number of its elements."""
    parts = [
        PartRecord(file_name(unit, rank), first, first + numel)
        for rank, (first, numel) in enumerate(owned)
        if numel or len(owned) == 1
    ]
    return TensorRecord(dtype, form.shape, tuple(parts), None if form.strides is None else form.order)


def as_shown(records: Iterable[tuple[str, TensorRecord]]) -> Iterator[tuple[str, Shown]]:
    """Yield dtypes and shapes by name. A compact master is shown as fp32: a later run may store it either way."""
    for name, record in records:
        if not name.endswith(f".{CODES}"):
            is_compact = name.endswith(".master") and record.dtype == "int16"
            yield name, ("float32" if is_compact else record.dtype, record.shape)


def write_units(
    engine: Engine, unfinished: PartOfCheckpoint, save: Save, sections_of: Callable[[Unit], list[Section]]
) -> None:
    """Have every unit written, each after its update. Args: sections_of: Sections of a unit to write."""
    files: list[tuple[Unit, list[Section], CheckpointFile, bytes]] = []
    for unit in engine.weights.units_to_update():  # first the units that the next step updates first
        found = sections_of(unit)
        if found:
            specs = [spec for section in found for spec in tensors_in(section)]
            header = safetensors_header(specs, {"format": "pt"}, align=PAGE_BYTES)
            nbytes = len(header) + sum(align_up(s.stop - s.start, PAGE_BYTES) for s in found)
            files.append((unit, found, unfinished.create(file_name(unit, unit.spec.rank), nbytes), header))
    refuse_full(unfinished, sum(file.nbytes for _, _, file, _ in files))
    for unit, found, file, header in files:
        for home, start, stop, _ in found:
            spans = [(start, start + align_up(stop - start, PAGE_BYTES))]
            engine.opened.saves.home(unit.ledger, home, spans, save, file, header=header)
            header = b""


def is_converted(record: TensorRecord) -> bool:
    """Whether the weights files hold a tensor in another form only."""
    return not record.parts and 0 not in record.shape


def load_param(
    access: ValueAccess, unit: Unit, index: int, opened: OpenFile, manifest: Manifest, converted: LoadPlan | None
) -> None:
    """Replace a parameter and its states by the saved ones. Args: converted: Makes what was converted."""
    spec = unit.spec.params[index]
    name = f"model.{spec.name}"
    if converted is not None and is_converted(manifest.tensors[name]):
        value = converted.read(unit.params[index]).to(torch_dtype(spec.dtype))
        access.replace_weight(unit, index, [_in_memory(value, spec)])
    else:
        access.replace_weight(unit, index, _bytes_in_order(opened, manifest, name, spec))
    load_states_of(access, unit, index, opened, manifest)


def load_states_of(access: ValueAccess, unit: Unit, index: int, opened: OpenFile, manifest: Manifest) -> None:
    """Replace the states of a parameter by the saved ones, but not its weight."""
    spec = unit.spec.params[index]
    is_so = _is_stored_so(manifest, unit, index)
    if not is_so:
        saved = read_saved(in_memory(opened), manifest, f"optimizer.{spec.name}.master")
        access.write_state(unit, "master", index, saved)
    for state in own_states(unit, index):
        if state.name in ("master", CODES) and not is_so:
            continue
        name = f"optimizer.{spec.name}.{state.name}"
        form = state.described(spec, index)
        access.replace_state(unit, state.name, index, _bytes_in_order(opened, manifest, name, form))


def _is_stored_so(manifest: Manifest, unit: Unit, index: int) -> bool:
    """Whether a master is stored in the checkpoint in the same form as here."""
    spec = unit.spec.params[index]
    is_compact = f"optimizer.{spec.name}.{CODES}" in manifest.tensors
    if not is_compact:
        return not unit.views.is_compact[index]
    order = manifest.tensors[f"optimizer.{spec.name}.master"].order  # rows follow the order of elements in memory
    return unit.views.is_compact[index] and order == (None if spec.strides is None else spec.order)


def differences(here: Mapping[str, Shown], there: Mapping[str, Shown]) -> list[tuple[str, str]]:
    """Compare dtypes and shapes of a run with those of a checkpoint. Returns names that differ, and how."""

    def said(found: Shown | None) -> str:
        return f"{found[0]} {found[1]}" if found else "missing"

    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return [(name, f"is {said(here.get(name))} here and {said(there.get(name))} there") for name in differing]


def files_in(path: Path) -> OpenFile:
    """Return a function that opens a file of a checkpoint, and reads its header once."""
    return cache(lambda file: WeightsDirectory.open(path, file.removesuffix(".safetensors")))


def in_memory(opened: OpenFile) -> ReadFile:
    """Return a function that reads tensors of opened files into memory."""
    return lambda file, name: opened(file).read(name)


def read_saved(read: ReadFile, manifest: Manifest, name: str) -> torch.Tensor:
    """A saved tensor in its shape; a master as fp32. Args: name: Its name in the manifest."""
    found, param = _flat(read, manifest, name), name.removeprefix("optimizer.").removesuffix(".master")
    if name.endswith(".master") and f"optimizer.{param}.{CODES}" in manifest.tensors:
        weight, codes = (_flat(read, manifest, key) for key in (f"model.{param}", f"optimizer.{param}.{CODES}"))
        found = masters_of(weight, found, codes)
    return _logical(found, manifest.tensors[name])


def _flat(read: ReadFile, manifest: Manifest, name: str) -> torch.Tensor:
    """A saved tensor as it lay in memory (1D)."""
    record = manifest.tensors[name]
    flats = [read(part.file, record.name or name).reshape(-1) for part in record.parts]
    if not flats:  # several ranks saved it, and none has an element of it
        return torch.empty(0, dtype=torch_dtype(record.dtype), device="cpu")
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def _logical(flat: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    order = record.order or tuple(range(len(record.shape)))
    return flat.view([record.shape[i] for i in order]).permute([order.index(i) for i in range(len(order))])


def _bytes_in_order(opened: OpenFile, manifest: Manifest, name: str, spec: ParamSpec) -> Iterator[torch.Tensor]:
    """Yield a saved tensor's bytes in the order in which the parameter lies in memory here."""
    record = manifest.tensors[name]
    mine = None if spec.strides is None else spec.order
    if mine == record.order:
        for part in record.parts:
            yield from opened(part.file).pieces(record.name or name, BLOCK_BYTES)
        return
    yield _in_memory(read_saved(in_memory(opened), manifest, name), spec)


def _in_memory(value: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """A value's bytes in the order in which the parameter lies in memory here."""
    order = tuple(range(value.ndim)) if spec.strides is None else spec.order
    return value.permute(order).contiguous().view(-1).view(torch.uint8)
