"""The recorder: always the seconds that compute waited; on request, the start and end of every operation.

Operations on the host are timed by the host's clock around their work. Work of a device, and waits of its compute, are
timed by events on the stream. Events become seconds later, when they are over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Self, final

from outcore.spec.timeline import COMPUTE, LANES, Span, Timeline

MAX_SPANS = 2**16  # some 20 MB; 40 steps of 100 units


class DeviceMoment(Protocol):
    """A timed point on a device's stream."""

    def is_over(self) -> bool:
        """Whether the device has reached the point."""

    def seconds(self) -> float:
        """Time of the point in seconds, on the host's clock. Blocks until the device has reached it."""

    def since(self, earlier: Self) -> float:
        """Seconds from another moment to this one. Both are over."""


class Stopwatch(Protocol):
    """The clock for work that the calling thread gives to a device."""

    def begin(self) -> None:
        """Prepare for a recording that begins now."""

    def tick(self) -> None:
        """Take note that a step begins."""

    def now(self) -> float | DeviceMoment:
        """Return the current moment of the calling thread, or of its current stream."""


@final
class HostStopwatch:
    """The host's clock: work is over when the calling thread returns from it."""

    def begin(self) -> None:
        """Nothing to set up."""

    def tick(self) -> None:
        """Nothing to do: the host's clock does not drift against itself."""

    def now(self) -> float:
        """Seconds, by ``time.perf_counter``."""
        return time.perf_counter()


class _LogEntry(NamedTuple):
    lane: str
    name: str
    start: float | DeviceMoment
    end: float | DeviceMoment
    nbytes: int


class _Log:
    """Takes entries from any thread, and turns those that are over into spans."""

    def __init__(self) -> None:
        self._entries: deque[_LogEntry] = deque(maxlen=MAX_SPANS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)  # only the thread that calls `settle` changes these

    def add(self, entry: _LogEntry) -> None:
        self._entries.append(entry)

    def settle(self, oldest_s: float) -> None:
        """Turn entries that are over into spans, oldest first, and forget spans that ended before ``oldest_s``."""
        for _ in range(len(self._entries)):
            if not _is_over(self._entries[0].end):
                break
            self._spans.append(_span(self._entries.popleft()))
        while self._spans and self._spans[0].end_s < oldest_s:
            self._spans.popleft()

    def spans(self) -> tuple[Span, ...]:
        """All spans by start; a span that encloses others comes before them."""
        found = [*self._spans, *map(_span, tuple(self._entries))]
        return tuple(sorted(found, key=lambda span: (span.start_s, -span.end_s)))


class _WaitSums:
    """Sums of seconds by name, added up once the moments are over. Only for the thread that computes."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(LANES, 0.0)
        self._unsettled: deque[tuple[str, DeviceMoment, DeviceMoment]] = deque()

    def add(self, name: str, start: float | DeviceMoment, end: float | DeviceMoment) -> None:
        if isinstance(start, float) or isinstance(end, float):
            self._seconds[name] += _seconds(end) - _seconds(start)
        else:
            self._unsettled.append((name, start, end))
            self._settle()

    def seconds(self) -> dict[str, float]:
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        while self._unsettled and self._unsettled[0][-1].is_over():
            name, start, end = self._unsettled.popleft()
            self._seconds[name] += end.since(start)


@final
class Recorder:
    """Adds up the seconds that compute waits and, while it is on, keeps the operations of the last steps.

    Any thread may add entries; only the thread that computes adds waits and phases.

    Memory: host, a few hundred bytes per operation of the last steps, 2**16 operations at most.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.is_on = False
        """Whether operations are kept."""
        self._stopwatch = stopwatch
        self._sums = _WaitSums()
        self._spans, self._waits = _Log(), _Log()
        self._steps: deque[float] = deque()
        self._num_steps = 0

    def begin(self, *, num_steps: int) -> None:
        """Forget everything and begin to record.

        Args:
            num_steps: Number of steps to keep; older ones are forgotten as new ones come.
        """
        self._spans, self._waits = _Log(), _Log()
        self._steps.clear()
        self._num_steps = num_steps
        self._stopwatch.begin()
        self.is_on = True

    def end(self) -> None:
        """End recording; recorded entries stay."""
        self.is_on = False

    def now(self) -> float | DeviceMoment:
        """Return the current moment of compute, or of the calling lane."""
        return self._stopwatch.now()

    def add(
        self, lane: str, name: str, start: float | DeviceMoment, end: float | DeviceMoment, nbytes: int = 0
    ) -> None:
        """Record an operation of a lane or of compute, if operations are kept."""
        if self.is_on:
            self._spans.add(_LogEntry(lane, name, start, end, nbytes))

    def add_wait(self, lane: str, name: str, start: float | DeviceMoment, end: float | DeviceMoment) -> None:
        """Count seconds for which compute waited for an operation."""
        self._sums.add(lane, start, end)
        if self.is_on:
            self._waits.add(_LogEntry(lane, name, start, end, 0))

    @contextmanager
    def waiting(self, lane: str, name: str) -> Iterator[None]:
        """Time the block as a wait of compute for an operation."""
        start = self._stopwatch.now()
        try:
            yield
        finally:
            self.add_wait(lane, name, start, self._stopwatch.now())

    def add_phase(self, name: str, start: float | DeviceMoment, end: float | DeviceMoment) -> None:
        """Record a phase of compute: a forward or a backward of the model, or a ``step()``."""
        self._sums.add(COMPUTE, start, end)
        self.add(COMPUTE, name, start, end)

    def exposed_s(self) -> dict[str, float]:
        """Seconds that compute has waited for each lane since the device was opened.

        Does not block: on an accelerator, the sums lack the work that it has not done yet.
        """
        return {lane: seconds for lane, seconds in self._sums.seconds().items() if lane != COMPUTE}

    def phases_s(self) -> float:
        """Seconds of all phases since the device was opened, waits included. Lags behind like ``exposed_s``."""
        return self._sums.seconds()[COMPUTE]

    @contextmanager
    def compute(self, name: str) -> Iterator[None]:
        """Time the work that compute is given inside the block, if operations are kept."""
        if not self.is_on:
            yield
            return
        start = self._stopwatch.now()
        try:
            yield
        finally:
            self.add(COMPUTE, name, start, self._stopwatch.now())

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose ``step()``, which separates one step from the next in the recording."""
        if self.is_on:
            self._forget()
        start = self._stopwatch.now()
        try:
            yield
        finally:
            self.add_phase("step", start, self._stopwatch.now())

    def _forget(self) -> None:
        self._stopwatch.tick()
        self._steps.append(time.perf_counter())
        oldest_s = 0.0
        if len(self._steps) > self._num_steps:
            oldest_s = self._steps.popleft()
        for log in (self._spans, self._waits):
            log.settle(oldest_s)

    def timeline(self) -> Timeline:
        """Return the recording. Blocks until recorded work of the device is over."""
        return Timeline(self._spans.spans(), self._waits.spans())


def _span(entry: _LogEntry) -> Span:
    return Span(entry.lane, entry.name, _seconds(entry.start), _seconds(entry.end), entry.nbytes)


def _seconds(moment: float | DeviceMoment) -> float:
    return moment if isinstance(moment, float) else moment.seconds()


def _is_over(moment: float | DeviceMoment) -> bool:
    return isinstance(moment, float) or moment.is_over()
