"""Belady's rule and its moves, compared with exhaustive search, other rules and a replay."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.order.weight_cache import Cache, HeldUnits, Move, Use, belady, nothing_held, slot_sizes, weight_moves
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Phase, Visit, usual_visits

from .goldens import HOST, model, plan, visits
from .loops import loops

USES = st.lists(st.integers(0, 4), max_size=14)


def num_loads(uses: Sequence[int], num_slots: int, depth: int = 0) -> int:
    """Number of loads in one step, with slots that hold nothing at first."""
    cache = Cache(dict.fromkeys(range(5), range(num_slots)), frozenset(), depth)
    return len(list(belady([Use(i, unit, 0) for i, unit in enumerate(uses)], cache, [None] * num_slots)))


def fewest_loads(uses: tuple[int, ...], num_slots: int) -> int:
    """The fewest loads, found by trying every choice."""

    @functools.cache
    def fewest(i: int, held: frozenset[int]) -> int:
        if i == len(uses):
            return 0
        if uses[i] in held:
            return fewest(i + 1, held)
        choices = held if len(held) == num_slots else (None,)
        return 1 + min(fewest(i + 1, held - {evicted} | {uses[i]}) for evicted in choices)

    return fewest(0, frozenset())


def loads_of(rule: str, uses: Sequence[int], num_slots: int) -> int:
    """Loads of a cache that evicts what was used (``lru``) or loaded (``fifo``) longest ago."""
    held: list[int] = []
    loads = 0
    for unit in uses:
        if unit not in held:
            loads += 1
            held = [*held, unit][-num_slots:]
        elif rule == "lru":
            held.remove(unit)
            held.append(unit)
    return loads


@given(USES, st.integers(1, 4))
def test_no_choice_of_evictions_loads_less(uses: list[int], num_slots: int):
    assert num_loads(uses, num_slots) == fewest_loads(tuple(uses), num_slots)


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 4), st.sampled_from(["lru", "fifo"]))
def test_never_more_loads_than_other_rules(uses: list[int], num_slots: int, rule: str):
    assert num_loads(uses, num_slots) <= loads_of(rule, uses, num_slots)


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 4), st.integers(0, 5))
def test_time_for_loads_costs_no_more_than_the_oldest_first(uses: list[int], num_slots: int, depth: int):
    assert num_loads(uses, num_slots) <= num_loads(uses, num_slots, depth) <= loads_of("lru", uses, num_slots)


@pytest.mark.parametrize(("slots", "micro_batches"), list(itertools.product([1, 2, 3, 4, 7, 8, 9], [1, 2, 3])))
def test_the_last_of_a_sweep_are_kept_for_the_next(slots: int, micro_batches: int):
    spec = model("abcdefgh")
    for depth in range(slots):
        the_plan = plan(spec, HOST, slots=slots, depth=depth)
        moves, _ = weight_moves(spec, the_plan, usual_visits(spec, micro_batches), nothing_held(the_plan))
        num_sweeps = 2 * micro_batches
        assert len(moves) == num_sweeps * 8 - (num_sweeps - 1) * min(slots, 8), depth


def test_reads_keep_what_the_device_does_not():
    spec = model("abcdefgh")
    the_plan = plan(spec, ("disk", "host", "host"), slots=3, max_slots_host=3)
    moves, _ = weight_moves(spec, the_plan, usual_visits(spec), nothing_held(the_plan))
    tiers = [move.tier for move in moves]
    assert (tiers.count("device"), tiers.count("host")) == (13, 12)


def test_weights_that_no_step_changes_are_moved_ahead_of_the_next_one():
    spec = model("abcd", frozen="abcd")
    the_plan = plan(spec, HOST, slots=2)
    step = visits(spec, "Fa Fb Fc Fd")
    first = weight_moves(spec, the_plan, step, nothing_held(the_plan))
    again = weight_moves(spec, the_plan, step, first.held)
    assert [(m.unit, m.due, m.use) for m in again.moves] == [(2, 0, 1), (3, 1, 2), (4, 2, 3), (1, 3, 4)]
    assert set(again.held.device) == set(first.held.device) == {4, 1}


@pytest.mark.parametrize(("depth", "num_fetches"), [(0, 36), (1, 45), (2, 60)])
def test_units_used_in_turn_trade_time_for_fetches(depth: int, num_fetches: int):
    spec = model("abcdef", frozen="abcdef")
    the_plan = plan(spec, HOST, slots=3, depth=depth)
    held, fetches = nothing_held(the_plan), []
    for _ in range(25):
        moves, held = weight_moves(spec, the_plan, visits(spec, "Fa Fb Fc Fd Fe Ff"), held)
        assert all(move.use - move.due >= depth for move in moves if move.due)
        fetches.append(len(moves))
    assert sum(fetches[-10:]) == num_fetches


@settings(max_examples=200, deadline=None)
@given(loops())
def test_every_visit_finds_its_weights(loop: tuple[ModelSpec, Plan, tuple[Visit, ...]]):
    spec, the_plan, order = loop
    held = nothing_held(the_plan)
    for _ in range(3):
        step = weight_moves(spec, the_plan, order, held)
        held = replay(spec, the_plan, order, held, step.moves)
        assert held == step.held


def replay(
    spec: ModelSpec, the_plan: Plan, order: Sequence[Visit], held: HeldUnits, moves: Sequence[Move]
) -> HeldUnits:
    """Make the moves of a step when they are due and check each. Returns what the slots hold at the end."""
    slots = {tier: list(getattr(held, tier)) for tier in HeldUnits._fields}
    period, waiting = len(order), list(moves)
    homes = [unit.weights for unit in the_plan.units]
    trained = {v.unit for v in order if v.phase is Phase.BACKWARD and spec.units[v.unit].trainable}
    for i, visit in enumerate(order):
        while waiting and waiting[0].due <= i:
            move = waiting.pop(0)
            check_move(move, i, order, slots[move.tier], trained)
            if move.tier == "device" and homes[move.unit] == "disk":
                assert move.unit in slots["host"]
            size = slot_sizes(the_plan, move.tier)[move.slot]
            assert size == min(s for s in slot_sizes(the_plan, move.tier) if s >= spec.units[move.unit].weight_bytes)
            slots[move.tier][move.slot] = move.unit
        assert homes[visit.unit] == "device" or not spec.units[visit.unit].weight_bytes or visit.unit in slots["device"]
    assert not waiting
    assert all(move.use < period for move in moves if move.unit in trained)
    return HeldUnits(*(tuple(None if unit in trained else unit for unit in slots[tier]) for tier in HeldUnits._fields))


def check_move(move: Move, now: int, order: Sequence[Visit], slots: list[int | None], trained: set[int]) -> None:
    """Check that a move has the right slot, comes in time and as early as it can, and evicts nothing needed sooner."""
    assert move.due == now <= move.use
    assert move.unit not in slots
    assert slots[move.slot] == move.evicts
    if move.tier == "device":
        assert now == 0 or order[now - 1].unit == move.evicts  # the slot was in use until now
        between = [(order * 2)[i].unit for i in range(now, move.use)]
        assert move.evicts not in between or (move.evicts in trained and move.use >= len(order))
