"""The engine in virtual time does what the simulation says: each operation, its order, its waits and its times.

Nothing sleeps: what the engine submits is noted, operation by operation, and played at random rates; so is the
schedule, which is made without an engine.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from plans import prepare_for_test, share_updates
from torch import nn

import outcore
from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.rows.row_independence import RowIndependence
from outcore.engine.unit.live_port import Traffic
from outcore.engine.updates.streamed import EarlyUpdates, _EarlyAttempt
from outcore.memory.arena import Region
from outcore.model import expensive_operations as dear
from outcore.model.partition import partition
from outcore.optim.rules import rule_for
from outcore.order.attempts import Attempt, Attempts
from outcore.order.weight_cache import nothing_held
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import Circumstances, consecutive
from outcore.planner.timing.player import Played, play
from outcore.planner.timing.rates import LINKS, OperationTimes, Rates, Shared
from outcore.planner.timing.simulate import PlayedClock, tasks_of
from outcore.spec.budget import can_be_early
from outcore.spec.lane_names import RANK_LANES, Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import TIERS, Plan, UnitPlan
from outcore.spec.schedule import ROOT, Kind, Operation, Visit
from outcore.spec.timeline import COMPUTE, HOST

from . import zoo

NUM_PLANS = int(os.environ.get("OUTCORE_VIRTUAL_PLANS", "26"))
"""Number of random plans. 1,000 take about ten minutes."""
STEPS = 4
WIDTH, ROWS = 6, 8
LEGAL = [(w, g, s) for w in TIERS for g in TIERS for s in TIERS if s != "device" or w == g == "device"]
USE = "use weights of"
KINDS = sorted([USE, *get_args(Kind)], key=len, reverse=True)  # longest first: "update early" begins with another kind
NONE_SKIPPED = ((),) * STEPS
ON_COMPUTE = (USE, "use activations of", "gradients of", "accumulate", "update")
"""Names of compute's operations that a schedule has."""


class Watch:
    """Notes everything that an engine submits."""

    def __init__(self, device: Any, traffic: Traffic) -> None:
        self._traffic, self._before = traffic, traffic.totals()
        self.row: list[Operation] = []
        self._index: dict[Any, int] = {}
        self._computed = -1
        self._device = device
        self._submit, self._compute, self._mark = device.submit, device.compute, device.mark
        self._wait = device.wait
        device.submit, device.compute, device.mark, device.wait = self.submit, self.compute, self.mark, self.wait

    def submit(self, lane: Lane, name: str, work: Any, *, is_due: Callable[[], bool] | None = None, **more: Any) -> Any:
        handle = self._submit(lane, name, work, is_due=is_due, **more)
        skipped = is_due is not None and not is_due()
        nbytes = 0 if skipped else _bytes(more.get("writes", ()))
        if lane in RANK_LANES:  # a rank already has a part of what it writes
            nbytes, self._before = self._traffic.since(self._before)[lane.value], self._traffic.totals()
        after = [] if skipped else self.indices(more.get("after", {}).values())
        self._index[handle] = self._note(lane.value, name, nbytes, after)
        return handle

    def compute(self, name: str, *, writes: Sequence[Region] = (), after: Any = {}, **more: Any) -> Any:  # noqa: B006
        handle = self._compute(name, writes=writes, after=after, **more)
        if name.startswith(ON_COMPUTE):
            self._computed = self._note(COMPUTE, name, _bytes(writes), self.indices(after.values()))
        self._index[handle] = self._computed
        return handle

    def mark(self, name: str) -> Any:
        handle = self._mark(name)
        self._index[handle] = self._computed
        return handle

    def wait(self, label: str, handle: Any) -> None:
        self._wait(label, handle)
        if label == "activations left":
            self._note(HOST, "wait root", 0, self.indices([handle]))

    def wait_for_backward(self) -> None:
        self._note(HOST, "wait root", 0, [self._computed])

    def _note(self, lane: str, name: str, nbytes: int, after: Iterable[int]) -> int:
        kind, unit = next((kind, name[len(kind) + 1 :]) for kind in KINDS if name.startswith(f"{kind} "))
        order = tuple(sorted(set(after)))
        unit = "" if unit == "root" else unit
        self.row.append(Operation(lane=lane, kind=kind, unit=unit, nbytes=nbytes, after=order))
        return len(self.row) - 1

    def indices(self, dependencies: Iterable[Any]) -> list[int]:
        handles = [d for value in dependencies for d in (value if isinstance(value, list | tuple) else [value])]
        return [i for handle in handles if handle is not None and (i := self._index[handle]) >= 0]


def _bytes(writes: Sequence[Region]) -> int:
    return sum(region.stop - region.start for region in writes)


class Block(nn.Module):
    """Has some parameters, trained or frozen."""

    def __init__(self, hidden: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.up.requires_grad_(not is_frozen)
        self.down.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Runs blocks in any order, some of them twice."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        sizes = [chance.choice([300, 300, 500]) for _ in range(chance.randint(2, 5))]
        self.blocks = nn.ModuleList(Block(n, is_frozen=chance.random() < 0.2) for n in sizes)
        self.blocks[-1].requires_grad_(True)  # so that something is trained
        self.head = nn.Linear(WIDTH, 3)
        self.order = list(range(len(sizes)))
        if chance.random() < 0.4:
            self.order.insert(chance.randrange(len(sizes)), chance.randrange(len(sizes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


class Echo:
    """Stands in for ranks that all do what this one does. See ``World``."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.local_size = 0, size, size
        self.num_steps, self.failure, self.facts, self.last_step = 0, None, "", ""

    @contextmanager
    def kept(self, call: str) -> Iterator[None]:
        yield

    def join_lanes(self, device: Any) -> None:
        """Do nothing."""

    def begin_step(self) -> None:
        self.num_steps += 1

    def note(self, where: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def all_of(self, value: Any) -> list[Any]:
        return [value] * self.size

    def from_first(self, value: Any) -> Any:
        return value

    def copy_first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    def exchange(self, bits: bytes, bucket: torch.Tensor, received: torch.Tensor, unit: str) -> list[bytes]:
        received.view(self.size, -1).copy_(bucket[: len(bucket) // self.size])
        return [bits] * self.size

    def gather(self, *_: Any) -> None:
        """Do nothing."""

    fill_copy = meet = say = open_groups = gather

    def all_gather(self, facts: str, unit: str, pieces: Any, num_sharers: int) -> None:
        for whole, run in pieces:
            whole.view(num_sharers, -1).copy_(run.clone())

    def gather_parts(self, mine: torch.Tensor, numels: list[int], what: str) -> torch.Tensor:
        return torch.zeros(sum(numels), dtype=mine.dtype)


@dataclass
class Program:
    """A model, a plan for it and a loop."""

    model: Model
    optimizer: torch.optim.Optimizer
    spec: ModelSpec
    plan: Plan
    micro_batches: int

    @property
    def num_ranks(self) -> int:
        return self.spec.units[0].num_ranks

    def step(self) -> None:
        rows, dtype = ROWS * self.plan.micro_batches_in_unit, self.model.head.weight.dtype
        batch = torch.ones(rows, WIDTH, dtype=dtype, device=zoo.DEVICE)
        for _ in range(self.micro_batches):
            self.model(batch).sum().backward()


def make(seed: int, num_ranks: int = 1) -> Program:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model, micro_batches = Model(chance), chance.randint(1, 2)
    precision: Any = chance.choice(["fp32", "bf16"])
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = [lambda: torch.optim.AdamW(trained), lambda: torch.optim.SGD(trained, lr=0.1)]
    optimizer = chance.choice(kinds)()
    names = rule_for(optimizer).state_names(optimizer.param_groups)
    units, pieces = [Block], chance.choice([1, 1, 2, 3]) if num_ranks == 1 else 1
    cut = partition(model, units=units, state_names=names, precision=precision, micro_batches_in_unit=pieces)
    spec = cut.spec.among(num_ranks, 0)
    plans = []
    sends_away = chance.random() < 0.5
    for of in spec.units:
        weights, gradients, states = chance.choice([h for h in LEGAL if of.name or h[0] == "device"])
        rest = (gradients, states) if of.trainable else (weights, weights)
        policy: Any = chance.choice(["recompute", "select"]) if of.name else "keep"
        homes = UnitPlan(name=of.name, weights=weights, gradients=rest[0], states=rest[1], policy=policy)
        homes = replace(homes, early=can_be_early(of, homes) and chance.random() < 0.5)
        tier = chance.choice(TIERS) if of.name and sends_away else "device"
        if tier != "device":  # the result of tanh, which two gradients need, or that of the product before it
            nbytes = align_up(ROWS * of.params[0].shape[0] * (4 if precision == "fp32" else 2), PAGE_BYTES)
            policy = chance.choice(["keep", "select"])
            homes = replace(homes, policy=policy, activations=tier, saved_bytes=nbytes)
        if num_ranks > 1 and of.name:
            ways = [("replicate", "link"), ("world", "link"), ("node", "host" if weights == "host" else "link")]
            over, gather = chance.choice(ways)
            homes = replace(homes, partition=over, gather=gather)
        plans.append(homes)
    plans = share_updates(plans, chance.choice([0.0, 0.5, 1.0]))
    comfort = Comfort(
        prefetch_depth=chance.randint(0, 3), num_buckets=chance.randint(1, 2), max_slots_host=chance.randint(1, 4)
    )
    plan = Plan(
        precision=spec.precision,
        units=tuple(plans),
        pools=pools_for(spec, plans, comfort),
        prefetch_depth=chance.randint(0, 3),
        updated_first=tuple(chance.sample([unit.name for unit in plans], chance.choice([0, 1, 3, len(plans)]))),
        kept_updated_first=chance.random() < 0.5,
        accumulation_steps=micro_batches,
        micro_batches_in_unit=pieces,
    )
    return Program(model, optimizer, spec, plan, micro_batches)


def submitted(
    program: Program,
    visits: Sequence[Visit] | None,
    folder: Path,
    skipped: Sequence[Collection[str]] = NONE_SKIPPED,
    num_over: Sequence[int] = (0,) * STEPS,
) -> tuple[list[Operation], tuple[Visit, ...]]:
    """Return what the engine submits.

    Args:
        program: The program that runs.
        visits: Visits expected of the first step; None: as usual.
        folder: Folder of the disk tier.
        skipped: By step: units whose update inside backward was started too late to be made.
        num_over: By step: how many updates inside backward are over when it ends. The next step starts as many.
    """
    with pytest.MonkeyPatch.context() as patch:
        if program.num_ranks > 1:
            patch.setattr("outcore.preparation.with_ranks.join_world", lambda device: True)
            patch.setattr("outcore.preparation.with_ranks.device_of_rank", lambda device: device)
            patch.setattr("outcore.preparation.with_ranks.World", lambda: Echo(program.num_ranks))
        prepared = prepare_for_test(
            program.model,
            program.optimizer,
            faults=Faults(),
            race_checker=RaceChecker(),
            plan=program.plan,
            units=[Block],
            budget=outcore.Budget(disk=str(folder)),
            accumulation_steps=program.micro_batches,
            clipping=False,
            precision=program.plan.precision,
            micro_batches_in_unit=program.plan.micro_batches_in_unit,
        )
    _, optimizer = prepared
    engine = optimizer.engine
    if visits is not None:
        engine.weights._step.expected = tuple(visits)
        engine.weights._step.reset(nothing_held(program.plan))
        if any(visit.unit == ROOT for visit in visits):
            engine.units[ROOT].presence.hide()  # as after a step that updates the root later
    watch, settle = Watch(engine.device, engine.opened.traffic), EarlyUpdates.settle
    done: list[None] = []  # one for each step
    steps: dict[_EarlyAttempt, int] = {}

    def is_due(attempt: _EarlyAttempt) -> bool:
        return attempt.gradients.unit.name not in skipped[steps.setdefault(attempt, len(done))]

    def settled(early: EarlyUpdates) -> None:
        if early._attempts:
            watch.wait_for_backward()
        made = [attempt for attempt in early._attempts.values() if attempt.is_due()]
        for place, attempt in enumerate(made):
            attempt.is_over = functools.partial(operator.gt, num_over[len(done)], place)
        settle(early)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyUpdates, "settle", settled)
        patch.setattr(RowIndependence, "known", property(lambda _: _Everything(), lambda *_: None), raising=False)
        patch.setattr(dear, "DEAR_FLOP_PER_BYTE", 0.0)
        patch.setattr(_EarlyAttempt, "settle", lambda attempt: attempt.is_due())
        patch.setattr(_EarlyAttempt, "is_due", is_due)
        with prepared:
            for _ in range(STEPS):
                program.step()
                optimizer.step()
                optimizer.zero_grad()
                done.append(None)
            return watch.row, engine.weights.visits


class _Everything:
    """Says that all rows are known to be apart: the trial in the first step would run more calls than later steps."""

    def __contains__(self, _: object) -> bool:
        return True


class Planned(NamedTuple):
    """The operations of a schedule, while it is played."""

    row: list[Operation]
    """All steps in one row; indices count from the first operation of the first step."""
    skipped: list[set[str]]
    num_over: list[int]
    played: Played


def planned(program: Program, visits: Sequence[Visit], rates: Rates) -> Planned:
    """Play steps in time, which decides which updates inside backward are made."""
    clock = PlayedClock(OperationTimes(program.spec, program.plan, rates), rates)
    given = (program.spec, program.plan, visits, nothing_held(program.plan), Circumstances(clips=False))
    lengths, num_over, settle = [], list[int](), Attempts.settle

    def settled(attempts: Attempts, started: Iterable[Attempt]) -> None:
        mine = list(started)
        num_over.append(sum(attempt.settle() and attempt.is_over() for attempt in mine))
        settle(attempts, mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempts, "settle", settled)
        for step in itertools.islice(consecutive(*given, clock), STEPS):
            clock.end_step(step.operations)
            lengths.append(len(step.operations))
    operations, laid, played = clock.played()
    row: list[Operation] = []
    skipped = []
    for length in lengths:
        begin = len(row)
        mine = operations[begin : begin + length]
        row += [op._replace(after=tuple(begin + i for i in op.after)) for op in mine]
        skipped.append({op.unit for op in mine if op.kind == "update early" and not op.nbytes})
    return Planned(row, skipped, num_over, played)


def with_phases(row: Sequence[Operation], visits: Sequence[Visit]) -> list[Operation]:
    """Name the phases: the engine says only that weights are used, visits say in which phase."""
    phases = itertools.cycle(visit.phase.value for visit in visits)
    return [op._replace(kind=next(phases)) if op.kind == USE else op for op in row]


def random_rates(model: ModelSpec, chance: random.Random) -> Rates:
    """Return the rates of a random machine."""

    def speed() -> float:
        return 10 ** chance.uniform(3, 6)

    parts = {link: chance.uniform(0.1, 0.9) for link in LINKS[1:6]}
    ways = {"h2d": chance.uniform(0.5, 1), "d2h": chance.uniform(0.5, 1)}
    return Rates(
        forward_s={unit.name: chance.random() for unit in model.units},
        backward_s={unit.name: chance.random() for unit in model.units},
        bytes_per_s={link: speed() for link in (*LINKS[:6], "reduce", "gather", "host gather")},
        parameters_per_s={link: speed() for link in ("compute", "update", "device_update")},
        latency_s={link: chance.choice([0.0, 0.01]) for link in LINKS},
        shared=(Shared(name="memory", parts=parts), Shared(name="bus", parts=ways))[: chance.randint(0, 2)],
        visit_s=chance.choice([0.0, 0.05]),
        resting_visit_s=chance.choice([0.0, 0.02]),
        host_runs_ahead=chance.random() < 0.5,
    )


def facts(op: Operation) -> tuple[object, ...]:
    return op.lane, op.name, op.nbytes, op.after


@pytest.mark.parametrize("seed", range(NUM_PLANS))
def test_start_end_and_order_of_every_operation(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


@pytest.mark.parametrize("seed", range(NUM_PLANS))
def test_the_same_of_one_among_ranks(seed: int, tmp_path: Path) -> None:
    """It exchanges in turns and gathers new weights: compare what is submitted, after what, and how many bytes come."""
    compare(seed, tmp_path, num_ranks=2 + seed % 2)


def compare(seed: int, folder: Path, num_ranks: int = 1) -> None:
    _, visits = submitted(make(seed, num_ranks), None, folder)
    program = make(seed, num_ranks)
    rates = random_rates(program.spec, random.Random(seed))
    expected, skipped, num_over, in_time = planned(program, visits, rates)
    found, again = submitted(program, visits, folder, skipped, num_over)
    assert again == visits
    found = with_phases(found, visits)
    for i, (want, got) in enumerate(zip(expected, found, strict=False)):
        assert facts(want) == facts(got), f"operation {i}"
    # Fetches for a next step follow the last step's updates.
    assert all(op.name.startswith(("fetch", "read weights of", "all-gather")) for op in found[len(expected) :])
    assert len(found) >= len(expected)
    pace = OperationTimes(program.spec, program.plan, rates)
    played = play(tasks_of([found[: len(expected)]], pace, rates)[0], rates)
    assert (played.start, played.end) == (in_time.start, in_time.end)
    assert [t.seconds for t in played.tasks] == [t.seconds for t in in_time.tasks]
