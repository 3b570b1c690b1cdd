"""Loops whose steps differ submit what the schedule of their visits says."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import prepare_for_test
from torch import nn

import outcore
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.engine import engine_of
from outcore.model.partition import partition
from outcore.order.weight_cache import nothing_held
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import consecutive, schedule
from outcore.spec.lane_names import Lane
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.schedule import Phase, Schedule, Visit
from outcore.spec.timeline import COMPUTE

from . import zoo
from .cases import Case, run
from .loops import Backward, Setting, assert_equal, plain_backward, plain_loop

STEPS = 4
PHASES = {phase.value for phase in Phase}
Log = list[tuple[str, str, int]]


class Watch:
    """Logs what a prepared model submits, step by step."""

    def __init__(self) -> None:
        self.steps: list[Log] = [[]]
        self.visits: list[tuple[Visit, ...]] = []
        self.schedules: Callable[[tuple[Visit, ...]], list[Schedule]]

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> Any:
        prepared = prepare_for_test(model, optimizer, faults=Faults(), race_checker=RaceChecker(), **options)
        engine = engine_of(model, "watch")
        device, weights = engine.device, engine.weights
        submit, compute, begin = device.submit, device.compute, weights.prefetch_after_update

        def log(lane: str, name: str, writes: Any) -> None:
            self.steps[-1].append((lane, name, sum(region.stop - region.start for region in writes)))

        def logged_submit(lane: Lane, name: str, work: Any, **more: Any) -> Any:
            log(lane.value, name, more.get("writes", ()))
            return submit(lane, name, work, **more)

        def logged_compute(name: str, **more: Any) -> Any:
            log(COMPUTE, name, more.get("writes", ()))
            return compute(name, **more)

        def logged_begin() -> None:
            self.steps.append([])
            begin()
            self.visits.append(weights.visits)

        device.submit, device.compute, weights.prefetch_after_update = logged_submit, logged_compute, logged_begin
        spec, plan = engine.opened.model, engine.opened.plan
        self.schedules = lambda visits: [
            *itertools.islice(consecutive(spec, plan, visits, nothing_held(plan)), 2, 12),
            schedule(spec, plan, visits),
        ]
        return prepared


def fixed_order(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Use block 1 of the patchwork twice, and the same blocks in every step."""
    loss = zoo.loss(model, {**batch, "order": (0, 1, 1, 2, 4)}) / micro_batches
    loss.backward()
    return loss


def two_forwards(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Run two forwards, then one backward through both, like preference losses."""
    loss = (zoo.loss(model, batch) + 2 * zoo.loss(model, batch)) / micro_batches
    loss.backward()
    return loss


ONE = Setting(steps=STEPS)


@pytest.mark.parametrize("kind", ["host", "disk", "mixed"])
def test_a_block_used_twice(kind: str, tmp_path: Path) -> None:
    check(Case("patchwork", kind, ONE, depth=1), tmp_path, backward=fixed_order)


@pytest.mark.parametrize("depth", [0, 2])
def test_two_forwards_before_one_backward(depth: int, tmp_path: Path) -> None:
    check(Case("llama", "host", ONE, depth=depth), tmp_path, backward=two_forwards)


class InterruptedForwardError(Exception):
    pass


def interrupted(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Run a forward that ends in the middle, and one without a backward, before the one that counts."""

    def fail(*_: Any) -> None:
        raise InterruptedForwardError

    hook = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(InterruptedForwardError):
        zoo.loss(model, batch)
    hook.remove()
    zoo.loss(model, batch)
    return plain_backward(model, batch, micro_batches)


def walked_twice(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Evaluate between forward and backward, and walk one graph twice."""
    loss = zoo.loss(model, batch) / micro_batches
    with torch.no_grad():
        zoo.loss(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


class Disturbed:
    """An ordinary loop except for one step."""

    def __init__(self, step: int, disturbance: Backward) -> None:
        self.step, self.disturbance = step, disturbance
        self.num_calls: Counter[int] = Counter()

    def __call__(self, model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
        self.num_calls[id(model)] += 1
        is_now = self.num_calls[id(model)] == self.step
        return (self.disturbance if is_now else plain_backward)(model, batch, micro_batches)


@pytest.mark.parametrize("disturbance", [interrupted, walked_twice])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_disturbed_step_is_right_and_forgotten_after_the_next(
    kind: str, disturbance: Backward, tmp_path: Path
) -> None:
    case = Case("llama", kind, Setting(steps=6), policy="keep" if kind == "host" else "recompute", depth=1)
    check(case, tmp_path, backward=Disturbed(3, disturbance))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_evaluation_without_steps_is_fetched_ahead(is_frozen: bool, tmp_path: Path) -> None:
    case, watch = Case("llama", "host", depth=1), Watch()
    model, batch = zoo.make("llama").requires_grad_(not is_frozen).eval(), zoo.batches("llama")[0]
    watch.prepare(model, None, plan=case.plan(model, None), **case.options(tmp_path))
    try:
        for _ in range(3):
            del watch.steps[-1][:]
            with torch.no_grad():
                zoo.loss(model, batch)
    finally:
        outcore.close(model)
    names = [name for _, name, _ in watch.steps[-1]]
    units = [name.removeprefix("use weights of ") for name in names if name.startswith("use weights of")]
    assert len(units) == 4
    for before, unit in itertools.pairwise(units):  # at the latest while the previous unit computes
        assert f"fetch {unit}" not in names or names.index(f"fetch {unit}") < names.index(f"use weights of {before}")
    assert sum(name.startswith("fetch") for name in names) == len(units)


class Outer(nn.Module):
    """Calls a unit inside of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)
        forward = self.a.forward
        self.a.forward = lambda x: forward(self.b(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.c(self.a(x)))


def test_a_unit_that_is_in_use_keeps_its_slot() -> None:
    torch.manual_seed(0)
    plain, batch, watch = Outer().requires_grad_(False).to(zoo.DEVICE), torch.randn(7, 5).to(zoo.DEVICE), Watch()
    expected, model = plain(batch), Outer()
    model.load_state_dict(plain.state_dict())
    spec = partition(model, units=["a", "b", "c"]).spec
    units = tuple(
        UnitPlan(name=u.name, weights="host" if u.name else "device", gradients="host", states="host")
        for u in spec.units
    )
    pools = pools_for(spec, units, Comfort(prefetch_depth=1, num_buckets=1, max_slots_host=1))
    plan = Plan(precision="fp32", units=units, pools=pools, prefetch_depth=0)
    watch.prepare(model, None, plan=plan, units=["a", "b", "c"])
    try:
        with torch.no_grad():  # b comes while a is bound, and a is needed last
            assert all(torch.equal(model(batch), expected) for _ in range(4))
    finally:
        outcore.close(model)


def check(case: Case, folder: Path, **more: Any) -> None:
    watch = Watch()
    record = run(case, folder, prepare=watch.prepare, **more)
    assert_equal(plain_loop(case.name, case.setting, **more), record)
    *_, visits = watch.visits
    assert watch.visits[-2] == visits
    lanes = (COMPUTE, *(lane.value for lane in Lane))
    submitted = {lane: on(watch.steps[-2], lane) for lane in lanes}
    expected = [{lane: as_submitted(step, lane) for lane in lanes} for step in watch.schedules(visits)]
    if submitted not in expected:  # steps take turns where slots keep states
        assert submitted == expected[-1]


def on(log: Log, lane: str) -> list[tuple[str, int]]:
    """Return the operations of a lane that a schedule knows; those of compute without bytes."""
    if lane != COMPUTE:  # the clip factor is copied from an accelerator
        return [(name, nbytes) for of, name, nbytes in log if of == lane and name != "clip factor"]
    known = ("use weights", "gradients of", "accumulate", "update")
    return [(name, 0) for of, name, _ in log if of == lane and name.startswith(known)]


def as_submitted(expected: Schedule, lane: str) -> list[tuple[str, int]]:
    """Return the operations of a lane in a schedule, with the runtime's names."""
    ops = [op for op in expected.operations if op.lane == lane]
    names = [f"use weights of {op.unit or 'root'}" if op.kind in PHASES else op.name for op in ops]
    return [(name, 0 if lane == COMPUTE else op.nbytes) for name, op in zip(names, ops, strict=True)]
