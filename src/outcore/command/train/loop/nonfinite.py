"""Steps whose loss or gradient norm is not finite: they end the run, or are left out, or are made all the same.

[Note: when it is read] An update must wait for the verdict, so loss and norm are read before it. Where every step is
logged, a Trainer reads both anyway, after the update: nothing waits twice. With ``go`` nothing is read beforehand.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import nn

from outcore.command.train.output.report import finite
from outcore.command.train.settings.outcore_settings import OnNonfinite
from outcore.core.errors import OutcoreError
from outcore.integrations.transformers import OutcoreMixin


class NonFiniteStepError(OutcoreError):
    """A step was not made, and the run ends, since its loss or gradient norm is no finite number."""


class FiniteSteps(OutcoreMixin):
    """A mixin for a Trainer: what becomes of such steps, and what is logged of them. JSON gets null in place of nan."""

    def __init__(self, *args: Any, on_nonfinite: OnNonfinite = "stop", **kwargs: Any) -> None:
        """Build the Trainer below.

        Args:
            *args: The Trainer's own.
            on_nonfinite: ``stop`` raises before the update. ``skip`` leaves the update out: weights, optimizer and
                learning rate are as if the step had not been; data and step number go on. ``go`` updates.
            **kwargs: The Trainer's own.
        """
        self._on_nonfinite = on_nonfinite
        self.num_skipped = 0
        """Steps left out since the run began."""
        self._has_told = False
        self._logged_skipped = 0
        self._steps = 0  # since the last line of logs
        self._finite_loss = 0.0  # the sum of their losses, without those of skipped ones
        super().__init__(*args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Judge the step: the Trainer calls this between clipping and the update. See [Note: when it is read].

        With fp16, the gradient scaler looks for norms that are not finite, and leaves such an update out itself.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        self.optimizer.step_was_skipped = False
        if self._on_nonfinite != "go":
            total = float(self._tr_loss)
            self._steps += 1
            losses = [total - self._finite_loss]
            if self._outcore_world is not None:  # all ranks do the same
                losses = self._outcore_world.all_of(losses[0])
            if math.isfinite(sum(losses)) and (math.isfinite(norm) or self.accelerator.scaler is not None):
                self._finite_loss = total
            else:
                self._leave_out(model, loss=sum(losses) / len(losses), norm=float(norm))
        return norm

    def _leave_out(self, model: nn.Module, *, loss: float, norm: float) -> None:
        found = f"the loss is {loss:.4g} and the gradient norm {norm:.4g}"
        step = self.state.global_step + 1
        if self._on_nonfinite == "stop":
            raise NonFiniteStepError(
                f"step {step}: expected a finite loss and gradient norm, but {found}; the update was not made. Lower "
                "--lr or look at the data of this step, or leave such updates out with --on-nonfinite skip"
            )
        self.num_skipped += 1
        if self.num_skipped in (10**n for n in range(12)):
            warnings.warn(f"step {step}: {found}; no update ({self.num_skipped:,} so far)", stacklevel=1)
        model.zero_grad()  # what has no gradient is not updated
        self.optimizer.step_was_skipped = True  # the Trainer then leaves the learning rate where it is
        self._tr_loss.fill_(self._finite_loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean loss of the steps that were made, and how many were not."""
        if "loss" in logs:
            self._tr_loss.zero_()  # the Trainer subtracts it from itself, which leaves nan as it is
            if self._on_nonfinite == "skip":
                self._log_skipped(logs)
            elif self._on_nonfinite == "stop" or self._has_told:
                pass
            elif not all(map(math.isfinite, (logs["loss"], logs.get("grad_norm", 0.0)))):
                self._has_told = True
                warnings.warn(
                    f"step {self.state.global_step}: the loss is {logs['loss']:.4g} and the gradient norm "
                    f"{logs.get('grad_norm', math.nan):.4g}; the run goes on, as --on-nonfinite go says",
                    stacklevel=1,
                )
            self._steps, self._finite_loss = 0, 0.0
        super().log(logs, start_time)
        self.state.log_history[-1] = finite(self.state.log_history[-1])

    def _log_skipped(self, logs: dict[str, float]) -> None:
        skipped, self._logged_skipped = self.num_skipped - self._logged_skipped, self.num_skipped
        made = self._steps - skipped
        if skipped:
            logs["loss"] = logs["loss"] * self._steps / made if made else math.nan
        logs["skipped"] = skipped

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a state that is valid JSON: before the first finite evaluation, the best metric is infinite or None."""
        self.state.best_metric = finite(self.state.best_metric)
        super()._save_checkpoint(model, trial)
