"""``--replan``: a better plan for a run whose steps take longer or shorter than predicted.

The machine is measured, and plans are made for it, while the old plan still stands. Only for a better plan does the run
stop after a checkpoint and go on from it, as ``--resume`` does. If the new plan cannot begin, the old one goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from rich.console import Console

from outcore.command.train.output.folder import HARDWARE, PLAN, OutputFolder
from outcore.command.train.planned_run import PlannedRun
from outcore.core.errors import OutcoreError
from outcore.probe.measured_machines import Machine

_WORTH = 0.03
"""The share of step time that another plan must be predicted to save to be worth stopping for."""
_NO_MEMORY = ("out of memory", "allocate memory")
"""Words with which PyTorch's RuntimeErrors report a lack of memory."""


def may_fail_so(error: Exception) -> bool:
    """Return whether another plan may fail so, and the run go on without it. Anything else is a bug, to be raised."""
    is_full = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return is_full or isinstance(error, OutcoreError | OSError | MemoryError | torch.OutOfMemoryError)


@final
class Replanning:
    """Looks for a better plan for a run."""

    def __init__(self, job: PlannedRun, console: Console, output: OutputFolder) -> None:
        """Args: job: The run as it was planned."""
        self._job, self._console, self._output = job, console, output
        self.jobs: tuple[PlannedRun, ...] = ()
        """The run with a better plan, and then as it was; empty if there is no better plan."""
        self.step = 0
        """The step at which the run stopped for a better plan."""
        self.stays: PlannedRun | None = None
        """The run with the plan that it has, as predicted for the machine that was measured; None: it was not, or there
        is a better plan."""
        self.skipped = 0
        """Steps up to that one that made no update."""

    def is_better(self, step: int) -> bool:
        """Measure the machine again, and return whether there is a plan that is worth stopping for at this step."""
        try:
            old, new = self._planned()
            self._output.refuse_full(new.written_bytes())
        except Exception as error:
            if not may_fail_so(error):
                raise
            self._say(f"the run goes on with its plan, since no other could be made: {error}")
            return False
        before, after = old.model.predicted, new.model.predicted
        if before is None or after is None or after.step_s >= (1 - _WORTH) * before.step_s:
            self._say("the machine was measured again: the plan stays the best one that is known")
            self.stays = old
            return False
        self._say(
            f"the machine was measured again: the run goes on with another plan; {after.step_s:.3g} s per step are "
            f"predicted instead of {before.step_s:.3g} s"
        )
        self.step, self.jobs = step, (new, self._job)
        return True

    def _planned(self) -> tuple[PlannedRun, PlannedRun]:
        """Return the run with its plan and with the best one, both with times of the machine as it is now."""
        settings, path = self._job.settings, self._output.path / HARDWARE
        disks = tuple(map(Path, settings.budget.paths))
        Machine(settings.device, disks).measure("quick", is_kept=False).hardware.save(path)
        kept = {"plan": self._output.path / PLAN, "activations": None, "replan": False}
        return self._job.again(hardware=str(path), **kept), self._job.again(hardware=str(path))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
