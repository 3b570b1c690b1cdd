"""Checkpoints that say which run wrote them, and resumed runs that follow their own settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from outcore.command.train.output.record import RunRecord
from outcore.integrations.transformers import OutcoreMixin


class RecordedRuns(OutcoreMixin):
    """A mixin for a Trainer whose checkpoints hold a record of the run."""

    record: RunRecord | None = None
    """What every checkpoint says of the run; None: nothing."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.record is not None:
            self.record.save(Path(output_dir))

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """Log, save and evaluate as often as this run says: the Trainer would do so as the checkpoint's run said."""
        about_that = logging.getLogger("transformers.trainer_utils")
        before, about_that.disabled = about_that.disabled, True
        try:
            found = super()._init_training_state(max_steps, *args)
        finally:
            about_that.disabled = before
        self.state.compute_steps(self.args, max_steps)
        return found

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on with the schedule of this run, at the step that the checkpoint's schedule has reached.

        The checkpoint has learning rates of its own, which do not count: those of a finished schedule are 0.
        """
        base_lrs = list(getattr(self.lr_scheduler, "base_lrs", ()))
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and isinstance(self.lr_scheduler, LambdaLR):
            _follow(self.lr_scheduler, base_lrs)


def _follow(schedule: LambdaLR, base_lrs: list[float]) -> None:
    lrs = [base * part(schedule.last_epoch) for base, part in zip(base_lrs, schedule.lr_lambdas, strict=True)]
    for group, base, lr in zip(schedule.optimizer.param_groups, base_lrs, lrs, strict=True):
        group["initial_lr"], group["lr"] = base, lr
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": base_lrs, "_last_lr": lrs})
