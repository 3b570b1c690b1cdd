"""What steps of a plan would take on a machine: its schedule, played in time. No device, no disk, no clock.

[Note: time] Every lane is a queue. An operation begins when the one before it in its lane is over, when all that it
comes after is over, and when it has been submitted. The host submits in the order of the schedule. It blocks where the
schedule says so and, on a machine without an accelerator, while it computes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outcore.planning.paper.schedule import Circumstances, consecutive
from outcore.planning.paper.weight_cache import nothing_held
from outcore.planning.timing.fair import Fair
from outcore.planning.timing.rates import LINK_OF, LINKS, Pace, Rates
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Operation, Phase, Visit
from outcore.spec.timeline import COMPUTE, HOST, Span, Timeline

WARM_UP, MEASURED = 2, 2
"""Steps before those that count, and those: what slots keep may take turns between two kinds of steps."""
_VISITS = {phase.value for phase in Phase}
_USE_ACTIVATIONS = "use activations of"
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Simulation:
    """Steps as they would run, when they have settled."""

    step_s: float
    """Seconds from one step to the next."""
    timeline: Timeline
    """The steps that count."""
    binding: Mapping[str, float]
    """Link -> its part of the chain of operations that makes a step as long as it is. The parts add up to 1."""


class Task(NamedTuple):
    """An operation with its length."""

    lane: str
    name: str
    seconds: float
    """How long it takes alone."""
    nbytes: int
    after: tuple[int, ...]
    """Indices of tasks that come first."""


def simulate(
    model: ModelSpec,
    plan: Plan,
    rates: Rates,
    visits: Sequence[Visit],
    circumstances: Circumstances | None = None,
    *,
    warm_up: int = WARM_UP,
) -> Simulation:
    """Play some steps that follow one another.

    Args:
        model: Units in the plan's order.
        plan: Checked against the model.
        rates: Of the machine, with this model.
        visits: Of each step.
        circumstances: None: as they are by default.
        warm_up: Steps before those that count; at least one.

    Cost: 100 units and one micro-batch 0.1 s for the schedule, 0.05 s for playing it.
    """
    steps = play_steps(model, plan, rates, visits, circumstances, warm_up=warm_up)
    step_s = (steps.end_s - steps.start_s) / MEASURED
    timeline = steps.played.timeline().between(steps.start_s, steps.end_s)
    return Simulation(step_s, timeline, steps.played.binding(steps.laid.ends[-1], steps.start_s))


def steps_until_settled(plan: Plan) -> int:
    """How many steps come before those that count. Args: plan: As it runs; writes to disk may lag behind for some."""
    uses_disk = any("disk" in (unit.weights, unit.gradients, unit.states, unit.activations) for unit in plan.units)
    return 4 if uses_disk else 1


class Laid(NamedTuple):
    """Steps as tasks."""

    tasks: list[Task]
    ends: list[int]
    """The index of each step's last task on compute."""
    places: list[int]
    """The index of each operation's task."""


class PlayedSteps(NamedTuple):
    """Steps from the first on, and when those that count begin and end."""

    operations: Sequence[Operation]
    laid: Laid
    played: Played
    start_s: float
    end_s: float


def play_steps(
    model: ModelSpec,
    plan: Plan,
    rates: Rates,
    visits: Sequence[Visit],
    circumstances: Circumstances | None = None,
    *,
    warm_up: int = WARM_UP,
) -> PlayedSteps:
    """Play steps, with every operation: see ``simulate``."""
    steps = consecutive(model, plan, visits, nothing_held(plan), circumstances)
    rows = list(itertools.islice(_repeated(step.operations for step in steps), warm_up + MEASURED))
    laid = tasks_of(rows, Pace(model, plan, rates), rates)
    played = play(laid.tasks, rates)
    start_s, end_s = played.end[laid.ends[-1 - MEASURED]], played.end[laid.ends[-1]]
    return PlayedSteps([op for row in rows for op in row], laid, played, start_s, end_s)


def _repeated(rows: Iterable[Sequence[Operation]]) -> Iterator[Sequence[Operation]]:
    """Rows without end, each laid out only while it brings something new: steps repeat, or two kinds take turns.

    Slots may change places among themselves without an end; what follows what repeats all the same.
    """
    seen: list[Sequence[Operation]] = []
    orders: list[Sequence[tuple[object, ...]]] = []
    for row in rows:
        yield row
        seen.append(row)
        orders.append([(op.lane, op.kind, op.unit, op.nbytes, op.after) for op in row])
        for period in (1, 2):
            if len(orders) > 2 * period - 1 and orders[-period:] == orders[-2 * period : -period]:
                yield from itertools.cycle(seen[-period:])


def tasks_of(steps: Iterable[Sequence[Operation]], pace: Pace, rates: Rates) -> Laid:
    """Give operations of steps their lengths, and let each come after what the host waits for before it submits it."""
    tasks: list[Task] = []
    ends: list[int] = []
    places: list[int] = []  # of operations
    submitted: int | None = None  # with what is submitted next
    for operations in steps:
        begin, end = len(places), -1
        for op in operations:
            is_visit = rates.host_runs_ahead and op.kind in _VISITS
            if is_visit and pace.host_visit_s:
                submitted = len(tasks)
                tasks.append(Task(HOST, f"submit {op.name}", pace.host_visit_s, 0, ()))
            after = [places[begin + i] for i in op.after if begin + i >= 0]
            after += [] if submitted is None else [submitted]
            task = Task(op.lane, op.name, pace.seconds(op), op.nbytes, tuple(after))
            if op.kind == _USE_ACTIVATIONS:  # the backward that was begun goes on when they are there
                begun = tasks[end]
                tasks[end], task = begun._replace(seconds=0.0), task._replace(name=begun.name, seconds=begun.seconds)
            place = len(tasks)
            tasks.append(task)
            places.append(place)
            if op.lane == COMPUTE:
                end = place
            if op.lane == HOST or (op.lane == COMPUTE and not rates.host_runs_ahead):
                submitted = place
            if is_visit and (launch_s := pace.launch_s(op.unit, op.kind)):  # while they run, the first of them already
                before = () if submitted is None else (submitted,)
                submitted = len(tasks)
                tasks.append(Task(HOST, f"launch {op.name}", launch_s, 0, before))
        ends.append(end)
    return Laid(tasks, ends, places)


@dataclass(frozen=True)
class Played:
    """When each task began and ended, and which one it waited for last (-1: none)."""

    tasks: Sequence[Task]
    start: Sequence[float]
    end: Sequence[float]
    cause: Sequence[int]

    def timeline(self) -> Timeline:
        """Spans of lanes and compute, and what compute waited for."""
        spans, waits, idle_from = [], [], 0.0
        for i, task in enumerate(self.tasks):
            if task.lane == HOST:
                continue
            if task.lane != COMPUTE or self.end[i] > self.start[i]:
                spans.append(Span(task.lane, task.name, self.start[i], self.end[i], task.nbytes))
            if task.lane == COMPUTE:
                if self.start[i] > idle_from:
                    waits.append(self._wait(i, idle_from))
                idle_from = self.end[i]
        return Timeline(tuple(sorted(spans, key=lambda span: (span.start_s, -span.end_s))), tuple(waits))

    def _wait(self, index: int, since_s: float) -> Span:
        cause = self.tasks[self.cause[index]]
        return Span(cause.lane, cause.name, since_s, self.start[index])

    def binding(self, last: int, start_s: float) -> dict[str, float]:
        """Walk back from the end of a task, from each to the one that it waited for: link -> part of the time."""
        seconds: defaultdict[str, float] = defaultdict(float)
        index, end_s = last, self.end[last]
        while index >= 0 and self.end[index] > start_s:
            link = LINK_OF.get(self.tasks[index].lane, HOST)
            seconds[link] += self.end[index] - max(self.start[index], start_s)
            index = self.cause[index]
        total_s = end_s - start_s
        return {link: s / total_s for link, s in sorted(seconds.items(), key=lambda item: -item[1]) if s}


def play(tasks: Sequence[Task], rates: Rates) -> Played:
    """Let every task run as soon as it may, as fast as it may. See [Note: time].

    Cost: O(tasks); a lane runs one at a time, so few run at once.
    """
    waiting, successors = _order(tasks)
    start, end, cause = [0.0] * len(tasks), [0.0] * len(tasks), [-1] * len(tasks)
    fair = Fair(rates)
    links = [LINKS.index(LINK_OF[task.lane]) if task.lane in LINK_OF else None for task in tasks]
    running: dict[int, float] = {}  # seconds left, at full speed
    counts = [0] * len(LINKS)
    ready = [i for i, number in enumerate(waiting) if not number]
    now = 0.0
    while ready or running:
        while ready:
            index = ready.pop()
            start[index] = now
            running[index] = tasks[index].seconds
            link = links[index]
            if link is not None:
                counts[link] += 1
        speeds = fair.speeds(tuple(counts))
        lasts = [left / (1.0 if (link := links[i]) is None else speeds[link]) for i, left in running.items()]
        passed = min(lasts)
        now += passed
        for (index, left), seconds in zip(list(running.items()), lasts, strict=True):
            if seconds <= passed * (1 + _ROUNDING):
                del running[index]
                end[index] = now
                link = links[index]
                if link is not None:
                    counts[link] -= 1
                for other in successors[index]:
                    waiting[other] -= 1
                    if not waiting[other]:
                        cause[other] = index
                        ready.append(other)
            else:
                running[index] = left * (1 - passed / seconds)
    return Played(tasks, start, end, cause)


def _order(tasks: Sequence[Task]) -> tuple[list[int], list[list[int]]]:
    """How many tasks each one waits for, and who waits for it."""
    waiting: list[int] = []
    successors: list[list[int]] = [[] for _ in tasks]
    last_of: dict[str, int] = {}
    for i, task in enumerate(tasks):
        first = set(task.after)
        if task.lane in last_of:
            first.add(last_of[task.lane])
        last_of[task.lane] = i
        waiting.append(len(first))
        for other in first:
            successors[other].append(i)
    return waiting, successors
