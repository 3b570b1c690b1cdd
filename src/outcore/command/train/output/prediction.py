"""Predicted times of steps beside measured ones: in every line, on the bar, and in one sentence at the end.

If steps are far off, the cause is said once: other programs on the machine, and the lane that differs most.
"""

from __future__ import annotations

import statistics
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, final

from outcore.core.quantities import format_bytes
from outcore.memory.machine import Others
from outcore.planner.timing.simulate import Simulation
from outcore.ranks.world import num_ranks
from outcore.spec.timeline import COMPUTE, Timeline

_WARM_UP = 2  # steps in which kernels are chosen and the order of visits is learned
_OFF, _FOR = 0.2, 20
_FAR = 1.5
"""Steps that take this many times as long as predicted are explained at the end, however few they are."""
_MORE = 1.25
"""A lane that moves this many times as much as predicted is said to."""
_COMPUTING = ("update", "device_update")
_LEAST_PART = 0.25
"""The part of a difference between steps that work on one lane must make up, to be called its cause."""


class LaneTimes(NamedTuple):
    """What lanes and compute do in a step, predicted or measured."""

    busy_s: Mapping[str, float]
    """Lane, or compute -> seconds in which it works."""
    exposed_s: Mapping[str, float]
    """Lane -> seconds that compute waits for the lane."""
    moved_bytes: Mapping[str, float]
    """Lane -> bytes."""

    @classmethod
    def of(cls, timeline: Timeline, steps: int) -> Self:
        """Return the means over the steps of a timeline."""
        columns = (timeline.busy_s(), timeline.exposed_s(), timeline.moved_bytes())
        busy_s, exposed_s, moved_bytes = ({lane: n / steps for lane, n in each.items()} for each in columns)
        exposed_s.pop(COMPUTE, None)
        return cls(busy_s, exposed_s, moved_bytes)

    def rate(self, lane: str) -> float:
        """Return bytes per second of a lane; 0 if it moves none."""
        return self.moved_bytes.get(lane, 0.0) / self.busy_s[lane] if self.busy_s.get(lane) else 0.0


class PredictedStep(NamedTuple):
    """Predicted seconds of a step."""

    step_s: float
    lanes: LaneTimes

    @classmethod
    def of(cls, simulation: Simulation) -> Self:
        """Return the mean of the simulated steps."""
        return cls(simulation.step_s, LaneTimes.of(simulation.timeline, simulation.num_steps))

    def facts(self) -> dict[str, Any]:
        """Return the prediction's part of a line of metrics."""
        return {
            "predicted_step_s": self.step_s,
            "predicted_compute_s": self.lanes.busy_s[COMPUTE],
            "predicted_exposed_s": dict(self.lanes.exposed_s),
        }


@final
class PredictionComparison:
    """Compares steps with their prediction, if there is one."""

    def __init__(self, predicted: PredictedStep | None) -> None:
        """Args: predicted: The prediction; None: there is none."""
        self._predicted = predicted
        self._first_s: list[float] = []
        """Seconds of the steps of lines that have a step of the warm-up, sorted."""
        self._took_s: list[float] = []
        """Seconds of all other steps, sorted."""
        self._off_s: list[float] = []
        """Seconds of the last steps, if these were far off."""
        self._lanes = Counter[tuple[str, str]]()
        """What lanes and compute did in all steps after the warm-up: (what, lane) -> its sum."""
        self._others = self._others_while_off = Others()
        """Others on the machine since the warm-up, and since steps are off."""
        self._is_explained = False

    def facts(self) -> dict[str, Any]:
        """Return the prediction's part of a line of metrics."""
        return {"predicted_step_s": None} if self._predicted is None else self._predicted.facts()

    def ratio(self, step_s: float) -> float | None:
        """Return a measured time over the predicted one; None without a prediction."""
        return None if self._predicted is None or not self._predicted.step_s else step_s / self._predicted.step_s

    def add(self, step_s: float, steps: int, measured: LaneTimes | None = None) -> None:
        """Count the steps of a line of metrics. Args: step_s: Their mean. measured: What is known of lanes in them."""
        ratio = self.ratio(step_s)
        if ratio is None:
            return
        has_warm_up = len(self._first_s) < _WARM_UP
        for _ in range(steps):
            insort(self._first_s if has_warm_up else self._took_s, step_s)
        if has_warm_up:
            self._others = Others()
        else:
            self._off_s = [*self._off_s, *[step_s] * steps] if abs(ratio - 1) > _OFF else []
            for what, found in (measured or LaneTimes({}, {}, {}))._asdict().items():
                self._lanes.update({(what, lane): steps * value for lane, value in found.items()})
        if not self._off_s:
            self._others_while_off = Others()

    @property
    def so_far(self) -> float | None:
        """The median of all steps but the first over the prediction, as at the end; None without a prediction."""
        return self.ratio(self._median_s) if self._took_s or self._first_s else None

    @property
    def _median_s(self) -> float:
        return statistics.median(self._took_s or self._first_s)

    @property
    def is_off(self) -> bool:
        """Whether steps have been far off for long enough, and nothing was said of it yet."""
        return len(self._off_s) >= _FOR and not self._is_explained

    def why(self, measured: LaneTimes) -> str:
        """Return a sentence on what was predicted wrongly, once ``is_off``. Args: measured: Lanes in such steps."""
        self._is_explained, median_s = True, statistics.median(self._off_s)
        return (
            f"steps take {median_s:.3g} s, {self.ratio(median_s):.2f} of what was predicted, for {len(self._off_s)} "
            f"steps: {_busy(self._others_while_off)}{self._cause(measured, median_s)}"
        )

    def closing(self) -> dict[str, str]:
        """Return one sentence for the end of a run; empty without a prediction."""
        if self._predicted is None or not (self._took_s or self._first_s):
            return {}
        median_s, ratio = self._median_s, self.so_far or 0.0
        said = f"{self._predicted.step_s:.3g} s per step; the median took {median_s:.3g} s, {ratio:.2f} of it"
        if ratio >= _FAR and not self._is_explained and self._lanes:
            steps, of = len(self._took_s), {what: dict[str, float]() for what in LaneTimes._fields}
            for (what, lane), value in self._lanes.items():
                of[what][lane] = value / steps
            said += f": {_busy(self._others)}{self._cause(LaneTimes(**of), median_s)}"
        return {"predicted": said}

    def _cause(self, measured: LaneTimes, step_s: float) -> str:
        """Name the lane, or compute, whose work explains most of the difference; else the one that is waited for."""
        if self._predicted is None:
            raise AssertionError("there is no prediction")
        expected, missing_s = self._predicted.lanes, step_s - self._predicted.step_s

        def explains(what: str, lane: str) -> float:
            found, known = getattr(measured, what), getattr(expected, what)
            return float((found.get(lane, 0.0) - known.get(lane, 0.0)) / missing_s) if missing_s else 0.0

        part = max({**expected.busy_s, **measured.busy_s}, key=lambda lane: explains("busy_s", lane))
        if explains("busy_s", part) < _LEAST_PART:
            part = max({**expected.exposed_s, **measured.exposed_s}, key=lambda lane: explains("exposed_s", lane))
            waits = _instead(measured.exposed_s, expected.exposed_s, part)
            return f"compute waits for lane {part} {waits}{_more(measured, expected, part)}"
        took = _instead(measured.busy_s, expected.busy_s, part)
        if part == COMPUTE:
            return f"compute takes {took}"
        rates = [lanes.rate(part) / 1e9 for lanes in (measured, expected)]
        speed = " (at {:.3g} instead of {:.3g} GB/s)".format(*rates) if all(rates) and part not in _COMPUTING else ""
        return f"lane {part} works {took}{_more(measured, expected, part) or speed}"


def _busy(others: Others) -> str:
    """Say that other programs keep the machine busy. With several ranks it says nothing: they would count as others."""
    busy = others.busy() if num_ranks() == 1 else ""
    return f"this machine is busy, {busy}; " if busy else ""


def _more(measured: LaneTimes, expected: LaneTimes, lane: str) -> str:
    moved, known = (lanes.moved_bytes.get(lane, 0.0) for lanes in (measured, expected))
    if moved <= _MORE * known:
        return ""
    return f" (it moves {format_bytes(int(moved))} instead of {format_bytes(int(known))})"


def _instead(measured: Mapping[str, float], expected: Mapping[str, float], lane: str) -> str:
    return f"{measured.get(lane, 0.0):.3g} s a step instead of {expected.get(lane, 0.0):.3g} s"
