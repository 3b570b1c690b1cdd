"""How the bytes of a unit lie: its states behind one another, and what a staging slot takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, PARAM_ALIGN_BYTES, align_up
from outcore.spec.cut import weights_home
from outcore.spec.model import (
    ALIAS_BYTES,
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
"""Device memory in which an update there holds blocks of gradients, upcast and scaled."""
NOISE_BYTES = 8 * 2**20
"""Host memory of the noise with which updates there round states."""
COMPACT_BYTES = 24 * 2**20
"""Device memory that coding compact masters makes and drops there."""
CODES = "master_codes"
"""State that stands beside compact masters."""
ROW_NUMEL = 128
"""Elements of a master that share a code."""


def has_master(unit: UnitPlan, precision: Precision) -> bool:
    """Whether the unit keeps master weights among its states.

    It needs none where the update can work on the weights themselves: same dtype, and both on the device or both on
    the host.
    """
    return precision in WITH_MASTERS or unit.states != unit.weights or unit.states == "disk"


def has_compact(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Whether masters of the unit are what its weights lack. See ``optim.compact``.

    Weights that live on the device may be edited in place, which would change the master, too. So these have it whole.
    """
    return unit.weights != "device" and any(param.master_format == "compact" for param in spec.trainable)


def starts_from_weights(spec: UnitSpec, unit: UnitPlan, precision: Precision) -> bool:
    """Whether an update of the unit reads its weights."""
    return not has_master(unit, precision) or has_compact(spec, unit)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of all trainable parameters of a unit. Whoever reads, writes or counts states asks it."""

    name: str
    """Torch's, or ``master``."""
    start: int
    """Of its first byte in the states home."""
    nbytes: int
    """With padding, as all that may rest on disk."""
    parts: tuple[Part, ...]
    """By trainable parameter, counted from ``start``; empty for those that do not have it."""
    forms: tuple[StateForm | None, ...]
    """By trainable parameter. None: it does not have this state."""

    def described(self, param: ParamSpec, index: int) -> ParamSpec:
        """This state of a parameter as if it were a parameter: of its own shape, and strides."""
        form = self.forms[index]
        if form is None or form.shape is None:
            return param
        return dataclasses.replace(param, shape=form.shape, strides=None)

    def owned(self, spec: UnitSpec, index: int, rank: int) -> tuple[int, int]:
        """First element of this state of a parameter that a rank has, and how many."""
        return _owned(spec, index, self.forms[index], rank)

    @property
    def stop(self) -> int:
        """End of its bytes in the states home."""
        return self.start + self.nbytes


@functools.lru_cache(2**12)  # plans of hundreds of units are worked out again and again
def lay_out_states(spec: UnitSpec, names: tuple[str, ...], *, is_compact: bool = False) -> Mapping[str, StateSpec]:
    """The states of a unit, by name, in the order in which they lie behind one another.

    Args:
        spec: Parameters that say what they have get that alone.
        names: Of all states that any of them has.
        is_compact: Masters are, of those that ask for it.
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
    """Bytes and parts of a state that not all parameters have, or not in the update layout."""
    laid = [_parts_of(spec, forms, rank) for rank in range(spec.num_ranks)]
    nbytes = align_up(max(end for end, _ in laid), PAGE_BYTES)
    return nbytes + 2 * PAGE_BYTES * (nbytes > 0 and nbytes % ALIAS_BYTES == 0), laid[spec.rank][1]


def _parts_of(spec: UnitSpec, forms: Sequence[StateForm | None], rank: int) -> tuple[int, tuple[Part, ...]]:
    """What a rank has, and where it ends."""
    parts, end = [], 0
    for i, (param, form) in enumerate(zip(spec.trainable, forms, strict=True)):
        numel = _owned(spec, i, form, rank)[1]
        part = Part(param.update_dtype, 0, 0) if form is None else Part(form.dtype, numel, end)
        parts.append(part)
        end += align_up(part.nbytes, PARAM_ALIGN_BYTES)
    return end, tuple(parts)


def _owned(spec: UnitSpec, index: int, form: StateForm | None, rank: int) -> tuple[int, int]:
    """First element and number of elements of a state. Of a parameter without elements rank 0 has it."""
    first, numel = spec.owned(rank)[index]
    if form is None:
        return 0, 0
    if form.shape is None or form.shared_by > 1:
        return first // form.shared_by, -(-numel // form.shared_by)
    return 0, math.prod(form.shape) if numel or (not spec.trainable[index].numel and rank == 0) else 0


def states_of(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Mapping[str, StateSpec]:
    """The states that a unit has under a plan."""
    is_compact = has_compact(spec, unit)
    masters = ("master", CODES) if is_compact else ("master",) if has_master(unit, model.precision) else ()
    return lay_out_states(spec, masters + model.state_names, is_compact=is_compact)


def states_bytes(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> int:
    """Size of the unit's states home."""
    return sum(state.nbytes for state in states_of(spec, unit, model).values())


def sums_on_device(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Whether gradients of all ranks are added up on the device, though their sum rests in host memory.

    From three ranks on that moves less: the sum of one run each way, in place of the runs of all ranks home.
    """
    return spec.num_ranks > 2 and unit.gradients == "host"


class Staging(NamedTuple):
    """Byte ranges of a staging slot: what an update on the device of states from host memory takes along."""

    states: tuple[int, int]
    gradients: tuple[int, int]
    """Empty where gradients live on the device."""
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
