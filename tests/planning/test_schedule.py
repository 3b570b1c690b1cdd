"""Schedules: kept as text for a handful of plans, and free of races for any plan and any loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from outcore.core.errors import ConfigError
from outcore.planning.schedule import consecutive, schedule, update_order, usual_visits
from outcore.planning.weight_cache import nothing_held
from outcore.spec.lanes import Lane
from outcore.spec.layout import has_master, states_of
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Operation, Phase, Schedule, Visit
from outcore.spec.timeline import COMPUTE

from .goldens import CASES, FOLDER, HOST, model, plan, text, visits
from .loops import loops

PHASES = {phase.value for phase in Phase}
LANES = {COMPUTE, *(lane.value for lane in Lane)}
NUM_STEPS = 4
Access = tuple[str, ...]  # what is accessed: kind of memory, unit or slot


@pytest.mark.parametrize("name", CASES)
def test_schedule_is_as_kept(name: str):
    # python -m tests.planning.goldens writes them anew
    assert text(name) == (FOLDER / f"{name}.txt").read_text()


def test_no_text_is_kept_of_other_cases():
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)


def test_bytes_per_lane():
    spec = model("abcd")
    moved = schedule(spec, plan(spec, HOST, slots=2), usual_visits(spec)).moved_bytes()
    unit = spec.units[1]
    assert moved["h2d"] == 6 * unit.weight_bytes
    assert moved["d2h"] == 4 * unit.trainable_bytes + spec.units[0].trainable_bytes


def test_units_are_updated_as_forward_used_them():
    spec = model("abcd")
    assert update_order(visits(spec, "Fc Fa F Fa Ba Bc"), 5) == [3, 1, 0, 2, 4]
    assert update_order(visits(spec, "Fb Bb"), 5) == [0, 2, 1, 3, 4]


def test_a_plan_without_slots_is_refused():
    spec = model("ab")
    homeless = Plan(precision="bf16", units=plan(spec, HOST, slots=1).units, pools=(), prefetch_depth=0)
    with pytest.raises(ConfigError, match="expected slots for weights of 8192 bytes on device, but the plan has none"):
        schedule(spec, homeless, usual_visits(spec))


@settings(max_examples=200, deadline=None)
@given(loops())
def test_everything_that_conflicts_is_ordered(loop: tuple[ModelSpec, Plan, tuple[Visit, ...]]):
    spec, the_plan, order = loop
    steps = first_steps(spec, the_plan, order, NUM_STEPS)
    operations = list(one_behind_the_other(steps))
    before = happens_before(operations)
    accesses = Accesses(spec, the_plan)
    last_write: dict[Access, int] = {}
    reads_since: dict[Access, list[int]] = {}
    ends = set(itertools.accumulate(len(step.operations) for step in steps))
    for i, op in enumerate(operations):
        if i in ends:
            accesses.end_step()
        reads, writes = accesses.of(op)
        for what in (*reads, *writes):
            assert what not in last_write or is_before(last_write[what], i, before), (op.name, what)
        for what in writes:
            assert all(is_before(j, i, before) for j in reads_since.get(what, [])), (op.name, what)
            last_write[what], reads_since[what] = i, []
        for what in reads:
            reads_since.setdefault(what, []).append(i)


@settings(max_examples=50, deadline=None)
@given(loops())
def test_a_schedule_is_what_steps_come_to(loop: tuple[ModelSpec, Plan, tuple[Visit, ...]]):
    spec, the_plan, order = loop
    found = schedule(spec, the_plan, order)
    check_form(found, order)
    steps = first_steps(spec, the_plan, order, 24)
    come_to = [of_the_step_before(step, before) for before, step in itertools.pairwise(steps)]
    assert found in come_to
    if found.held_device == come_to[-1].held_device and found.held_host == come_to[-1].held_host:
        assert {op.name for op in found.operations if op.kind != "read states of"} <= names(come_to[-1])
    if "disk" not in {unit.states for unit in the_plan.units} and steps[-1].held_device == steps[-2].held_device:
        assert found == come_to[-1]


def first_steps(spec: ModelSpec, the_plan: Plan, order: tuple[Visit, ...], num_steps: int) -> list[Schedule]:
    return list(itertools.islice(consecutive(spec, the_plan, order, nothing_held(the_plan)), num_steps))


def names(step: Schedule) -> set[str]:
    return {op.name for op in step.operations}


def of_the_step_before(step: Schedule, before: Schedule) -> Schedule:
    """Without what is over for longer than a step."""
    oldest = -len(before.operations)
    operations = [replace(op, after=tuple(i for i in op.after if i >= oldest)) for op in step.operations]
    return replace(step, operations=tuple(operations))


def check_form(found: Schedule, order: tuple[Visit, ...]) -> None:
    """Lanes are known, dependencies point backwards, and every visit is there once."""
    num_before = len(found.operations) + len({visit.unit for visit in order}) + 1  # each unit's states, read or kept
    for i, op in enumerate(found.operations):
        assert op.lane in LANES
        assert all(-num_before <= j < i for j in op.after)
        assert (op.slot is not None) == (op.kind in ("fetch", "read weights of"))
    assert [op.kind for op in found.operations if op.kind in PHASES] == [visit.phase.value for visit in order]


def one_behind_the_other(steps: list[Schedule]) -> Iterator[Operation]:
    """Operations of several steps, with indices over all of them."""
    begin = 0
    for step in steps:
        for op in step.operations:
            yield replace(op, after=tuple(begin + i for i in op.after))
        begin += len(step.operations)


def happens_before(operations: list[Operation]) -> list[int]:
    """For each operation the set of those that are over when it begins, as bits."""
    before: list[int] = []
    last: dict[str, int] = {}
    for i, op in enumerate(operations):
        direct = [*op.after, *([last[op.lane]] if op.lane in last else [])]
        mask = 0
        for j in direct:
            mask |= before[j] | 1 << j
        before.append(mask)
        last[op.lane] = i
    return before


def is_before(j: int, i: int, before: list[int]) -> bool:
    return bool(before[i] >> j & 1)


class Accesses:
    """Which memory an operation reads and writes, from its name and the homes of its unit."""

    def __init__(self, spec: ModelSpec, the_plan: Plan) -> None:
        self.plans = {unit.name: unit for unit in the_plan.units}
        self.sizes = {unit.name: unit.weight_bytes for unit in spec.units}
        self.has_states = {unit.name: bool(states_of(unit, spec)) for unit in the_plan.units}
        self.has_master = {unit.name: has_master(unit, spec.precision) for unit in the_plan.units}
        self.places = dict.fromkeys(self.plans, 0)  # early updates let a unit's homes change places
        self.updated_early: set[str] = set()
        self.slots: dict[tuple[str, int], str] = {}
        self.sent: set[str] = set()  # units with gradients at home that count

    def of(self, op: Operation) -> tuple[list[Access], list[Access]]:  # noqa: PLR0911
        """Reads and writes."""
        unit, place = self.plans[op.unit], self.places[op.unit]
        weights = f"weights {place if unit.weights == 'host' else 0}"
        homes = {"weights": (weights, op.unit), "gradients": ("gradients", op.unit)}
        homes["states"] = (
            f"states {place ^ (op.kind == 'write states of' and op.unit in self.updated_early)}",
            op.unit,
        )
        if op.kind in PHASES:
            is_streamed = unit.weights != "device" and self.sizes[op.unit]
            return [self.holding("device", op.unit) if is_streamed else homes["weights"]], []
        if op.kind in ("fetch", "read weights of"):
            return self.move(op, homes["weights"])
        if op.kind in ("gradients of", "accumulate", "read gradients of", "write gradients of"):
            return self.gradients(op, homes["gradients"])
        if op.kind in ("read states of", "write states of", "write weights of"):
            verb, what, _ = op.kind.split()
            made = (
                [("made weights", op.unit)] if op.kind == "write weights of" and op.unit in self.updated_early else []
            )
            return ([homes[what]], []) if verb == "read" else (made, [homes[what]])
        if op.kind == "update early":
            return self.early(op, homes)
        if op.lane in ("states_h2d", "device_update", "states_d2h"):
            return self.staged(op, homes)
        self.sent.discard(op.unit)
        reads = [homes["gradients"]] if unit.gradients == "host" or unit.states == "device" else []
        writes = [homes["states"]] if unit.states != "disk" and self.has_states[op.unit] else []
        writes += [homes["weights"]] if unit.weights == "host" or unit.states == "device" else []
        return reads, writes

    def early(self, op: Operation, homes: dict[str, Access]) -> tuple[list[Access], list[Access]]:
        """Out of place: from these homes to the others."""
        unit, next_place = self.plans[op.unit], self.places[op.unit] ^ 1
        self.updated_early.add(op.unit)
        is_in_memory = unit.states == "host" and self.has_states[op.unit]
        reads = [homes["gradients"]] if unit.gradients == "host" else []
        reads += [homes["states"]] if is_in_memory else []
        reads += [] if self.has_master[op.unit] else [homes["weights"]]
        writes = [(f"states {next_place}", op.unit)] if is_in_memory else []
        return reads, [*writes, (f"weights {next_place}" if unit.weights == "host" else "made weights", op.unit)]

    def end_step(self) -> None:
        """Early updates are kept."""
        for unit in self.updated_early:
            self.places[unit] ^= 1
            self.sent.discard(unit)
        self.updated_early.clear()

    def staged(self, op: Operation, homes: dict[str, Access]) -> tuple[list[Access], list[Access]]:
        """An update on the device of states in host memory."""
        unit = self.plans[op.unit]
        if op.kind == "stage":
            reads = [homes["states"]] if self.has_states[op.unit] else []
            reads += [homes["gradients"]] if unit.gradients == "host" else []
            return reads + ([] if self.has_master[op.unit] else [homes["weights"]]), []
        if op.kind == "update":
            self.sent.discard(op.unit)
            return ([homes["gradients"]] if unit.gradients == "device" else []), []
        return [], [homes["states" if op.kind == "states of" else "weights"]]

    def holding(self, tier: str, unit: str) -> Access:
        """The slot with a unit's weights. Fails if there is none, or more than one."""
        (slot,) = [slot for (of, slot), holder in self.slots.items() if (of, holder) == (tier, unit)]
        return tier, str(slot)

    def move(self, op: Operation, home: Access) -> tuple[list[Access], list[Access]]:
        assert op.slot is not None
        tier = "device" if op.kind == "fetch" else "host"
        is_staged = op.kind == "fetch" and self.plans[op.unit].weights == "disk"
        source = self.holding("host", op.unit) if is_staged else home
        for key in [key for key, holder in self.slots.items() if key[0] == tier and holder == op.unit]:
            del self.slots[key]  # of an earlier step
        if op.evicts is not None:
            assert self.slots.get((tier, op.slot)) == op.evicts
        self.slots[tier, op.slot] = op.unit
        return [source], [(tier, str(op.slot))]

    def gradients(self, op: Operation, home: Access) -> tuple[list[Access], list[Access]]:
        """Slots on the way are taken in turn and have no names, so only homes count."""
        tier = self.plans[op.unit].gradients
        if op.kind == "write gradients of" or (op.kind == "accumulate" and tier != "disk"):
            return [], [home]
        if op.kind == "read gradients of" or (op.lane == "d2h" and tier == "device"):
            return [home], []
        is_first = op.lane == "d2h" and tier == "host" and op.unit not in self.sent
        if is_first:
            self.sent.add(op.unit)
        return [], [home] if is_first else []
