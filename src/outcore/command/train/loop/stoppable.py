"""Trainers whose runs can be told to stop, and save then. See [Note: what a signal does]."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from outcore.command.train.loop.preemption import EvaluationStoppedError, Preemption
from outcore.command.train.loop.recorded import RecordedRuns
from outcore.command.train.output.folder import METRICS
from outcore.command.train.output.record import RunRecord
from outcore.engine.checkpoint_saves import Save
from outcore.memory.files.staged_files import sync


class StoppableRuns(RecordedRuns):
    """A mixin for a Trainer whose runs can be told to stop."""

    preemption: Preemption | None = None
    """What obeys signals to the run; None: it cannot be told to stop."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Stop after this step, if the run is told to. The Trainer calls this after steps and after epochs."""
        owes_evaluation = False
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except EvaluationStoppedError:
            owes_evaluation = True
        if self.preemption is None or not (owes_evaluation or self.preemption.hears()):
            return
        is_last = self.state.global_step >= self.state.max_steps
        is_epoch_whole = self.state.epoch == int(self.state.epoch)
        if owes_evaluation or not (is_last or (is_epoch_whole and not self.preemption.is_epoch_over)):
            self._save_and_stop(self.preemption, owes_evaluation=owes_evaluation, is_last=is_last)

    def _save_and_stop(self, preemption: Preemption, *, owes_evaluation: bool, is_last: bool) -> None:
        """End the run after a checkpoint of this step, which may be there already."""
        self._outcore_saves.settle()
        late = None
        if owes_evaluation or preemption.saves.step != self.state.global_step:
            if owes_evaluation and is_last and self.args.load_best_model_at_end:
                late = "the last step was not saved: its evaluation, on which the best model depends, had not finished"
            else:
                late = preemption.late(preemption.saves.save_needs_s())
            late = preemption.all_late(late)
            if late is None:
                if self.record is not None:
                    self.record = dataclasses.replace(self.record, owes_evaluation=owes_evaluation)
                self._save_checkpoint(self.model, trial=None)
                self.callback_handler.on_save(self.args, self.state, self.control)
                self._outcore_saves.settle()
        self.callback_handler.on_train_end(self.args, self.state, self.control)  # trackers close their files
        raise preemption.exit(late)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, after making durable the metrics of steps that are not trained again."""
        self._outcore_saves.before_commit = partial(_sync_metrics, Path(self.args.output_dir, METRICS).absolute())
        if self.preemption is not None:
            self._outcore_saves.settle()
            self.preemption.saves.begin_save(self.state.global_step)
        super()._save_checkpoint(model, trial)

    def _outcore_saved(self, save: Save, state: TrainerState, held_s: float) -> None:
        if self.preemption is not None:
            self.preemption.saves.end_save(busy_s=save.busy_s, held_s=held_s)
        super()._outcore_saved(save, state, held_s)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. The run can stop between two steps, too."""
        if self.preemption is not None:
            self.preemption.stop = partial(self._save_and_stop, self.preemption, owes_evaluation=False, is_last=False)
        return super().train(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        record = None if checkpoint is None else RunRecord.load(Path(checkpoint))
        if record is not None and record.owes_evaluation and self.eval_dataset is not None and self.preemption:
            self.preemption.owed = self._make_up_for_evaluation
            self.args.eval_on_start = False  # it would evaluate the same step, and not count for the best model

    def evaluate_again(self, checkpoint: Path) -> None:
        """Make up for the evaluation after the last step of a run, of which this checkpoint holds all else."""
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self._load_from_checkpoint(str(checkpoint))
        self._wrap_model(self.model)
        self.callback_handler.optimizer = self.optimizer
        self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self._make_up_for_evaluation()
        self.callback_handler.on_train_end(self.args, self.state, self.control)

    def _make_up_for_evaluation(self) -> None:
        """Evaluate as the Trainer does after the step of the checkpoint."""
        metrics = self._evaluate(None, None)
        is_best = self._determine_best_metric(metrics=metrics, trial=None)
        saved = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if is_best and self.state.best_global_step and saved.is_dir():
            self.state.best_model_checkpoint = str(saved)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Let workers live as long as the run when a signal goes to all of its processes."""
        loader = super()._get_dataloader(*args, **kwargs)
        if self.preemption is not None and loader.num_workers:
            inner = getattr(loader, "base_dataloader", loader)  # Accelerate's loader wraps it
            inner.worker_init_fn = partial(_outlive, math.ceil(self.preemption.grace_s), inner.worker_init_fn)
        return loader


def _sync_metrics(path: Path) -> None:
    if path.exists():
        sync(path)


def _outlive(seconds: int, begin: Callable[[int], None] | None, worker: int) -> None:
    """In a worker of a data loader, survive signals until the reader of its batches ends it, or the time does."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, partial(_end_in, max(1, seconds)))
    if begin is not None:
        begin(worker)


def _end_in(seconds: int, *_: object) -> None:
    signal.alarm(seconds)
