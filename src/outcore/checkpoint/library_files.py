"""Weights and states as every checkpoint holds them, written beside training.

[Note: library files] Names, dtypes and shapes of weights are those that ``save_pretrained`` writes; only the order
of tensors within a file differs. A file is written front to back, so it begins with buffers, which are written at
once. Homes follow: larger items first, and among equal ones, those first that the next step updates first. Files are
filled side by side, so that a unit's next update waits for its own weights and states alone.
Bytes that are the same in the file as in their home go there piece by piece. A tensor that is converted is in memory as
a whole meanwhile.
Several ranks have parts of states. So each writes files of units, and the manifest says where each part lies.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from outcore.checkpoint.begin_checkpoint import refuse_full
from outcore.checkpoint.shared_checkpoint import buffers_of
from outcore.checkpoint.training_state import STATES, described_states, params_by_name, trained_params
from outcore.checkpoint.unit_files import Section, sections, state_sections, write_units
from outcore.checkpoint.weights.conversions import Group, StatePlace, saving_groups
from outcore.checkpoint.weights.export import (
    ADAPTER_FILE,
    adapter_tensors,
    adapter_values,
    read_tensor,
    save_beside_weights,
    save_model,
    saved_state,
    saves_adapters,
    without_bytes,
)
from outcore.core.quantities import align_up
from outcore.engine.checkpoint_saves import Read, Save, Source, append_bytes
from outcore.engine.engine import Engine
from outcore.engine.optimizer import StreamedOptimizer
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, shaped, torch_dtype
from outcore.engine.values.access import shown_states
from outcore.engine.values.parameter_values import let_masters_follow
from outcore.memory.files.checkpoint_file import CheckpointFile, PartOfCheckpoint
from outcore.memory.files.checkpoint_folder import write_new
from outcore.memory.files.weights_file import refuse_layout
from outcore.memory.files.weights_layout import LaidOut, TensorSpec, nbytes_of, tensor_files
from outcore.optim.compact import masters_of, open_masters
from outcore.spec.layout import CODES, ROW_NUMEL
from outcore.spec.model import ParamSpec, Part

REST = "rest"
"""Stem of the file with trained weights and buffers that the library's files do not hold."""
Held = Mapping[int, tuple[str, str] | None]
"""Where the library's files hold the tensors of a model, by their ids: stem of the files, and name in them. None: in
another form."""
_NONE: Mapping[str, str] = {}
_MASTERS_AT_A_TIME = 2**18
_MASTERS_OF_ONE_THREAD = 2**14
"""Masters opened in one call: so few that torch starts no threads of its own."""


class _Param(NamedTuple):
    """A weight or state, and where it lies."""

    source: Source
    spec: ParamSpec
    dtype: torch.dtype

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The value as a tensor. Args: data: Its bytes."""
        return shaped(self.spec, data.view(self.dtype))


class _Item(NamedTuple):
    """Tensors of a file that are made together."""

    specs: list[TensorSpec]
    params: list[_Param]
    """Weights or states that they are made from. Empty if buffers are among the sources."""
    convert: Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]] | None
    """Makes the tensors. None: there is one tensor, with the same bytes in the file as in its home."""
    read: Callable[[], Iterable[torch.Tensor]] | None = None
    """Makes the tensors at once, if buffers are among the sources."""
    fill: Callable[[Sequence[Read], int, int, torch.Tensor], None] | None = None
    """Makes the bytes [start, stop) of the only tensor."""


class _Layout(NamedTuple):
    """Files to be written."""

    items: list[_Item]
    """Items in the order of their bytes."""
    files: list[LaidOut]
    index_file: tuple[str, bytes] | None
    """Name and text of the index; None if there is one file."""


class SavedNames(NamedTuple):
    """Which tensors of a model the library saves, and under which names. Settled once for a save: it takes long."""

    files: Sequence[tuple[str, Sequence[Group], Mapping[str, torch.Tensor]]] = ()
    """Of the files of each stem: the groups of tensors in them, and the tensors of the model that these are made of."""
    adapters: Mapping[Path, Mapping[str, StatePlace]] | None = None
    """What ``adapter_tensors`` returned."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Settle the names. Raises: ConfigError, UnsupportedError: As for ``save_pretrained``."""
        if saves_adapters(model):
            adapters = adapter_tensors(model)
            found = [
                (str(inside / Path(ADAPTER_FILE).stem), {name: place.tensor for name, place in tensors.items()})
                for inside, tensors in (adapters or {}).items()
            ]
            return cls([(stem, [Group(n, [("", n)]) for n in state], state) for stem, state in found], adapters)
        state = saved_state(model)
        return cls([("model", saving_groups(model, state), state)])

    def held(self) -> Held:
        """Where the files hold tensors of the model. Those that are not written are left out."""
        sources = (
            (stem, g, state[name]) for stem, groups, state in self.files for g in groups for _, name in g.sources
        )
        return {id(tensor): None if group.converter else (stem, group.target) for stem, group, tensor in sources}


class LibraryFiles:
    """Weights and states of one checkpoint that is being written."""

    _has_weights = _has_states = False

    def __init__(
        self,
        engine: Engine,
        unfinished: PartOfCheckpoint,
        save: Save,
        names: SavedNames | None = None,
        *,
        is_strict: bool = True,
    ) -> None:
        """Take over the user's edits of parameters. Nothing is written yet.

        Args: is_strict: Whether small files that the library cannot write are an error, and not a warning.
        """
        self._engine, self._unfinished, self._save, self._is_strict = engine, unfinished, save, is_strict
        self._names = SavedNames.of(engine.model) if names is None else names
        self.held = self._names.held()
        self._turns = {id(unit.ledger): turn for turn, unit in enumerate(engine.weights.units_to_update())}
        self._layouts: list[_Layout] = []
        """Files that are not begun yet."""
        for unit in engine.units:
            let_masters_follow(unit, engine.access)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole state of a run: a user's Trainer may write weights of its own in its place.

        With several ranks, rank 0 writes the weights for all, and all ranks must ask.
        """
        world = self._engine.access.world
        return self._has_states and (self._has_weights if world is None else world.from_first(self._has_weights))

    def weights(self, small: Path) -> None:
        """Have the files of ``save_pretrained`` written. Adapters that peft converts are read and written at once.

        With several ranks, one rank calls this. Where weights are cut over ranks, they are read and written at once:
        this rank calls ``save_model`` here, and the other ranks must call it, too.

        Args:
            small: A new folder, for the files that the library writes itself.

        Raises:
            OSError: The system reported an error.
            ConfigError, UnsupportedError: As for ``save_pretrained``.
        """
        self._has_weights, model, names = True, self._engine.model, self._names
        if self._engine.has_cut_weights:
            save_model(self._engine, small)
            return
        small.mkdir(exist_ok=True)
        layouts = [self._layout(stem, [self._weights(g, state) for g in groups]) for stem, groups, state in names.files]
        if not saves_adapters(model):
            self._save_beside(small)
        elif names.adapters is None or any(layout.index_file is not None for layout in layouts):  # peft reads one file
            layouts = []
            self._save_beside(small, None, adapter_values(self._engine))
        else:
            self._save_beside(small, names.adapters)
        self._layouts += layouts

    def _save_beside(self, small: Path, *adapters: Any) -> None:
        before = set(small.iterdir())
        try:
            save_beside_weights(self._engine.model, small, *adapters)
        except OSError:
            raise
        except Exception as error:  # a library may raise anything
            if self._is_strict:
                raise
            for path in set(small.iterdir()) - before:  # half of a file is worse than none
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            warnings.warn(f"save_checkpoint: from_pretrained will not know this model: {error}", stacklevel=6)

    def states(self, optimizer: StreamedOptimizer, *, step: int) -> None:
        """Have all else written: trained weights and buffers that the files above lack, states, steps and settings.

        With several ranks, each rank calls this, and writes its files of units.

        Args:
            optimizer: The prepared optimizer.
            step: Step of the whole run.

        Raises:
            OSError: The system reported an error.
            UnsupportedError: JSON cannot hold a setting of a param group.
        """
        self._has_states, world, params = True, self._engine.access.world, params_by_name(self._engine)
        unheld = {name: unit.params[i] for name, (unit, i) in params.items() if id(unit.params[i]) not in self.held}
        rest: dict[str, torch.Tensor] = {**unheld} if world is None else {}
        rest |= {name: buffer for name, buffer in buffers_of(self._engine).items() if id(buffer) not in self.held}
        updated = dict(trained_params(optimizer))
        others = [place for name, place in params.items() if name not in updated]
        if world is None or world.rank == 0:
            items = [self._weights(Group(name, [("", name)]), rest) for name in rest]
            items += [item for place in others if world is None for item in self._states(*place)]
            self._layouts += [self._layout(REST, items)] if items else []
        if world is not None:
            in_units = {id(param) for param in unheld.values()}
            self.submit()

            def sections_of(unit: Unit) -> list[Section]:
                has_weights = CODES in unit.ledger.state_specs or any(id(param) in in_units for param in unit.params)
                return sections(unit) if has_weights else state_sections(unit)

            write_units(self._engine, self._unfinished, self._save, sections_of)
            return
        items = [item for place in updated.values() for item in self._states(*place)]
        self._layouts.append(self._layout(STATES, items, described_states(optimizer, step=step)))

    def submit(self) -> None:
        """Begin the files, and submit what is written into them, in the order of the next updates.

        Raises:
            OSError: The system reported an error.
        """
        layouts, self._layouts = self._layouts, []
        # Files begun before are reserved.
        refuse_full(self._unfinished, sum(file.nbytes for layout in layouts for file in layout.files))
        begun = [[(item, files) for item in layout.items] for layout in layouts for files in [self._begin(layout)]]
        for _, run in groupby(merge(*begun, key=lambda pair: self._turn(pair[0])), key=lambda pair: _way(*pair)):
            pairs = list(run)
            self._write([item for item, _ in pairs], pairs[0][1])

    def _weights(self, group: Group, state: Mapping[str, torch.Tensor]) -> _Item:
        made = group.convert(lambda name: without_bytes(state[name]))
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()]
        names = [name for _, name in group.sources]
        found = [self._engine.places.get(id(state[name])) for name in names]
        params = [_weight(*place) for place in found if place is not None] if None not in found else []

        def convert(values: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
            return group.convert(dict(zip(names, values, strict=True)).__getitem__).values()

        if not params:
            for name in names:
                refuse_layout(name, state[name])

        def read() -> Iterable[torch.Tensor]:
            return convert([read_tensor(self._engine, state[name]) for name in names])

        is_plain = group.converter is None and all(param.spec.strides is None for param in params)
        return _Item(specs, params, None if is_plain else convert, None if params else read)

    def _states(self, unit: Unit, index: int) -> Iterator[_Item]:
        for state, dtype in shown_states(unit, index):
            spec = state.described(unit.spec.params[index], index)
            param = _param(unit, unit.ledger.states, spec, state.parts[index], state.start)
            specs = [(f"{unit.spec.params[index].name}.{state.name}", torch_dtype(dtype), spec.shape)]
            if state.name == "master" and unit.views.is_compact[index]:
                fill = partial(_fill_masters, spec.numel) if spec.strides is None else None
                yield _Item(specs, _compact(unit, index, param), partial(_master, spec), fill=fill)
            else:
                yield _Item(specs, [param], None if spec.strides is None else list)

    def _layout(self, stem: str, items: Sequence[_Item], metadata: Mapping[str, str] = _NONE) -> _Layout:
        def place(item: _Item) -> tuple[bool, int, int, int]:
            start = item.params[0].source.start if item.params else 0
            return bool(item.params), -max((d.itemsize for _, d, _ in item.specs), default=0), self._turn(item), start

        ordered = sorted(items, key=place)
        return _Layout(ordered, *tensor_files(stem, [spec for item in ordered for spec in item.specs], metadata))

    def _turn(self, item: _Item) -> int:
        """When the unit of an item is updated in the next step; 0 if nothing of it is in a home."""
        return self._turns.get(id(item.params[0].source.unit), len(self._turns)) if item.params else 0

    def _begin(self, layout: _Layout) -> dict[str, CheckpointFile]:
        """Begin the files of a layout. Returns them by the names of the tensors in them."""
        files: dict[str, CheckpointFile] = {}
        for laid in layout.files:
            file = self._unfinished.create(laid.name, laid.nbytes)
            file.path.parent.mkdir(parents=True, exist_ok=True)
            append_bytes(file, laid.header)
            files |= dict.fromkeys(laid.tensors, file)
        if layout.index_file is not None:
            write_new(self._unfinished.path / layout.index_file[0], layout.index_file[1])
        return files

    def _write(self, run: list[_Item], files: Mapping[str, CheckpointFile]) -> None:
        """Submit items. Args: run: One item, or several whose bytes go from one home to one file."""
        item, saves = run[0], self._engine.opened.saves
        params, convert = item.params, item.convert
        if item.read is not None:
            _append(item, item.read(), files)
        elif convert is None:
            source = params[0].source
            spans = _joined(param.source for item in run for param in item.params)
            if spans:
                saves.home(source.unit, source.home, spans, self._save, files[item.specs[0][0]])
        else:

            def make(reads: Sequence[Read]) -> None:
                if item.fill is not None:
                    spec = item.specs[0]
                    files[spec[0]].write(nbytes_of(spec), partial(item.fill, reads))
                    return
                values = [p.of(read(0, p.source.stop - p.source.start)) for p, read in zip(params, reads, strict=True)]
                _append(item, convert(values), files)

            saves.made([param.source for param in params], self._save, make)


def _weight(unit: Unit, index: int) -> _Param:
    return _param(unit, unit.ledger.weights, unit.spec.params[index], unit.spec.weight_parts[index], 0)


def _param(unit: Unit, home: Any, spec: ParamSpec, part: Part, start: int) -> _Param:
    first = start + part.offset
    return _Param(Source(unit.ledger, home, first, first + part.nbytes), spec, torch_dtype(part.dtype))


def _compact(unit: Unit, index: int, lower: _Param) -> list[_Param]:
    """The parts of a compact master, as they lie in memory: weight, lower halves and codes."""
    codes = unit.ledger.state_specs[CODES]
    row = codes.described(unit.spec.params[index], index)
    return [_weight(unit, index), lower, _param(unit, unit.ledger.states, row, codes.parts[index], codes.start)]


def _master(spec: ParamSpec, stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [shaped(spec, masters_of(*(flat(spec, each) if each.dtype != torch.uint8 else each for each in stored)))]


def _fill_masters(numel: int, reads: Sequence[Read], start: int, stop: int, to: torch.Tensor) -> None:
    """Write the bytes [start, stop) of ``numel`` fp32 masters to ``to``; whole rows are opened at a time."""
    size, row = 4 * _MASTERS_AT_A_TIME, 4 * ROW_NUMEL
    for begin in range(start // size * size, stop, size):
        a, b = max(begin, start), min(begin + size, stop)
        first, last = a // row * ROW_NUMEL, min(align_up(b, row) // 4, numel)
        weights, lower = (read(2 * first, 2 * last) for read in reads[:2])
        codes = reads[2](first // ROW_NUMEL, -(-last // ROW_NUMEL))
        room = torch.empty(last - first, dtype=torch.float32, device="cpu")
        for i in range(0, last - first, _MASTERS_OF_ONE_THREAD):
            part = slice(i, i + _MASTERS_OF_ONE_THREAD)
            rows = codes[i // ROW_NUMEL : (i + _MASTERS_OF_ONE_THREAD) // ROW_NUMEL]
            open_masters(weights.view(torch.bfloat16)[part], lower.view(torch.int16)[part], rows, room[part])
        to[a - start : b - start] = room.view(torch.uint8)[a - 4 * first : b - 4 * first]


def _way(item: _Item, files: Mapping[str, CheckpointFile]) -> tuple[int, ...]:
    """A key that is equal for items that can be written in one operation."""
    if item.read is None and item.convert is None:
        return id(item.params[0].source.home), id(files[item.specs[0][0]])
    return (id(item),)


def _joined(sources: Iterable[Source]) -> list[tuple[int, int]]:
    """The bytes of some sources, joined into as few spans as possible."""
    spans: list[tuple[int, int]] = []
    for _, _, start, stop in sources:
        if spans and spans[-1][1] == start:
            spans[-1] = spans[-1][0], stop
        elif start < stop:
            spans.append((start, stop))
    return spans


def _append(item: _Item, values: Iterable[torch.Tensor], files: Mapping[str, CheckpointFile]) -> None:
    for (name, dtype, shape), value in zip(item.specs, values, strict=True):
        if (value.dtype, tuple(value.shape)) != (dtype, shape):
            raise AssertionError(f"expected {dtype} {shape} for '{name}', but got {value.dtype} {tuple(value.shape)}")
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        append_bytes(files[name], data.numpy().data)
