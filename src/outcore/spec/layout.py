"""Layouts of a unit's bytes: its states one behind another, and the parts of a staging slot."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, PARAM_ALIGN_BYTES, align_up, unaliased
from outcore.spec.cut import weights_home
from outcore.spec.model import (
    WITH_MASTERS,
    ModelSpec,
    ParamSpec,
    Part,
    Precision,
    StateForm,
    UnitSpec,
)
from outcore.spec.plan import UnitPlan

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
    first, numel = spec.owned(rank)[index]
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
