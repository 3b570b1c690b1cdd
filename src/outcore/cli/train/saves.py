"""What saving costs: how long the next save takes, when it is due, and how often saving is worth it."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

_LATEST = 5  # of so many steps and saves the slowest counts
_WORTH = 0.05  # of the time: what saving may take before another interval is proposed
_SAMPLE_BYTES = 2**24


@final
class Saves:
    """Of a run: measured as they come."""

    def __init__(self, *, every_minutes: float | None, first_s: Callable[[], float]) -> None:
        """Nothing is measured yet.

        Args:
            every_minutes: Time between two saves, beside those that the Trainer makes; None: no others.
            first_s: Says how long a save takes at least, when that is asked before one was made.
        """
        self._every_s = math.inf if every_minutes is None else 60 * every_minutes
        self._first_s = first_s
        self._begun_s = self._last_s = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=_LATEST)
        self._saves_s: deque[float] = deque(maxlen=_LATEST)
        self._step_begun_s: float | None = None
        self._save_begun_s: float | None = None
        """Of what is under way."""
        self._is_over = False
        self._num, self._total_s = 0, 0.0
        self.step: int | None = None
        """That was saved last."""

    def begin(self) -> None:
        """Training begins, or goes on with another plan."""
        self._is_over, self._last_s = False, time.monotonic()
        if not self._num:
            self._begun_s = self._last_s

    def end(self) -> None:
        """All steps are made."""
        self._is_over = True

    def begin_step(self) -> None:
        """Of the optimizer."""
        self._step_begun_s = time.monotonic()

    def end_step(self) -> None:
        """With its update."""
        if self._step_begun_s is not None:
            self._steps_s.append(time.monotonic() - self._step_begun_s)
        self._step_begun_s = None

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Measure a save."""
        begun_s = self._save_begun_s = time.monotonic()
        try:
            yield
        finally:
            self._save_begun_s = None
        self._last_s = time.monotonic()
        self._saves_s.append(self._last_s - begun_s)
        self._num, self._total_s, self.step = self._num + 1, self._total_s + self._saves_s[-1], step

    def is_due(self, *, is_last: bool) -> bool:
        """Whether to save behind this step. Behind the last one in any case, as the Trainer does."""
        return self._every_s < math.inf and (is_last or time.monotonic() - self._last_s >= self._every_s)

    def needs_s(self) -> float:
        """Until what is under way is saved; 0 where nobody knows."""
        if self._is_over:
            return 0.0
        if self._save_begun_s is not None:
            return _left_s(self._saves_s, self._save_begun_s)
        step_s = 0.0 if self._step_begun_s is None else _left_s(self._steps_s, self._step_begun_s)
        return step_s + self.save_needs_s()

    def save_needs_s(self) -> float:
        """Of a whole one."""
        return max(self._saves_s) if self._saves_s else self._first_s()

    def summary(self) -> dict[str, str]:
        """What it came to: name -> text. Empty if nothing was saved."""
        if not self._num:
            return {}
        share = self._total_s / (time.monotonic() - self._begun_s)
        files = f"{self._num} checkpoint{'s' if self._num > 1 else ''}"
        said = f"{files}, {self._total_s:.3g} s, {share:.1%} of the time"
        if share > _WORTH:
            minutes = self._total_s / self._num * (1 / _WORTH - 1) / 60
            said += f"; --save-every-minutes {math.ceil(10 * minutes) / 10:g} would make it {_WORTH:.0%}"
        return {"saving": said}


def _left_s(measured_s: Collection[float], begun_s: float) -> float:
    """Of something that takes as long as the slowest one did."""
    return max(0.0, max(measured_s, default=0.0) - (time.monotonic() - begun_s))


def seconds_to_write(folder: Path, nbytes: int) -> float:
    """The least that writing so much takes there, from a sample; 0 where even that cannot be written."""
    sample = bytes(min(nbytes, _SAMPLE_BYTES))
    begun_s = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(sample)
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return (time.monotonic() - begun_s) * nbytes / max(1, len(sample))
