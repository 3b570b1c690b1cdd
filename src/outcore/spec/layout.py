"""Where a unit's bytes lie: states one behind another, parts of a staging slot, and the weights that rest with a rank.

[Note: cut weights] The runs of a unit ([Note: runs]) are dealt out to *sharers*: ranks that together have all of its
weights. With L sharers, rank r has the runs r mod L, r mod L + L, ... of the trainable piece, one behind another, and
behind them those of the frozen piece. So the run that it updates itself is among them, and one all-gather puts L
neighbouring runs together. R / L ranks have the same runs; after an update they send each other their own.
With one sharer a rank has all runs, in the order of the weights layout. If the sharers use one copy in host memory, the
copy has all runs, too, and each rank writes those that it would otherwise have.
If a unit is mostly frozen (adapters), its trainable piece stays whole on each rank where that adds little memory: a
fetch then waits for one all-gather instead of two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, PARAM_ALIGN_BYTES, align_up, unaliased
from outcore.spec.model import (
    WITH_MASTERS,
    ModelSpec,
    ParamSpec,
    Part,
    Precision,
    Sharing,
    StateForm,
    UnitSpec,
)
from outcore.spec.plan import Tier, UnitPlan

_SMALL = 4
"""Least ratio of a rank's part of the frozen piece to a trainable piece that stays whole on each rank."""


class CutRun(NamedTuple):
    """Neighbouring bytes of the weights layout, and their place in the home."""

    home: int
    """First byte in the home."""
    layout: int
    """First byte in the weights layout."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHome:
    """One rank's home of the weights of one unit. See [Note: cut weights].

    These are values, not properties, because they are read at every visit.
    """

    spec: UnitSpec
    num_sharers: int
    trained_sharers: int
    """Number of sharers of the trainable piece: ``num_sharers``, or 1."""
    is_one_copy: bool
    """True if all sharers use one copy in host memory."""
    is_cut: bool
    """True if a fetch needs the other sharers."""
    is_resident: bool
    """True if all weights stay on the device, so that nothing is fetched."""
    num_copies: int
    """Number of ranks that have the same runs of the trainable piece."""
    taken_bytes: int
    """Bytes that this rank takes on the home's tier."""
    nbytes: int
    """Size of the home."""
    updated: tuple[int, int]
    """The bytes [start, stop) of the home that hold new weights after an update: this rank's own run where sharers use
    one copy, else its runs of the trainable piece, with those that ranks with the same runs have sent."""

    @property
    def updated_bytes(self) -> int:
        """Number of bytes in ``updated``."""
        start, stop = self.updated
        return stop - start

    @property
    def own_start(self) -> int:
        """First byte of this rank's own run, counted from the start of ``updated``."""
        return 0 if self.is_one_copy else self.spec.rank // self.trained_sharers * self.spec.run_bytes

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """Place of this rank's own elements, counted from the start of ``updated``, by trainable parameter."""
        shift = self.own_start - self.spec.rank * self.spec.run_bytes
        return tuple(part._replace(offset=part.offset + shift if part.numel else 0) for part in self.spec.own_parts)

    def runs(self) -> list[CutRun]:
        """Return this rank's runs: those in its home, or those that it writes in the one copy of all sharers."""
        spec, found, begin = self.spec, list[CutRun](), 0
        for piece, run, sharers in self._pieces:
            count, nbytes = (1, spec.num_ranks * run) if sharers == 1 else (spec.num_ranks // sharers, run)
            for i in range(count if run else 0):
                layout = piece + (i * sharers + spec.rank % sharers) * nbytes
                found.append(CutRun(begin + i * nbytes if self.is_cut else layout, layout, nbytes))
            begin += count * nbytes
        return found

    def own_run(self, *, is_trained: bool) -> CutRun:
        """Return the run that no other rank counts as its own."""
        spec, (piece, run, sharers) = self.spec, self._pieces[0 if is_trained else 1]
        begin, layout = 0 if is_trained else self.num_copies * spec.run_bytes, piece + spec.rank * run
        return CutRun(begin + spec.rank // sharers * run if self.is_cut else layout, layout, run)

    @property
    def _pieces(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """First byte in the weights layout, size of a run and number of sharers: of the trainable and frozen piece."""
        spec = self.spec
        frozen = (spec.trainable_bytes, spec.frozen_run_bytes, self.num_sharers)
        return (0, spec.run_bytes, self.trained_sharers), frozen

    def here(self, part: Part) -> Iterator[CutRun]:
        """Yield what this rank has, or writes, of a part of the weights layout."""
        if self.num_sharers == 1:
            yield CutRun(part.offset, part.offset, part.nbytes)
            return
        for run in self.runs():
            start, stop = max(run.layout, part.offset), min(run.layout + run.nbytes, part.offset + part.nbytes)
            if start < stop:
                yield CutRun(run.home + start - run.layout, start, stop - start)

    def together(self) -> list[tuple[int, int]]:
        """Return the bytes [start, stop) of the weights layout that each all-gather fills, in the order of ``runs``."""
        found, rank = list[tuple[int, int]](), self.spec.rank
        for run in self.runs():
            sharers = self.trained_sharers if run.layout < self.spec.trainable_bytes else self.num_sharers
            start = run.layout - rank % sharers * run.nbytes
            found.append((start, start + sharers * run.nbytes))
        return found


def weights_home(spec: UnitSpec, unit: UnitPlan) -> WeightsHome:
    """Return this rank's home of a unit's weights under a plan."""
    key = unit.partition, unit.gather, unit.weights == "device"
    if key not in spec.homes:  # cached: the planner asks again and again, in plans of hundreds of units
        spec.homes[key] = _weights_home(spec, unit)
    return spec.homes[key]


def _weights_home(spec: UnitSpec, unit: UnitPlan) -> WeightsHome:
    sharers = {"replicate": 1, "node": spec.ranks_per_node, "world": spec.num_ranks}[unit.partition]
    is_one_copy = unit.gather == "host" and sharers > 1
    is_cut, frozen = sharers > 1 and not is_one_copy, spec.num_ranks // sharers * spec.frozen_run_bytes
    is_small = is_cut and _SMALL * spec.trainable_bytes <= frozen
    trained_sharers = 1 if is_small else sharers
    copies, first, run = spec.num_ranks // trained_sharers, spec.rank, spec.run_bytes
    taken = copies * run + frozen
    return WeightsHome(
        spec=spec,
        num_sharers=sharers,
        trained_sharers=trained_sharers,
        is_one_copy=is_one_copy,
        is_cut=is_cut,
        is_resident=unit.weights == "device" and not is_cut,
        num_copies=copies,
        taken_bytes=taken,
        nbytes=taken if is_cut else spec.weight_bytes,
        updated=(first * run, (first + 1) * run) if is_one_copy else (0, copies * run),
    )


def in_slot(spec: UnitSpec, unit: UnitPlan, tier: Tier) -> int:
    """Return the bytes that the weights of a unit take in a slot on a tier; 0 if they need no slot there."""
    home = weights_home(spec, unit)
    if tier == "host":
        return home.nbytes if unit.weights == "disk" else 0
    return 0 if home.is_resident else spec.weight_bytes


def shared(unit: UnitPlan, sharing: Sharing) -> UnitPlan:
    """Return the unit's plan with its weights shared among ranks as asked.

    ``copy`` lets the ranks of a machine share one copy of weights in host memory; other weights stay whole on each.
    ``cut`` cuts the weights of every unit but the root over all ranks, and ``node`` over the ranks of a machine.
    """
    if sharing == "copy" and unit.weights == "host":
        return replace(unit, partition="node", gather="host")
    if sharing in ("cut", "node") and unit.name:
        return replace(unit, partition="world" if sharing == "cut" else "node")
    return unit


def is_resident(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Return whether all weights of a unit stay on the device."""
    return weights_home(spec, unit).is_resident


SCRATCH_BYTES = 16 * 2**20
"""Device memory in which an update on the device holds blocks of gradients, upcast and scaled."""
NOISE_BYTES = 8 * 2**20
"""Host memory for the noise with which updates on the host round states."""
COMPACT_BYTES = 24 * 2**20
"""Device memory for temporary tensors while compact masters are coded on the device."""
COMPACT_COST = 1.5
"""Time to decode and encode a compact master on the CPU, in updates of AdamW (``benchmarks/cpu_update.py``)."""
CODES = "master_codes"
"""Name of the state that goes with compact masters."""
ROW_NUMEL = 128
"""Number of elements of a master that share a code."""


def has_master(unit: UnitPlan, precision: Precision) -> bool:
    """Return whether the unit keeps master weights among its states.

    It needs none if the update can work on the weights themselves: they have the same dtype, and weights and states are
    both on the device or both on the host.
    """
    return precision in WITH_MASTERS or unit.states != unit.weights or unit.states == "disk"


def has_compact(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Return whether masters of the unit store only what its weights lack. See ``optim.compact``.

    A user may edit weights that live on the device in place, which would change such a master, too. So the masters of
    these weights are whole.
    """
    return unit.weights != "device" and any(param.master_format == "compact" for param in spec.trainable)


def update_cost_numel(spec: UnitSpec, unit: UnitPlan) -> float:
    """Return the number of elements for which AdamW would take as long as this rank's update of the unit on the host.

    Only where masters are compact are they decoded and encoded.
    """
    coded = spec.compact_numel if has_compact(spec, unit) else 0
    return spec.update_cost_numel + COMPACT_COST * coded


def starts_from_weights(spec: UnitSpec, unit: UnitPlan, precision: Precision) -> bool:
    """Return whether an update of the unit reads its weights."""
    return not has_master(unit, precision) or has_compact(spec, unit)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of all trainable parameters of a unit. All code that reads, writes or counts states uses it."""

    name: str
    """Torch's name of the state, or ``master``."""
    start: int
    """Position of its first byte in the states home."""
    nbytes: int
    """Size with padding, as of all bytes that may rest on disk."""
    parts: tuple[Part, ...]
    """Places by trainable parameter, counted from ``start``; empty for a parameter without this state."""
    forms: tuple[StateForm | None, ...]
    """Forms by trainable parameter. None: the parameter does not have this state."""

    def described(self, param: ParamSpec, index: int) -> ParamSpec:
        """Return a ParamSpec that describes this state of a parameter, with the state's shape and strides."""
        form = self.forms[index]
        if form is None or form.shape is None:
            return param
        return dataclasses.replace(param, shape=form.shape, strides=None)

    def owned(self, spec: UnitSpec, index: int, rank: int) -> tuple[int, int]:
        """Return first element and number of elements that a rank has of this state of a parameter."""
        return _owned(spec, index, self.forms[index], rank)

    @property
    def stop(self) -> int:
        """End of its bytes in the states home."""
        return self.start + self.nbytes


@functools.lru_cache(2**12)  # the planner asks again and again, in plans of hundreds of units
def lay_out_states(spec: UnitSpec, names: tuple[str, ...], *, is_compact: bool = False) -> Mapping[str, StateSpec]:
    """Lay out the states of a unit one behind another. Returns them by name, in that order.

    Args:
        spec: The unit. A parameter that lists its states gets only these, besides its master.
        names: Names of all states that any of the parameters has.
        is_compact: Whether parameters that ask for compact masters get them.
    """
    states, start = dict[str, StateSpec](), 0
    for name in names:
        forms = tuple(_form(param, name, is_compact=is_compact) for param in spec.trainable)
        if all(form is not None and form.shape is None for form in forms) and _is_update_layout(spec, forms):
            states[name] = StateSpec(name, start, spec.update_bytes, spec.update_parts, forms)
        else:
            states[name] = StateSpec(name, start, *_own_layout(spec, forms), forms)
        start = states[name].stop
    return MappingProxyType(states)


def _form(param: ParamSpec, name: str, *, is_compact: bool) -> StateForm | None:
    if is_compact and param.master_format == "compact" and name in ("master", CODES):
        rows = -(-param.numel // ROW_NUMEL)
        codes = StateForm(CODES, "uint8", (rows,), ROW_NUMEL, 255)
        return codes if name == CODES else StateForm(name, "int16", format="compact")
    if name == CODES:
        return None
    if param.states is None or name == "master":
        return StateForm(name, param.update_dtype)
    return next((form for form in param.states if form.name == name), None)


def _is_update_layout(spec: UnitSpec, forms: Iterable[StateForm | None]) -> bool:
    return [form.dtype for form in forms if form] == [param.update_dtype for param in spec.trainable]


def _own_layout(spec: UnitSpec, forms: Sequence[StateForm | None]) -> tuple[int, tuple[Part, ...]]:
    """Lay out a state that not all parameters have, or that does not use the update layout. Returns bytes and parts."""
    laid = [_parts_of(spec, forms, rank) for rank in range(spec.num_ranks)]
    nbytes = align_up(max(end for end, _ in laid), PAGE_BYTES)
    return unaliased(nbytes), laid[spec.rank][1]


def _parts_of(spec: UnitSpec, forms: Sequence[StateForm | None], rank: int) -> tuple[int, tuple[Part, ...]]:
    """Return the end of the last part that a rank has of a state, and all its parts."""
    parts, end = [], 0
    for i, (param, form) in enumerate(zip(spec.trainable, forms, strict=True)):
        numel = _owned(spec, i, form, rank)[1]
        part = Part(param.update_dtype, 0, 0) if form is None else Part(form.dtype, numel, end)
        parts.append(part)
        end += align_up(part.nbytes, PARAM_ALIGN_BYTES)
    return end, tuple(parts)


def _owned(spec: UnitSpec, index: int, form: StateForm | None, rank: int) -> tuple[int, int]:
    """Return first element and number of elements of a state that a rank has.

    If a parameter has no elements, rank 0 has the states whose shape is not the parameter's.
    """
    first, numel = spec.held(rank, index)
    if form is None:
        return 0, 0
    if form.shape is None or form.shared_by > 1:
        return first // form.shared_by, -(-numel // form.shared_by)
    return 0, math.prod(form.shape) if numel or (not spec.trainable[index].numel and rank == 0) else 0


def states_of(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Mapping[str, StateSpec]:
    """Return the states that a unit has under a plan."""
    is_compact = has_compact(spec, unit)
    masters = ("master", CODES) if is_compact else ("master",) if has_master(unit, model.precision) else ()
    return lay_out_states(spec, masters + model.state_names, is_compact=is_compact)


def states_bytes(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> int:
    """Return the size of the unit's states home."""
    return sum(state.nbytes for state in states_of(spec, unit, model).values())


def sums_on_device(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Return whether gradients of all ranks are added up on the device although their sum rests in host memory.

    From three ranks on this moves fewer bytes: the sum of one run each way, instead of the runs of all ranks home.
    """
    return spec.num_ranks > 2 and unit.gradients == "host"


class Staging(NamedTuple):
    """Byte ranges of a staging slot, which holds all that an update on the device of states from host memory needs."""

    states: tuple[int, int]
    gradients: tuple[int, int]
    """Empty if gradients live on the device."""
    weights: tuple[int, int]
    scratch: tuple[int, int]


def staging(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Staging:
    """Lay out a staging slot for a unit."""
    sizes = (
        states_bytes(spec, unit, model),
        spec.update_bytes if unit.gradients == "host" else 0,
        weights_home(spec, unit).updated_bytes,
        min(SCRATCH_BYTES, spec.update_bytes),
    )
    starts = accumulate((align_up(size, PAGE_BYTES) for size in sizes), initial=0)
    return Staging(*((start, start + size) for start, size in zip(starts, sizes, strict=False)))
