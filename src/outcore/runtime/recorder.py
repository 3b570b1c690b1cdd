"""The recorder: measures when every operation began and ended, and what compute waited for. Off unless asked for.

Operations on the host are timed by the host's clock around their work. Work of a device is timed by events beside it
on its stream, which are turned into seconds later, when they are over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, cast, final

import torch
from torch import nn

from outcore.core.errors import UnsupportedError
from outcore.runtime.structure import take_apart
from outcore.spec.timeline import COMPUTE, Span, Timeline

MAX_SPANS = 2**16  # some 20 MB; 40 steps of 100 units
_autograd = cast("Any", torch._C)


class Moment(Protocol):
    """A point on a device's stream that is timed."""

    def is_over(self) -> bool:
        """Whether the device got there."""

    def seconds(self) -> float:
        """When, on the host's clock. Blocks until it is over."""


class Stopwatch(Protocol):
    """What time it is for the work that the calling thread gives to a device."""

    def start(self) -> None:
        """A recording begins."""

    def tick(self) -> None:
        """A step begins."""

    def now(self) -> float | Moment:
        """The moment that the calling thread, or its current stream, has come to."""


@final
class HostStopwatch:
    """Work is done when the calling thread comes back from it."""

    def start(self) -> None:
        """Nothing to set up."""

    def tick(self) -> None:
        """Nothing drifts."""

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()


class _Entry(NamedTuple):
    lane: str
    name: str
    start: float | Moment
    end: float | Moment
    nbytes: int


class _Log:
    """Entries as they come, from any thread; once over, as spans."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque(maxlen=MAX_SPANS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)  # of the thread that settles alone

    def add(self, entry: _Entry) -> None:
        self._entries.append(entry)

    def settle(self, oldest_s: float) -> None:
        """Turn what is over into spans, from the oldest on, and forget those that ended before ``oldest_s``."""
        for _ in range(len(self._entries)):
            if not _is_over(self._entries[0].end):
                break
            self._spans.append(_span(self._entries.popleft()))
        while self._spans and self._spans[0].end_s < oldest_s:
            self._spans.popleft()

    def spans(self) -> tuple[Span, ...]:
        """In the order of their starts, those around others first."""
        found = [*self._spans, *map(_span, tuple(self._entries))]
        return tuple(sorted(found, key=lambda span: (span.start_s, -span.end_s)))


@final
class Recorder:
    """Keeps what happened in the last steps. Entries may be added from any thread.

    Memory: host, a few hundred bytes per operation of the last steps, 2**16 operations at most.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        """Be off."""
        self.is_on = False
        self._stopwatch = stopwatch
        self._spans, self._waits = _Log(), _Log()
        self._steps: deque[float] = deque()
        self._num_steps = 0

    def start(self, *, num_steps: int) -> None:
        """Forget everything and begin to record.

        Args:
            num_steps: Older steps are forgotten while new ones come.
        """
        self._spans, self._waits = _Log(), _Log()
        self._steps.clear()
        self._num_steps = num_steps
        self._stopwatch.start()
        self.is_on = True

    def stop(self) -> None:
        """Record no more; what there is stays."""
        self.is_on = False

    def now(self) -> float | Moment:
        """The moment that compute, or the calling lane, has come to."""
        return self._stopwatch.now()

    def add(self, lane: str, name: str, start: float | Moment, end: float | Moment, nbytes: int = 0) -> None:
        """Something ran on a lane, or on compute."""
        if self.is_on:
            self._spans.add(_Entry(lane, name, start, end, nbytes))

    def add_wait(self, lane: str, name: str, start: float | Moment, end: float | Moment) -> None:
        """Compute waited for an operation."""
        if self.is_on:
            self._waits.add(_Entry(lane, name, start, end, 0))

    @contextmanager
    def compute(self, name: str) -> Iterator[None]:
        """Time what compute is given inside."""
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
        """Around ``step()``: with it one step ends and the next one begins."""
        if not self.is_on:
            yield
            return
        self._stopwatch.tick()
        self._steps.append(time.perf_counter())
        oldest_s = 0.0
        if len(self._steps) > self._num_steps:
            oldest_s = self._steps.popleft()
        for log in (self._spans, self._waits):
            log.settle(oldest_s)
        with self.compute("step"):
            yield

    def timeline(self) -> Timeline:
        """What was recorded. Blocks until recorded work of the device is over."""
        return Timeline(self._spans.spans(), self._waits.spans())


@contextmanager
def recording(model: nn.Module, recorder: Recorder, *, num_steps: int) -> Iterator[Recorder]:
    """Record while the block runs: what the device does for ``model``, and the model's own forward and backward.

    Args:
        model: Not all of it lies in units.
        recorder: Of its device.
        num_steps: See ``Recorder.start``.
    """
    began: list[float | Moment] = []
    timer = _BackwardTimer(recorder)

    def enter(*_: object) -> None:
        began.append(recorder.now())

    def leave(_: nn.Module, __: object, result: object) -> None:
        if began:  # else it began before the recording
            recorder.add(COMPUTE, "forward", began.pop(), recorder.now())
        with suppress(UnsupportedError):  # then its backward is timed by units alone
            for tensor in take_apart(result, "the model")[0]:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(timer.begin)

    recorder.start(num_steps=num_steps)
    with ExitStack() as undo:
        undo.callback(recorder.stop)
        undo.callback(model.register_forward_pre_hook(enter).remove)
        undo.callback(model.register_forward_hook(leave).remove)
        yield recorder


class _BackwardTimer:
    """Times a backward from the first of the model's results to its end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._task = -1

    def begin(self, *_: object) -> None:
        """Autograd has come to a result of the model."""
        task, start = _autograd._current_graph_task_id(), self._recorder.now()
        if self._recorder.is_on and task != self._task:
            self._task = task
            cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(partial(self._end, start))

    def _end(self, start: float | Moment) -> None:
        self._recorder.add(COMPUTE, "backward", start, self._recorder.now())


def _span(entry: _Entry) -> Span:
    return Span(entry.lane, entry.name, _seconds(entry.start), _seconds(entry.end), entry.nbytes)


def _seconds(moment: float | Moment) -> float:
    return moment if isinstance(moment, float) else moment.seconds()


def _is_over(moment: float | Moment) -> bool:
    return isinstance(moment, float) or moment.is_over()
