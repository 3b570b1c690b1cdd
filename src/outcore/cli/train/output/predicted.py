"""Predicted times of steps beside measured ones: in every line, on the bar, and in one sentence at the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, final

from outcore.planning.timing.simulate import Simulation
from outcore.spec.timeline import COMPUTE

_WARM_UP = 2  # steps in which kernels are chosen and the order of visits is learned
_OFF, _FOR = 0.2, 20


class PredictedStep(NamedTuple):
    """Predicted seconds of a step."""

    step_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    """Lane -> seconds that compute waits for the lane."""

    @classmethod
    def of(cls, simulation: Simulation) -> Self:
        """Return the mean of the simulated steps."""
        timeline, step_s, steps = simulation.timeline, simulation.step_s, simulation.num_steps
        exposed_s = {lane: s / steps for lane, s in timeline.exposed_s().items() if lane != COMPUTE}
        return cls(step_s, timeline.busy_s()[COMPUTE] / steps, exposed_s)

    def facts(self) -> dict[str, Any]:
        """Return the prediction's part of a line of metrics."""
        return {
            "predicted_step_s": self.step_s,
            "predicted_compute_s": self.compute_s,
            "predicted_exposed_s": dict(self.exposed_s),
        }


@final
class Comparison:
    """Compares steps with their prediction, if there is one."""

    def __init__(self, predicted: PredictedStep | None) -> None:
        """Args: predicted: The prediction; None: there is none."""
        self._predicted = predicted
        self._skipped = 0
        """Steps of the lines that have a step of the warm-up."""
        self._took_s: list[float] = []
        self._off: list[Mapping[str, Any]] = []
        self._is_said = False

    def facts(self) -> dict[str, Any]:
        """Return the prediction's part of a line of metrics."""
        return {"predicted_step_s": None} if self._predicted is None else self._predicted.facts()

    def ratio(self, step_s: float) -> float | None:
        """Return a measured time over the predicted one; None without a prediction."""
        return None if self._predicted is None or not self._predicted.step_s else step_s / self._predicted.step_s

    def add(self, lap: Mapping[str, Any], steps: int) -> str | None:
        """Count the steps of a line of metrics.

        Returns:
            A sentence on what was predicted wrongly, once, when steps have been far off for long enough; else None.
        """
        ratio = self.ratio(lap["step_s"])
        if ratio is None:
            return None
        has_warm_up = len(self._took_s) < _WARM_UP
        self._took_s += [lap["step_s"]] * steps
        if has_warm_up:
            self._skipped = len(self._took_s)
            return None
        self._off = [*self._off, *[lap] * steps] if abs(ratio - 1) > _OFF else []
        if len(self._off) < _FOR or self._is_said:
            return None
        self._is_said = True
        return self._why()

    @property
    def is_off(self) -> bool:
        """Whether ``add`` has returned that sentence."""
        return self._is_said

    def closing(self) -> dict[str, str]:
        """Return one sentence for the end of a run; empty without a prediction."""
        took_s = self._took_s[self._skipped :] or self._took_s
        if self._predicted is None or not took_s:
            return {}
        median_s = statistics.median(took_s)
        ratio = self.ratio(median_s) or 0.0
        said = f"{self._predicted.step_s:.3g} s per step; the median took {median_s:.3g} s, {ratio:.2f} of it"
        return {"predicted": said}

    def _why(self) -> str | None:
        """Name what differs most: compute, or a lane that is waited for."""
        found = self._predicted
        if found is None:
            return None
        expected = {COMPUTE: found.compute_s, **found.exposed_s}

        def measured(part: str) -> float:
            seconds = (lap["compute_s"] if part == COMPUTE else lap["exposed_s"].get(part, 0.0) for lap in self._off)
            return statistics.median(seconds)

        part = max(expected, key=lambda name: abs(measured(name) - expected[name]))
        took = f"{measured(part):.3g} s a step instead of {expected[part]:.3g} s"
        what = f"compute takes {took}" if part == COMPUTE else f"it waits for lane {part} {took}"
        steps, median_s = len(self._off), statistics.median(lap["step_s"] for lap in self._off)
        return (
            f"steps take {median_s:.3g} s, {self.ratio(median_s):.2f} of what was predicted, for {steps} steps: {what}"
        )
