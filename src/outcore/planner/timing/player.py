"""Plays tasks in time: each runs as early and as fast as it can. See [Note: time] in ``timing.simulate``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outcore.order.attempts import Attempt
from outcore.planner.timing.fair_shares import ONE, Fair, link_number
from outcore.planner.timing.rates import LINK_OF, Rates
from outcore.spec.timeline import COMPUTE, HOST, Span, Timeline

_ROUNDING = 1e-15


class Task(NamedTuple):
    """An operation with its duration."""

    lane: str
    name: str
    seconds: float
    """Time that it takes alone."""
    nbytes: int
    after: tuple[int, ...]
    """Indices of tasks that must be over before it begins."""


@dataclass(frozen=True)
class Played:
    """Start and end of each task, and the task that it waited for last (-1: none)."""

    tasks: list[Task]
    start: list[float]
    end: list[float]
    cause: list[int]

    def timeline(self) -> Timeline:
        """Return the spans of lanes and compute, and the waits of compute."""
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

    def busy_s(self, lanes: Collection[str], start_s: float, end_s: float) -> float:
        """Add up the seconds of all operations of some lanes in a window."""
        spans = ((self.start[i], self.end[i]) for i, task in enumerate(self.tasks) if task.lane in lanes)
        return sum(max(min(end, end_s) - max(start, start_s), 0.0) for start, end in spans)

    def binding(self, last: int, start_s: float) -> dict[str, float]:
        """Walk back from the end of a task along the tasks waited for. Returns link -> its part of the time."""
        seconds: defaultdict[str, float] = defaultdict(float)
        index, end_s = last, self.end[last]
        while index >= 0 and self.end[index] > start_s:
            link = LINK_OF.get(self.tasks[index].lane, HOST)
            seconds[link] += self.end[index] - max(self.start[index], start_s)
            index = self.cause[index]
        total_s = end_s - start_s
        return {link: s / total_s for link, s in sorted(seconds.items(), key=lambda item: -item[1]) if s}


def play(tasks: Sequence[Task], rates: Rates) -> Played:
    """Play all tasks. See [Note: time] in ``timing.simulate``.

    Cost: O(tasks): each lane runs one task at a time, so few run at once.
    """
    player = Player(list(tasks), rates)
    player.add()
    player.run()
    return player.played


class _AttemptTurns:
    """Decides whether an attempt is made, at the moment when its first task is submitted and next in its lane."""

    def __init__(self) -> None:
        self.skipped: set[int] = set()
        """Tasks of attempts that were not made."""
        self._attempts: dict[int, Attempt] = {}
        """Task -> the attempt that it belongs to."""
        self.behind: dict[int, list[int]] = {}
        """Task -> the tasks of attempts that wait for it. Their turn may come when it is over."""
        self._num_before: dict[int, int] = {}
        """Task of an attempt -> how many tasks are still to end before its turn comes."""
        self.come: list[int] = []
        """Tasks whose turn has come."""

    def add(self, index: int, attempt: Attempt, before: set[int]) -> None:
        """Add a task of an attempt. Args: before: Tasks that must be over before its turn comes."""
        self._attempts[index], self._num_before[index] = attempt, len(before)
        for other in before:
            self.behind.setdefault(other, []).append(index)
        self.come += [] if before else [index]

    def over(self, index: int) -> None:
        """Note that a task is over."""
        for other in self.behind.pop(index, ()):
            self._num_before[other] -= 1
            self.come += [] if self._num_before[other] else [other]

    def take(self) -> Iterable[int]:
        """Decide about the tasks whose turn has come. Returns those that are skipped."""
        found = [index for index in self.come if not self._attempts[index].is_due()]
        self.skipped.update(found)
        self.come.clear()
        return found


class Player:
    """Plays tasks. The list may grow after some have run."""

    def __init__(self, tasks: list[Task], rates: Rates) -> None:
        self.played = Played(tasks, [], [], [])
        self.turns = _AttemptTurns()
        self._waiting: list[int] = []
        """Number of unfinished tasks that each task waits for."""
        self._successors: list[list[int]] = []
        """Tasks that wait for each task."""
        self._last_of: dict[str, int] = {}
        """Lane -> its last task."""
        self._ready: list[int] = []
        self._left: list[float] = []
        """Seconds of each task at full speed: all, or what was left when it last stood still."""
        self._links: list[int] = []
        """Number of each task: see ``link_number``."""
        self._running: dict[int, float] = {}
        """Task -> when it will be over at the current speeds."""
        self._begun: list[int] = []
        """Tasks that begin now and take time."""
        if Fair not in rates.known:
            rates.known[Fair] = Fair(rates)
        self._fair, self._counts = rates.known[Fair], 0
        self._speeds = self._fair[0]
        self._now, self._latest = 0.0, -1

    def is_over(self, index: int) -> bool:
        """Whether a task is over."""
        return self.played.end[index] >= 0

    def add(self) -> None:
        """Take in the tasks by which the list has grown."""
        played, last_of, successors, begin = self.played, self._last_of, self._successors, len(self._waiting)
        new, end = played.tasks[begin:], played.end
        played.start.extend([0.0] * len(new))
        end += [-1.0] * len(new)
        played.cause.extend([self._latest] * len(new))
        self._left += [task.seconds for task in new]
        self._links += [link_number(task.lane) for task in new]
        successors += [[] for _ in new]
        for i, (lane, _, _, _, after) in enumerate(new, start=begin):
            waits, before = 0, last_of.get(lane, -1)
            last_of[lane] = i
            for other in after if before < 0 else (*after, before):
                if end[other] < 0:
                    successors[other].append(i)
                    waits += 1
            self._waiting.append(waits)
            if not waits:
                self._ready.append(i)

    def decide(self, index: int, attempt: Attempt, submitted: Iterable[int]) -> None:
        """Let an attempt decide about a new task. Args: submitted: What the host did before submitting it."""
        tasks, end = self.played.tasks, self.played.end
        before = next((i for i in range(index - 1, -1, -1) if tasks[i].lane == tasks[index].lane), None)
        first = (*submitted, *([] if before is None else [before]))
        self.turns.add(index, attempt, {i for i in first if end[i] < 0})

    def run(self, until: int | None = None) -> None:
        """Play until a task is over; None: until all are."""
        end, cause, waiting, successors = self.played.end, self.played.cause, self._waiting, self._successors
        ready, turns = self._ready, self.turns
        while (ready or self._begun or self._running) and (until is None or end[until] < 0):
            if turns.come:
                self._skip()
            over = self._begin() or self._go_on()
            for index in over:
                end[index] = self._now
                for other in successors[index]:
                    waiting[other] -= 1
                    if not waiting[other]:
                        cause[other] = index
                        ready.append(other)
                if turns.behind:
                    turns.over(index)
            self._latest = over[-1]

    def _begin(self) -> list[int]:
        """Begin the tasks that are ready. Returns those that are over at once, since they take no time."""
        ready, start, left, over = self._ready, self.played.start, self._left, []
        while ready:
            index = ready.pop()
            start[index] = self._now
            if left[index]:
                self._begun.append(index)
                self._counts += ONE[self._links[index]]
            else:
                over.append(index)
        return over

    def _go_on(self) -> list[int]:
        """Go on until the next tasks are over. Returns them."""
        running, links, now = self._running, self._links, self._now
        before = self._speeds
        self._speeds = speeds = self._fair[self._counts]
        if speeds is not before:
            for index, at in running.items():
                old, new = before[links[index]], speeds[links[index]]
                if old and new:
                    running[index] = now + (at - now) * old / new
                    continue
                if old:  # it stands still from now on
                    self._left[index] = (at - now) * old
                running[index] = now + self._left[index] / new if new else math.inf
        for index in self._begun:
            speed = speeds[links[index]]
            running[index] = now + self._left[index] / speed if speed else math.inf
        self._begun.clear()
        self._now = now = min(running.values())
        enough = now * (1 + _ROUNDING)
        over = [index for index, at in running.items() if at <= enough]
        for index in over:
            del running[index]
            self._counts -= ONE[links[index]]
        return over

    def _skip(self) -> None:
        """Skip tasks that are not made: they take no time and wait for nothing more."""
        tasks = self.played.tasks
        for index in self.turns.take():
            tasks[index], self._left[index] = tasks[index]._replace(seconds=0.0, nbytes=0), 0.0
            if self._waiting[index] > 0:
                self._waiting[index] = -1  # never 0 again
                self.played.cause[index] = self._latest
                self._ready.append(index)
