"""Updates inside backward that depend on time: which of them are made, and how close a step then comes to its bound."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
from planning.bound.bound import bound_of
from planning.random_steps import random_step

from outcore.order.attempts import Attempt, Attempts
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import PlayedSteps, play_steps, simulate
from outcore.spec.budget import Limits
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Tier, UnitPlan
from outcore.spec.schedule import usual_visits

from .models import layered

MIB = 2**20
AMPLE = Limits(device_bytes=2**50, host_bytes=2**50, disk_bytes=2**50)
FREE = Circumstances(clips=False)


@pytest.fixture
def model() -> ModelSpec:
    return layered(20, root=0, layer=MIB, precision="fp32")


def plan_of(model: ModelSpec, states: Tier) -> Plan:
    """A plan as in ``benchmarks/overlap.py``: layers in host memory, all of them early."""
    units = [UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")]
    units += [UnitPlan(name=u.name, weights="host", gradients="host", states=states) for u in model.units[1:]]
    pools = pools_for(model, units, Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3))
    plan = Plan(precision=model.precision, units=tuple(units), pools=pools, prefetch_depth=2, accumulation_steps=1)
    return with_early_updates(model, plan, AMPLE)


def rates_of(model: ModelSpec, *, update: float, disk: float, is_accelerator: bool) -> Rates:
    """Forward of a layer takes 1 s, backward 2, copies 0.5; reads and writes of states take the given seconds each."""
    names = [unit.name for unit in model.units[1:]]
    links = {**dict.fromkeys(("h2d", "d2h"), 4 * MIB / 0.5)}
    links |= dict.fromkeys(("disk_read", "disk_write"), 12 * MIB / disk) if disk else {}
    return Rates(
        forward_s=dict.fromkeys(names, 1.0),
        backward_s=dict.fromkeys(names, 2.0),
        bytes_per_s=links,
        parameters_per_s={"update": MIB / update},
        host_runs_ahead=is_accelerator,
    )


def made(steps: PlayedSteps) -> list[set[int]]:
    """For each step, the layers that were updated inside backward."""
    found: list[set[int]] = [set()]
    for op in steps.operations:
        if op.kind == "update early" and op.nbytes:
            found[-1].add(int(op.unit.rsplit(".", 1)[-1]))
        if op.kind == "wait":  # for the end of backward
            found.append(set())
    return found[:-1]


SLOW = [(5.0, 0.0), (0.5, 5.0), (4.0, 2.0), (2.0, 4.0)]


@pytest.mark.parametrize("is_accelerator", [True, False])
@pytest.mark.parametrize(("update", "disk"), SLOW)
def test_near_the_bound_where_backward_has_time_for_some(
    model: ModelSpec, update: float, disk: float, is_accelerator: bool
) -> None:
    plan = plan_of(model, "disk" if disk else "host")
    given = model, plan, rates_of(model, update=update, disk=disk, is_accelerator=is_accelerator), usual_visits(model)
    bound_s, step_s = bound_of(*given, FREE).seconds, simulate(*given, FREE).step_s
    assert (1 - 1e-9) * bound_s <= step_s <= 1.10 * bound_s
    all_made = simulate(*given, replace(FREE, overtaken=frozenset()))
    assert step_s <= all_made.step_s
    steps = play_steps(*given, FREE)
    assert all(0 < len(layers) < 20 for layers in made(steps)[1:])


def test_the_last_units_are_left_to_step(model: ModelSpec) -> None:
    """Updates that run beside forward keep the drive busy until backward gives gradients again."""
    plan = plan_of(model, "disk")
    given = model, plan, rates_of(model, update=0.5, disk=5.0, is_accelerator=True), usual_visits(model)
    left = [max(set(range(20)) - layers) for layers in made(play_steps(*given, FREE, warm_up=8))]
    assert left[0] < 15  # it is not known yet for how many there is time
    assert set(left[1:]) == {18}, left
    with mock.patch.object(Attempts, "wants_next", return_value=True):
        as_they_come = simulate(*given, FREE).step_s
    assert as_they_come > 1.04 * simulate(*given, FREE).step_s


def test_with_time_for_all_none_is_left_out(model: ModelSpec) -> None:
    rates = rates_of(model, update=1.0, disk=0.0, is_accelerator=True)
    steps = play_steps(model, plan_of(model, "host"), rates, usual_visits(model), FREE)
    assert made(steps) == [set(range(20))] * len(made(steps))


class _Lane:
    """Attempts of a step, of which some are late when backward is over."""

    def __init__(self) -> None:
        self.attempts = Attempts()

    def step(self, units: int, num_lost: int = 0, num_under_way: int = 0) -> list[int]:
        """Return the places of the units that are left out."""
        left_out, started = [], []
        for place in range(units):
            if not self.attempts.wants_next():
                left_out.append(place)
                continue
            number = len(started)
            started.append(Attempt(lambda: False, lambda number=number: number >= num_lost + num_under_way))
            self.attempts.add(started[-1])
            if number >= num_lost:
                assert started[-1].is_due()
        self.attempts.settle(started)
        return left_out


def test_as_many_are_left_out_as_were_too_many() -> None:
    lane = _Lane()
    assert lane.step(12, num_lost=9) == []
    assert lane.step(12, num_under_way=2) == [1, 4, 7, 10]  # half of them, spread evenly from the second unit on
    assert lane.step(12, num_lost=1, num_under_way=2) == [1, 4, 7, 10]
    assert lane.step(12) == [1, 3, 5, 8, 10]
    assert lane.step(6) == [1, 4, 7, 10][:2]  # the places of a step of 12
    assert len(lane.step(6)) == 3


def test_an_attempt_is_overtaken_by_the_next_one() -> None:
    home = set[str]()
    first, second = (Attempt(lambda name=name: name in home, lambda: False) for name in "ab")
    attempts = Attempts()
    attempts.add(first)
    attempts.add(second)
    home |= {"a"}
    assert first.is_due()
    home |= {"b"}
    assert first.is_due()  # an attempt that is decided stays due
    assert second.is_due()
    late, last = Attempt(lambda: True, lambda: False), Attempt(lambda: True, lambda: False)
    attempts.add(late)
    attempts.add(last)
    assert not late.is_due()
    assert not last.settle()  # its turn has not come
    assert not last.is_due()


@pytest.mark.parametrize("seed", range(60))
def test_no_faster_than_the_bound_whichever_are_made(seed: int) -> None:
    step = random_step(random.Random(seed))
    free = replace(step.circumstances, overtaken=None)
    given = step.model, step.plan, step.rates, step.visits, free
    assert simulate(*given, warm_up=6).step_s >= (1 - 1e-9) * bound_of(*given).seconds
