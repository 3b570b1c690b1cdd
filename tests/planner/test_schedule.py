"""Schedules: kept as text for a handful of plans, and free of races for any plan and any loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

from outcore.core.errors import ConfigError
from outcore.order.weight_cache import nothing_held, update_order
from outcore.planner.paper.paper_schedule import consecutive, schedule
from outcore.spec.lane_names import Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Access, Operation, Phase, Schedule, Visit, usual_visits
from outcore.spec.timeline import COMPUTE

from .goldens import CASES, FOLDER, HOST, model, plan, text, visits
from .loops import loops

PHASES = {phase.value for phase in Phase}
LANES = {COMPUTE, "host", *(lane.value for lane in Lane)}
NUM_STEPS = 4


@pytest.mark.parametrize("name", CASES)
def test_schedule_is_as_kept(name: str):
    # python -m tests.planner.goldens writes these files anew
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
    usual = plan(spec, HOST, slots=2)
    assert update_order(visits(spec, "Fc Fa F Fa Ba Bc"), usual) == [3, 1, 0, 2, 4]
    assert update_order(visits(spec, "Fb Bb"), usual) == [0, 2, 1, 3, 4]
    assert update_order(None, usual) == [0, 1, 2, 3, 4]


def test_units_that_the_plan_names_are_updated_first():
    spec = model("abcd")
    named = replace(plan(spec, HOST, slots=2), updated_first=("d", "b"))
    assert update_order(usual_visits(spec), named) == [4, 2, 1, 3, 0]
    assert update_order(visits(spec, "Fc Fa Ba Bc"), named) == [4, 2, 0, 3, 1]
    assert update_order(None, replace(named, updated_first=("c", "", "a", "b", "d"))) == [3, 0, 1, 2, 4]


def test_a_plan_without_slots_is_refused():
    spec = model("ab")
    homeless = Plan(precision="bf16", units=plan(spec, HOST, slots=1).units, pools=(), prefetch_depth=0)
    with pytest.raises(ConfigError, match="expected slots for weights of 8192 bytes on device, but the plan has none"):
        schedule(spec, homeless, usual_visits(spec))


@settings(max_examples=200, deadline=None)
@given(loops())
def test_everything_that_conflicts_is_ordered(loop: tuple[ModelSpec, Plan, tuple[Visit, ...]]):
    spec, the_plan, order = loop
    operations = list(one_behind_the_other(first_steps(spec, the_plan, order, NUM_STEPS)))
    before = happens_before(operations)
    accesses: dict[str, list[tuple[int, Access, bool]]] = {}
    for i, op in enumerate(operations):
        mine = [(access, False) for access in op.reads] + [(access, True) for access in op.writes]
        for access, is_write in mine:
            for j, other, was_write in accesses.get(access.where, []):
                if j != i and (is_write or was_write) and access.start < other.stop and other.start < access.stop:
                    assert is_before(j, i, before), (op.name, operations[j].name, access)
        for access, is_write in mine:
            accesses.setdefault(access.where, []).append((i, access, is_write))


@settings(max_examples=50, deadline=None)
@given(loops())
def test_a_schedule_is_what_steps_come_to(loop: tuple[ModelSpec, Plan, tuple[Visit, ...]]):
    spec, the_plan, order = loop
    found = without_accesses(schedule(spec, the_plan, order))
    check_form(found, order)
    steps = first_steps(spec, the_plan, order, 24)
    come_to = [without_accesses(of_the_step_before(step, before)) for before, step in itertools.pairwise(steps)]
    assert found in come_to
    if found.held_device == come_to[-1].held_device and found.held_host == come_to[-1].held_host:
        assert {op.name for op in found.operations if op.kind != "read states of"} <= names(come_to[-1])
    if "disk" not in {unit.states for unit in the_plan.units} and steps[-1].held_device == steps[-2].held_device:
        assert found == come_to[-1]


def without_accesses(step: Schedule) -> Schedule:
    """Drop memory accesses: with early updates, homes change places in every step."""
    return replace(step, operations=tuple(op._replace(reads=(), writes=()) for op in step.operations))


def first_steps(spec: ModelSpec, the_plan: Plan, order: tuple[Visit, ...], num_steps: int) -> list[Schedule]:
    return list(itertools.islice(consecutive(spec, the_plan, order, nothing_held(the_plan)), num_steps))


def names(step: Schedule) -> set[str]:
    return {op.name for op in step.operations}


def of_the_step_before(step: Schedule, before: Schedule) -> Schedule:
    """Drop dependencies on operations that are more than a step back."""
    oldest = -len(before.operations)
    operations = [op._replace(after=tuple(i for i in op.after if i >= oldest)) for op in step.operations]
    return replace(step, operations=tuple(operations))


def check_form(found: Schedule, order: tuple[Visit, ...]) -> None:
    """Check that lanes are known, dependencies point backwards, and every visit appears once."""
    num_before = len(found.operations) + len({visit.unit for visit in order}) + 1  # and states of units
    for i, op in enumerate(found.operations):
        assert op.lane in LANES
        assert all(-num_before <= j < i for j in op.after)
        assert (op.slot is not None) == (op.kind in ("fetch", "read weights of"))
    assert [op.kind for op in found.operations if op.kind in PHASES] == [visit.phase.value for visit in order]


def one_behind_the_other(steps: list[Schedule]) -> Iterator[Operation]:
    """Yield the operations of several steps, with indices over all of them."""
    begin = 0
    for step in steps:
        for op in step.operations:
            yield op._replace(after=tuple(begin + i for i in op.after))
        begin += len(step.operations)


def happens_before(operations: list[Operation]) -> list[int]:
    """Return, for each operation, the set of operations that are over when it begins, as bits."""
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
