"""How long steps of a plan would take on a machine: the schedule is played in time. No device, no disk, no clock.

[Note: time] Every lane is a queue. An operation begins when the previous one in its lane is over, all operations that
it comes after are over, and it has been submitted. The host submits in the order of the schedule. It blocks where the
schedule says so and, on a machine without an accelerator, while it computes. Which updates are made inside backward is
only known once backward has been played to its end. So steps with such updates are laid out while they are played.

[Note: issuing] An accelerator waits for its own operations, but not for the host's. So a copy is issued only when all
work of the host that it comes after is over, such as an update or a read from disk. States on their way to an update on
the device are issued only when those before them have arrived. Before the host gives compute an operation, it waits
until the copies before that operation are issued. Meanwhile it launches nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from outcore.order.attempts import Attempt
from outcore.order.weight_cache import nothing_held
from outcore.planner.paper.paper_schedule import Circumstances, consecutive
from outcore.planner.timing.player import Played, Player, Task, play
from outcore.planner.timing.rates import OperationTimes, Rates
from outcore.spec.lane_names import COPY_LANES, Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Operation, Phase, Schedule, Visit
from outcore.spec.timeline import COMPUTE, HOST, WRITES_TO_DISK, Timeline

WARM_UP, MEASURED = 2, 2
"""Steps before those that count, and steps that count. The contents of slots may alternate between two steps."""
_PERIODS, _MOST_MEASURED = (1, 2, 3, 4), 12
"""Periods, in steps, with which the choice of updates inside backward may repeat; and steps that count if none fits."""
_EQUAL, _AGREE = 1e-6, 4
"""Relative tolerance within which two steps are equal, and how many equal steps in a row show that steps repeat."""
_VISITS = {phase.value for phase in Phase}
_USE_ACTIVATIONS = "use activations of"
_COPY_LANES = {lane.value for lane in COPY_LANES}
_STATES_H2D, _GATHER = Lane.STATES_H2D.value, Lane.GATHER.value


@dataclass(frozen=True)
class Simulation:
    """Steps as they would run once they have settled."""

    step_s: float
    """Seconds from one step to the next."""
    written_s: float
    """Seconds of writing to disk in a step."""
    binding: Mapping[str, float]
    """Link -> its part of the critical chain of operations, which makes up the step's time. The parts add up to 1."""
    num_steps: int
    """Number of steps that count."""
    again: Callable[[], PlayedSteps] = field(repr=False, compare=False)
    """Plays the steps, without the micro-batches that ``simulation_of`` adds."""

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the steps that count. They are played again for it, since it is needed for few plans."""
        steps = self.again()
        return steps.played.timeline().between(steps.start_s, steps.end_s)


def simulate(
    model: ModelSpec,
    plan: Plan,
    rates: Rates,
    visits: Sequence[Visit],
    circumstances: Circumstances | None = None,
    *,
    warm_up: int = WARM_UP,
) -> Simulation:
    """Play some consecutive steps.

    Args:
        model: Units in the plan's order.
        plan: Checked against the model.
        rates: Rates of the machine with this model.
        visits: The visits of each step.
        circumstances: None: the defaults.
        warm_up: Steps before those that count; at least one.

    Cost: with 100 units and one micro-batch, 0.04 s for the schedule and 0.05 s for playing it.
    """
    given = (model, plan, rates, visits, circumstances)
    return simulation_of(partial(play_steps, *given, warm_up=warm_up, says_where=False))


def simulation_of(again: Callable[[], PlayedSteps], *, repeats: int = 0) -> Simulation:
    """Summarise steps.

    Args:
        again: Plays them; may be called a second time for the timeline.
        repeats: Micro-batches that each step has in addition. Each is taken to be like the time between the last two
            forwards of the root. The timeline does not show them.
    """
    steps = again()
    played, stretches = steps.played, [(steps.start_s, steps.laid.ends[-1], 1)]
    if repeats:
        stretches += [(played.end[before], last, repeats) for before, last in steps.last_forwards()]
    lasted_s = [times * (played.end[last] - start_s) for start_s, last, times in stretches]
    whole_s, binding = sum(lasted_s), defaultdict[str, float](float)
    for (start_s, last, _), seconds in zip(stretches, lasted_s, strict=True):
        for link, part in played.binding(last, start_s).items():
            binding[link] += part * (seconds / whole_s)
    written_s = [times * played.busy_s(WRITES_TO_DISK, start_s, played.end[last]) for start_s, last, times in stretches]
    return Simulation(
        step_s=whole_s / steps.num_steps,
        written_s=sum(written_s) / steps.num_steps,
        binding=dict(sorted(binding.items(), key=lambda item: -item[1])),
        num_steps=steps.num_steps,
        again=again,
    )


def steps_until_settled(plan: Plan) -> int:
    """Return the number of steps before those that count. Args: plan: As it runs.

    Writes to disk may lag behind, and states that the device has updated go home during the next steps.
    """
    uses_disk = any("disk" in (unit.weights, unit.gradients, unit.states, unit.activations) for unit in plan.units)
    returns_states = any(unit.update == "device" and unit.states != "device" for unit in plan.units)
    return 4 if uses_disk else 3 if returns_states else 1


class Laid(NamedTuple):
    """Steps as tasks."""

    tasks: list[Task]
    ends: list[int]
    """The index of each step's last task on compute."""
    places: list[int]
    """The index of each operation's task."""


class PlayedSteps(NamedTuple):
    """All steps from the first one on; start and end of those that count."""

    operations: Sequence[Operation]
    laid: Laid
    played: Played
    start_s: float
    end_s: float
    num_steps: int
    """Number of steps that count."""

    def last_forwards(self) -> Iterator[tuple[int, int]]:
        """Yield the tasks of the root's last two forwards of each step that counts."""
        pairs = zip(self.operations, self.laid.places, strict=True)
        forwards = [place for op, place in pairs if op.kind == Phase.FORWARD.value and not op.unit]
        for i in range(self.num_steps):
            last = len(forwards) - 1 - i * (len(forwards) // len(self.laid.ends))
            yield forwards[last - 1], forwards[last]


def play_steps(
    model: ModelSpec,
    plan: Plan,
    rates: Rates,
    visits: Sequence[Visit],
    circumstances: Circumstances | None = None,
    *,
    warm_up: int = WARM_UP,
    says_where: bool = True,
) -> PlayedSteps:
    """Play steps as ``simulate`` does, and return all operations. Args: says_where: Note what they read and write."""
    circumstances = circumstances or Circumstances()
    given = (model, plan, visits, nothing_held(plan), circumstances)
    pace, num_steps = OperationTimes(model, plan, rates, clips=circumstances.clips), MEASURED
    if circumstances.overtaken is None and any(unit.early for unit in plan.units):
        clock = PlayedClock(pace, rates)
        num_steps = clock.settle(consecutive(*given, clock, says_where=says_where), warm_up)
        operations, laid, played = clock.played()
    else:
        steps = _repeated(step.operations for step in consecutive(*given, says_where=says_where))
        rows = list(itertools.islice(steps, warm_up + num_steps))
        operations, laid = [op for row in rows for op in row], tasks_of(rows, pace, rates)
        played = play(laid.tasks, rates)
    start_s, end_s = played.end[laid.ends[-1 - num_steps]], played.end[laid.ends[-1]]
    return PlayedSteps(operations, laid, played, start_s, end_s, num_steps)


def _repeated(rows: Iterable[Sequence[Operation]]) -> Iterator[Sequence[Operation]]:
    """Yield rows without end. Once steps repeat, alone or as an alternating pair, no more are laid out.

    What a step leaves behind follows from its operations and their order. So an equal row is followed by what followed
    it the first time. Slots may go on changing places among themselves, but this does not change what follows.
    """
    seen: list[Sequence[Operation]] = []
    orders: list[Sequence[tuple[object, ...]]] = []
    for row in rows:
        yield row
        seen.append(row)
        orders.append([op[:4] for op in row])  # all but dependencies and slots
        for period in (1, 2):
            if orders[-1] in orders[-1 - period : -period]:
                again = seen[-period:]
                yield from itertools.cycle(map(_within_two, again, [again[-1], *again]))


def _within_two(row: Sequence[Operation], before: Sequence[Operation]) -> Sequence[Operation]:
    """Drop dependencies on operations before the previous step: those are over."""
    oldest = -len(before)
    is_older = any([op.after and op.after[0] < oldest for op in row])
    return [op._replace(after=tuple([i for i in op.after if i >= oldest])) for op in row] if is_older else row


class _OperationKind(NamedTuple):
    """The properties of an operation that are the same every time it is laid out."""

    name: str
    seconds: float
    is_on_host: bool
    """Whether the host does it, and not the accelerator."""
    submit_s: float
    """Seconds that the host takes to submit it: those of a visit where the host runs ahead of compute, else none."""
    launch_s: float
    uses_activations: bool


class _Laying:
    """Lays operations out as tasks with durations, each after what the host does before it submits the operation."""

    def __init__(self, pace: OperationTimes, rates: Rates) -> None:
        self._pace, self._rates = pace, rates
        self.laid = Laid([], [], [])
        self.submitted: list[tuple[int, ...]] = []
        """For each task, what the host did or waited for last before it submitted it."""
        self._begin, self._end, self._launch = 0, -1, -1
        self._did: tuple[int, ...] = ()
        self._before_issue: dict[int, tuple[int, ...]] = {}
        """Task -> what must be over before the task is issued; for work of the host, the task itself."""
        self._last: dict[str, int] = {}
        """Lane of copies -> its last task."""
        self._known: dict[tuple[object, ...], _OperationKind] = {}

    def add(self, operations: Iterable[Operation]) -> None:
        """Lay out more operations of a step."""
        runs_ahead, (tasks, _, places) = self._rates.host_runs_ahead, self.laid
        begin, end, did, submitted, known = self._begin, self._end, self._did, self.submitted, self._known
        for lane, kind, unit, moved, comes_after, *_ in operations:
            what = lane, kind, unit, moved
            if what not in known:
                known[what] = self._part(Operation(*what, ()))
            name, seconds, is_on_host, submit_s, launch_s, uses_activations = known[what]
            after = tuple([places[begin + i] for i in comes_after if begin + i >= 0])
            if runs_ahead and lane == COMPUTE and (awaited := self._awaited(after)):
                did = self._latest((*did, *awaited))
            if submit_s:
                submitted.append(did)
                tasks.append(Task(HOST, f"submit {name}", submit_s, 0, did))
                did = (len(tasks) - 1,)
            if uses_activations:
                name, seconds, launch_s = self._postponed(end)
            place = len(tasks)
            submitted.append(did)
            tasks.append(Task(lane, name, seconds, moved, after + did))
            places.append(place)
            if lane == COMPUTE:
                end = place
            elif runs_ahead and lane != HOST:
                self._issue(lane, place, after, is_on_host=is_on_host)
            if lane == HOST or (lane == COMPUTE and not runs_ahead):
                did = (place,)
            if launch_s:  # launching goes on while its first kernels run
                submitted.append(did)
                tasks.append(Task(HOST, f"launch {name}", launch_s, 0, did))
                did = (place + 1,)
                self._launch = place + 1
        self._end, self._did = end, did

    def _postponed(self, begun: int) -> tuple[str, float, float]:
        """Take the time of a backward: it computes, and is launched, only when its activations are there.

        Returns:
            Its name, its seconds, and those of its launch.
        """
        tasks, launch_s = self.laid.tasks, 0.0
        if self._launch == begun + 1:
            launch_s = tasks[self._launch].seconds
            tasks[self._launch] = tasks[self._launch]._replace(seconds=0.0)
        name, seconds = tasks[begun].name, tasks[begun].seconds
        tasks[begun] = tasks[begun]._replace(seconds=0.0)
        return name, seconds, launch_s

    def _issue(self, lane: str, place: int, after: tuple[int, ...], *, is_on_host: bool) -> None:
        """Note before which work of the host a task cannot be issued."""
        if is_on_host:
            self._before_issue[place] = (place,)
            return
        last = self._last.get(lane, -1)
        awaited = self._awaited((*after, last))
        if lane == _STATES_H2D and last >= 0:  # see [Note: who has the copy engine] in device.cuda
            awaited = (*awaited, last)
        if awaited:
            self._before_issue[place] = awaited
        self._last[lane] = place

    def _awaited(self, after: Iterable[int]) -> tuple[int, ...]:
        """Return the work of the host that must be over before these tasks are issued."""
        before = self._before_issue
        found = [before[i] for i in after if i in before]
        return found[0] if len(found) == 1 else self._latest(itertools.chain.from_iterable(found)) if found else ()

    def _latest(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the last task of each lane; those before it are over with it."""
        tasks, latest = self.laid.tasks, dict[str, int]()
        for i in indices:
            lane = tasks[i].lane
            latest[lane] = max(i, latest.get(lane, -1))
        return tuple(latest.values())

    def _part(self, op: Operation) -> _OperationKind:
        pace, is_visit = self._pace, self._rates.host_runs_ahead and op.kind in _VISITS
        submit_s = pace.host_visit_s(op.unit) if is_visit else 0.0
        launch_s = pace.launch_s(op.unit, op.kind) if is_visit else 0.0
        is_on_host = op.lane not in _COPY_LANES or (op.lane == _GATHER and pace.gathers_on_host(op.unit))
        return _OperationKind(op.name, pace.seconds(op), is_on_host, submit_s, launch_s, op.kind == _USE_ACTIVATIONS)

    def end_step(self) -> None:
        """End the step: the next operations belong to another one."""
        self.laid.ends.append(self._end)
        self._begin, self._end = len(self.laid.places), -1


def _are_equal(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=_EQUAL) for one, other in zip(some, others, strict=True))


def tasks_of(steps: Iterable[Sequence[Operation]], pace: OperationTimes, rates: Rates) -> Laid:
    """Lay steps out as tasks."""
    laying = _Laying(pace, rates)
    for operations in steps:
        laying.add(operations)
        laying.end_step()
    return laying.laid


class PlayedClock:
    """Plays steps while they are laid out. See ``planner.paper.paper_port.Clock``."""

    def __init__(self, pace: OperationTimes, rates: Rates) -> None:
        self._laying = _Laying(pace, rates)
        self._player = Player(self._laying.laid.tasks, rates)
        self._operations: list[Operation] = []
        self._num_laid = 0
        """Number of operations of this step that are laid out."""

    def play(self, row: Sequence[Operation], attempts: Mapping[int, Attempt]) -> None:
        """Play until the last operation of ``row`` is over."""
        places, first = self._laying.laid.places, len(self._laying.laid.places)
        self._laying.add(row[self._num_laid :])
        self._num_laid = len(row)
        self._player.add()
        for i in range(first, len(places)):
            if i in attempts:
                self._player.decide(places[i], attempts[i], self._laying.submitted[places[i]])
        self._player.run(places[-1])

    def is_over(self, index: int) -> bool:
        """Whether an operation is over."""
        return self._player.is_over(self._laying.laid.places[index])

    def settle(self, steps: Iterable[Schedule], warm_up: int) -> int:
        """Lay out steps until they repeat, or a maximum is reached. Returns how many of the last steps count."""
        for number, step in enumerate(itertools.islice(steps, warm_up + _MOST_MEASURED), start=1):
            self.end_step(step.operations)
            took_s = self._took_s()
            for period in _PERIODS if number >= warm_up + MEASURED else ():
                if len(took_s) >= _AGREE + period and _are_equal(took_s[-_AGREE:], took_s[-_AGREE - period : -period]):
                    return max(period, MEASURED)
        return _MOST_MEASURED

    def _took_s(self) -> list[float]:
        """Return the seconds of each step but the first, and but the last, whose end is not known yet."""
        last = self._laying.laid.ends[:-1]
        if last:  # steps without attempts have not been played yet
            self._player.add()
            self._player.run(last[-1])
        ends = [self._player.played.end[i] for i in last]
        return [end - start for start, end in itertools.pairwise(ends)]

    def end_step(self, row: Sequence[Operation]) -> None:
        """Lay out the rest of a step."""
        self._laying.add(row[self._num_laid :])
        self._laying.end_step()
        self._operations += row
        self._num_laid = 0

    def played(self) -> tuple[list[Operation], Laid, Played]:
        """Return all steps. Operations that were skipped move nothing and wait for nothing."""
        self._player.add()
        self._player.run()
        laid, skipped = self._laying.laid, self._player.turns.skipped
        nothing: Mapping[str, Any] = {"nbytes": 0, "after": (), "reads": (), "writes": ()}
        pairs = zip(self._operations, laid.places, strict=True)
        operations = [op._replace(**nothing) if place in skipped else op for op, place in pairs]
        return operations, laid, self._player.played
