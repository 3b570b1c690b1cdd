"""``--replan``: a better plan for a run whose steps take other than predicted.

The machine is measured while the old plan still stands. Only then the run stops behind a checkpoint and goes on from
it, as ``--resume`` does. So whatever fails, the run goes on as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import final

from rich.console import Console

from outcore.cli.train.job import Job
from outcore.core.errors import OutcoreError
from outcore.probe.kept import Machine

HARDWARE = "hardware.json"


@final
class Replanning:
    """At most one other plan for a run."""

    def __init__(self, job: Job, console: Console) -> None:
        """Args: job: As it was planned."""
        self._job, self._console = job, console
        self._is_tried = False
        self._path: Path | None = None

    @property
    def is_due(self) -> bool:
        """Whether the run stopped for another plan."""
        return self._path is not None

    def measure(self) -> bool:
        """Measure the machine again, once. Returns whether to stop for a plan that follows from it."""
        if self._is_tried or not self._job.settings.replan:
            return False
        self._is_tried, settings = True, self._job.settings
        try:
            machine, path = Machine(settings.device, tuple(map(Path, settings.budget.paths))), settings.out / HARDWARE
            machine.measure("quick", is_kept=False).hardware.save(path)
        except OutcoreError as error:
            self._say(f"the run goes on with its plan, since the machine could not be measured again: {error}")
            return False
        self._path = path
        return True

    def jobs(self) -> Iterator[Job]:
        """The run with another plan, where there is one, and as it was."""
        try:
            found = Job.of(dataclasses.replace(self._job.settings, hardware=str(self._path)))
        except OutcoreError as error:
            self._say(f"the run goes on with its plan, since another could not be made: {error}")
        else:
            after = found.model.predicted
            times = "" if after is None else f"; {after.step_s:.3g} s per step are predicted"
            is_same = found.model.plan == self._job.model.plan
            plan = "the plan stays the best one that is known" if is_same else "the run goes on with another plan"
            self._say(f"the machine was measured again ({self._path}): {plan}{times}")
            yield found
        yield self._job

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
