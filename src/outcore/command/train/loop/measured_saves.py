"""What saving costs: how long the next save takes, when it is due, and how often saving is worth it."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median
from typing import final

_LATEST, _MANY = 5, 100  # steps and saves of which the slowest counts; steps of which the median counts
_WORTH = 0.05  # the share of time that saving may take before another interval is proposed
_SAMPLE_BYTES = 2**24


@final
class SaveDurations:
    """The saves of a run, measured as they come."""

    def __init__(self, *, every_minutes: float | None, first_s: Callable[[], float]) -> None:
        """Measure nothing yet.

        Args:
            every_minutes: Time between two saves, besides those that the Trainer makes; None: no others.
            first_s: Returns how long a save takes at least; called if that is asked before one was made.
        """
        self._every_s = math.inf if every_minutes is None else 60 * every_minutes
        self._first_s = first_s
        self._begun_s = self._last_s = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=_LATEST)
        self._saves_s: deque[float] = deque(maxlen=_LATEST)
        self._plain_s: deque[float] = deque(maxlen=_MANY)
        """Seconds of steps in which nothing was saved."""
        self._step_begun_s: float | None = None
        self._save_begun_s: float | None = None
        """When the step and the save under way began; None: there is none."""
        self._saving, self._ended = -1, 0
        """The step that is being saved, and the last one that is over."""
        self._is_over = False
        self._num, self._lost_s = 0, 0.0
        self.step: int | None = None
        """The step that was saved last."""

    def begin(self) -> None:
        """Note that training begins."""
        self._is_over, self._begun_s = False, time.monotonic()
        self._last_s = self._begun_s

    def end(self) -> None:
        """Note that all steps are made."""
        self._is_over = True

    def begin_step(self) -> None:
        """Note that an optimizer step begins."""
        self._step_begun_s = time.monotonic()

    def end_step(self, step: int) -> None:
        """Note that a step is over, with its update."""
        if self._step_begun_s is not None:
            took_s = time.monotonic() - self._step_begun_s
            self._steps_s.append(took_s)
            if self._save_begun_s is None:
                self._plain_s.append(took_s)
            elif self._plain_s:
                self._lost_s += took_s - median(self._plain_s)
        self._step_begun_s, self._ended = None, step

    def begin_save(self, step: int) -> None:
        """Note that the save of a finished step begins."""
        self._save_begun_s, self._saving = time.monotonic(), step

    def end_save(self, *, busy_s: float, held_s: float) -> None:
        """Note that a save is durable. Args: busy_s: What writing took. held_s: Of that, how long training waited."""
        self._save_begun_s, self._last_s, self.step = None, time.monotonic(), self._saving
        self._saves_s.append(busy_s)
        self._num, self._lost_s = self._num + 1, self._lost_s + held_s

    @property
    def is_timed(self) -> bool:
        """Whether saves come due by time."""
        return self._every_s < math.inf

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether a save by time is due after this step. After the last one it is, as it is for the Trainer."""
        is_time = self._save_begun_s is None and time.monotonic() - self._last_s >= self._every_s
        return self.is_timed and (is_last or is_time)

    def needs_s(self) -> float:
        """Return the seconds until what is under way is saved; 0 if that is unknown, or if all is saved."""
        if self._is_over:
            return 0.0
        step_s = None if self._step_begun_s is None else _left_s(self._steps_s, self._step_begun_s)
        save_s = 0.0 if self._save_begun_s is None else _left_s(self._saves_s, self._save_begun_s)
        if step_s is None and self._ended in (self.step, self._saving):
            return save_s
        return max(save_s, step_s or 0.0) + self.save_needs_s()

    def save_needs_s(self) -> float:
        """Return the seconds of a whole save."""
        return max(self._saves_s) if self._saves_s else self._first_s()

    def summary(self) -> dict[str, str]:
        """Return what saving cost: name -> text. Empty if nothing was saved."""
        if not self._num:
            return {}
        lost_s = max(0.0, self._lost_s)
        share = lost_s / (time.monotonic() - self._begun_s)
        files = f"{self._num} checkpoint{'s' if self._num > 1 else ''}"
        said = f"{files}, for which training waited {lost_s:.3g} s, {share:.1%} of the time"
        if share > _WORTH:
            minutes = lost_s / self._num * (1 / _WORTH - 1) / 60
            said += f"; --save-every-minutes {math.ceil(10 * minutes) / 10:g} would make it {_WORTH:.0%}"
        return {"saving": said}


def _left_s(measured_s: Collection[float], begun_s: float) -> float:
    """Return the seconds left of something that takes as long as the slowest one did."""
    return max(0.0, max(measured_s, default=0.0) - (time.monotonic() - begun_s))


def seconds_to_write(folder: Path, nbytes: int) -> float:
    """Return the least seconds that writing so much takes there, from a sample; 0 if that cannot be written."""
    sample = bytes(min(nbytes, _SAMPLE_BYTES))
    begun_s = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(sample)
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return (time.monotonic() - begun_s) * nbytes / max(1, len(sample))
