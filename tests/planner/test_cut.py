"""Weights cut over ranks, by calculation: which rank has which bytes, what that takes, and what a fetch moves."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from outcore.core.errors import ConfigError
from outcore.planner.homes.check import check_plan
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import schedule
from outcore.spec.budget import reservations
from outcore.spec.layout import weights_home
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.plan_table import plan_table
from outcore.spec.schedule import usual_visits

from .models import layered, unit

WAYS = [("replicate", "link"), ("node", "link"), ("world", "link"), ("node", "host")]


def model_of(num_ranks: int = 1, rank: int = 0, per_node: int | None = None, *, frozen: int = 50_003) -> ModelSpec:
    trained = 70_001 if frozen < 100_000 else 900
    units = (unit("", 100), *(unit(f"u.{i}", trained, frozen) for i in range(3)))
    return dataclasses.replace(layered(0), units=units).among(num_ranks, rank, per_node)


def plan_of(model: ModelSpec, partition: str, gather: str, tier: str = "host") -> Plan:
    how = {"partition": partition, "gather": gather if tier == "host" else "link"}
    root, *names = [unit.name for unit in model.units]
    units = [UnitPlan(name=root, weights="device", gradients="host", states="host", policy="keep")]
    units += [UnitPlan(name=name, weights=tier, gradients="host", states="host", **how) for name in names]
    pools = pools_for(model, units, Comfort(prefetch_depth=1, num_buckets=1, max_slots_host=1))
    return Plan(precision="bf16", units=tuple(units), pools=pools, prefetch_depth=1)


@pytest.mark.parametrize(("partition", "gather"), WAYS)
@pytest.mark.parametrize(("num_ranks", "per_node"), [(1, 1), (3, 3), (4, 2), (6, 2)])
def test_sharers_have_every_byte_once_and_at_its_place(num_ranks, per_node, partition, gather):
    homes = []
    for rank in range(num_ranks):
        model = model_of(num_ranks, rank, per_node)
        homes.append(weights_home(model.units[1], plan_of(model, partition, gather).units[1]))
    sharers = homes[0].num_sharers
    assert sharers == {"replicate": 1, "node": per_node, "world": num_ranks}[partition]
    for first in range(0, num_ranks, sharers):
        runs = [run for home in homes[first : first + sharers] for run in home.runs()]
        covered = sorted((run.layout, run.layout + run.nbytes) for run in runs)
        assert covered[0][0] == 0
        assert covered[-1][1] == homes[0].spec.weight_bytes
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    for rank, home in enumerate(homes):
        spec = home.spec
        assert home.taken_bytes * sharers == spec.weight_bytes
        start, stop = home.updated
        own = home.own_run(is_trained=True)
        assert own.layout == rank * spec.run_bytes
        assert own.home == start + home.own_start
        assert own.home + own.nbytes <= stop
        for mine in (own, home.own_run(is_trained=False)):
            holder = next(run for run in home.runs() if run.layout <= mine.layout < run.layout + run.nbytes)
            assert mine.home - holder.home == mine.layout - holder.layout
        for (begin, end), run in zip(home.together(), home.runs(), strict=True):
            assert begin <= run.layout < end
            assert (run.layout - begin) // run.nbytes == rank % sharers
        for part in spec.weight_parts:
            here = [(run.layout, run.nbytes) for run in home.here(part)]
            assert sum(nbytes for _, nbytes in here) <= part.nbytes
            assert sharers > 1 or here == [(part.offset, part.nbytes)]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize(("partition", "gather"), WAYS[1:])
def test_homes_of_all_ranks_take_what_those_of_one_take(partition, gather, tier):
    def homes(num_ranks: int, rank: int) -> int:
        model = model_of(num_ranks, rank)
        found = reservations(model, plan_of(model, partition, gather, tier))
        return sum(r.nbytes for r in found if r.owner and r.kind in ("weights", "gradients", "states"))

    assert sum(homes(4, rank) for rank in range(4)) <= 1.05 * homes(1, 0)


def test_a_fetch_brings_a_run_and_the_others_come_by_link():
    model = model_of(4)
    spec = model.units[1]
    found = schedule(model, plan_of(model, "world", "link"), usual_visits(model)).operations
    fetches = [op for op in found if op.kind == "fetch"]
    linked = {op.unit: op for op in found if op.kind == "all-gather weights of"}
    assert all(op.nbytes == spec.run_bytes + spec.frozen_run_bytes for op in fetches)
    assert linked.keys() == {"u.0", "u.1", "u.2"}
    assert all(op.lane == "link" and 4 * op.nbytes == 3 * spec.weight_bytes for op in linked.values())
    assert all(found[i].kind == "fetch" for op in linked.values() for i in op.after)
    assert {op.unit for op in found if op.lane == "gather"} == {""}  # only the root's new weights go to all ranks
    there = schedule(model, plan_of(model, "world", "link", "device"), usual_visits(model)).operations
    assert not [op for op in there if op.lane == "h2d"]
    assert len([op for op in there if op.lane == "link"]) == len(fetches)


def test_of_one_copy_whole_units_are_fetched_and_each_rank_writes_its_run():
    model = model_of(4, 1)
    spec = model.units[1]
    found = schedule(model, plan_of(model, "node", "host"), usual_visits(model)).operations
    assert not [op for op in found if op.lane == "link"]
    assert all(op.nbytes == spec.weight_bytes for op in found if op.kind == "fetch")
    updates = [op for op in found if op.kind == "update" and op.unit]
    run = (spec.run_bytes, 2 * spec.run_bytes)
    assert all(run in [(access.start, access.stop) for access in op.writes] for op in updates)
    first = next(i for i, op in enumerate(found) if op.kind == "wait for readers of")
    assert all(first in op.after for op in updates)


@pytest.mark.parametrize("partition", ["node", "world"])
def test_few_trained_weights_stay_whole(partition):
    """A fetch is one all-gather of the frozen weights; new weights come from all ranks."""
    few = model_of(4, 3, 2, frozen=200_003)
    spec, plan = few.units[1], plan_of(few, partition, "link")
    home = weights_home(spec, plan.units[1])
    whole, *frozen = home.runs()
    assert (whole.home, whole.layout, whole.nbytes) == (0, 0, spec.trainable_bytes)
    assert home.together()[0] == (0, spec.trainable_bytes)
    assert home.taken_bytes == spec.trainable_bytes + sum(run.nbytes for run in frozen)
    assert sum(run.nbytes for run in frozen) * home.num_sharers == 4 * spec.frozen_run_bytes
    assert home.updated == (0, spec.trainable_bytes)
    assert home.own_start == home.own_run(is_trained=True).home == 3 * spec.run_bytes
    found = schedule(few, plan, usual_visits(few)).operations
    linked, sent = (([op for op in found if op.lane == lane and op.unit]) for lane in ("link", "gather"))
    assert all(op.nbytes == 4 * spec.frozen_run_bytes * (home.num_sharers - 1) // home.num_sharers for op in linked)
    assert [op.nbytes for op in sent] == [3 * spec.run_bytes] * 3
    many = model_of(4, 3, 2)
    assert weights_home(many.units[1], plan_of(many, partition, "link").units[1]).trained_sharers == home.num_sharers


def test_one_rank_has_all_whatever_the_plan_says():
    model = model_of()
    whole = schedule(model, plan_of(model, "replicate", "link"), usual_visits(model))
    for partition, gather in WAYS[1:]:
        assert schedule(model, plan_of(model, partition, gather), usual_visits(model)) == whole


def test_machines_with_other_numbers_of_ranks_are_refused():
    model = model_of(5, 0, 2)
    with pytest.raises(ConfigError, match="as many ranks on each machine, but there are 5 with 2 on each"):
        check_plan(model, plan_of(model_of(4, 0, 2), "node", "link"))
    check_plan(model, plan_of(model, "world", "link"))


def test_the_table_says_how_weights_are_cut():
    model = model_of(4)
    assert "cut" not in plan_table(model, plan_of(model, "replicate", "link"))
    for (partition, gather), said in zip(
        WAYS[1:],
        ("cut over the ranks of a machine", "cut over all ranks", "shared by the ranks of a machine"),
        strict=True,
    ):
        assert f"weights {said} (3 units)" in plan_table(model, plan_of(model, partition, gather))
