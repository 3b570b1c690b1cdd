"""A run that is told to stop by SIGTERM or SIGUSR1: it finishes its step, saves a checkpoint, and leaves.

[Note: what a signal does] Before the first step there is nothing to save: the run ends at once. From then on the first
signal is only noted, and the second ends the run at once. A noted signal is obeyed where a step is over, with the
evaluation that is due after it: there the state of the model, of random numbers and of the data is that of any other
checkpoint. After the last step there is nothing left to stop. When the time (``--grace``) is over, a timer sends the
second signal, and shortly after that another one ends the process, whatever it does then.

[Note: signals and ranks] A signal comes to all ranks, but not at the same step. So all ask one another where a step is
over, and stop together if any was told to. A second signal, and the end of the time, end one rank at once, and the
others with it.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

from transformers import TrainerCallback, TrainerControl, TrainerState

from outcore.command.train.loop.recorded import RecordedRuns
from outcore.command.train.output.folder import METRICS
from outcore.engine.checkpoint_saves import Save
from outcore.integrations.trainer_saves import EndedAtOnceError
from outcore.memory.files.staged_files import sync
from outcore.ranks.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STATUS = 128 + signal.SIGTERM
_TO_CLOSE_S = 1.0  # the most of the time that is reserved for giving memory, files and threads back
_WORTH = 0.05  # the share of time that saving may take before another interval is proposed


@final
class SaveTimes:
    """When saves come due by the clock, and what they cost."""

    def __init__(self, every_minutes: float | None) -> None:
        """Args: every_minutes: Time between two saves, besides those that the Trainer makes; None: no others."""
        self._every_s = math.inf if every_minutes is None else 60 * every_minutes
        self._begun_s = self._last_s = time.monotonic()
        self._num, self._held_s = 0, 0.0
        self._is_saving = False
        self.step: int | None = None
        """The step that was saved last."""

    @property
    def is_timed(self) -> bool:
        """Whether saves come due by time."""
        return self._every_s < math.inf

    def begin(self) -> None:
        """Note that training begins."""
        self._begun_s = self._last_s = time.monotonic()

    def is_due(self, *, is_last: bool) -> bool:
        """Return whether a save by time is due after this step. After the last one it is, as it is for the Trainer."""
        is_time = not self._is_saving and time.monotonic() - self._last_s >= self._every_s
        return self.is_timed and (is_last or is_time)

    def begin_save(self) -> None:
        """Note that a save begins. It may be written while training goes on."""
        self._is_saving = True

    def end_save(self, step: int, held_s: float) -> None:
        """Note that a step's save is durable. Args: step: The step. held_s: How long training waited for the save."""
        self._is_saving, self._last_s, self.step = False, time.monotonic(), step
        self._num, self._held_s = self._num + 1, self._held_s + held_s

    def summary(self) -> dict[str, str]:
        """Return what saving cost: name -> text. Empty if nothing was saved."""
        if not self._num:
            return {}
        share = self._held_s / (time.monotonic() - self._begun_s)
        files = f"{self._num} checkpoint{'s' if self._num > 1 else ''}"
        said = f"{files}, for which training waited {self._held_s:.3g} s, {share:.1%} of the time"
        if share > _WORTH:
            minutes = self._held_s / self._num * (1 / _WORTH - 1) / 60
            said += f"; --save-every-minutes {math.ceil(10 * minutes) / 10:g} would make it {_WORTH:.0%}"
        return {"saving": said}


@final
class Preemption(TrainerCallback):  # type: ignore[misc]  # the library has no types here
    """Obeys signals to a run as a callback of its Trainer, and asks for saves by the clock.

    As a context manager it handles the signals. See [Note: what a signal does].
    """

    def __init__(self, every_minutes: float | None, grace_s: float) -> None:
        """Handle nothing yet.

        Args:
            every_minutes: As for ``SaveTimes``.
            grace_s: Seconds from the first signal until the process is gone.
        """
        self.saves, self.grace_s = SaveTimes(every_minutes), grace_s
        self.is_epoch_over = False
        self._process = os.getpid()
        self._is_held = self._saves_later = False
        self._end_s: float | None = None
        self._timers: list[threading.Timer] = []
        self._step = 0
        self._world: World | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        lost = None if self._world is None else self._world.failure
        if self.is_asked and error is not None and lost is not None and lost in (error, error.__cause__):
            raise SystemExit(STATUS) from error  # another rank ended at once

    @property
    def is_asked(self) -> bool:
        """Whether the run is to stop."""
        return self._end_s is not None

    @property
    def has_begun(self) -> bool:
        """Whether several ranks have begun to train."""
        return self._world is not None

    def hears(self) -> bool:
        """Return whether the run is to stop on any rank. With several ranks a collective."""
        return self.is_asked if self._world is None else any(self._world.all_of(self.is_asked))

    # Called by the Trainer.

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin to time saves: they may be due from now on."""
        self._world = kwargs["optimizer"].engine.access.world
        self.saves.begin()

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note that steps of an epoch follow."""
        self.is_epoch_over = False

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Only note signals from now on: there is something to lose."""
        self._is_held, self._step = True, state.global_step + 1

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a save if one is due by the clock; of several ranks, by that of rank 0.

        If an evaluation follows at the end of the epoch, the save comes after it: a run that goes on from a checkpoint
        made before it would lack the evaluation, and the random numbers that it draws.
        """
        is_last = state.global_step >= state.max_steps
        is_due = self.saves.is_due(is_last=is_last)
        if self._world is not None and self.saves.is_timed:
            is_due = self._world.from_first(is_due)
        control.should_save = control.should_save or is_due
        if args.eval_strategy == "epoch" and (is_last or state.epoch == int(state.epoch)):
            self._saves_later, control.should_save = control.should_save, False

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for the save that was put off until after the epoch's evaluation."""
        self.is_epoch_over = True
        if self._saves_later:
            self._saves_later, control.should_save = False, True

    # Called by the system.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process and number == signal.SIGUSR1:
            return  # a child that was forked; it has nothing to save
        if not self._is_held or os.getpid() != self._process:
            raise SystemExit(STATUS)
        if self._end_s is not None:
            stop = EndedAtOnceError(STATUS)
            if self._end_s - self._to_close_s <= time.monotonic() and self.saves.step != self._step:
                stop.add_note(f"step {self._step} was not saved within --grace ({self.grace_s:g} s)")
            raise stop
        self._ask()

    @property
    def _to_close_s(self) -> float:
        return min(_TO_CLOSE_S, self.grace_s / 10)

    def _ask(self) -> None:
        self._end_s = time.monotonic() + self.grace_s
        again = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGTERM)
        for seconds, act in ((self.grace_s - self._to_close_s, again), (self.grace_s, _end_process)):
            timer = threading.Timer(seconds, act)
            timer.daemon = True
            timer.start()
            self._timers.append(timer)


def _end_process() -> None:
    with suppress(OSError):
        os.write(2, b"outcore: stopped: the run could not be closed within --grace\n")
    os._exit(STATUS)


class PreemptibleRuns(RecordedRuns):
    """A mixin for a Trainer whose runs can be told to stop. See [Note: what a signal does]."""

    preemption: Preemption | None = None
    """What obeys signals to the run; None: it cannot be told to stop."""

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Save and leave after this step, if the run is told to. The Trainer calls this after steps and epochs."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.preemption is None or not self.preemption.hears() or self.state.global_step >= self.state.max_steps:
            return
        if self.state.epoch == int(self.state.epoch) and not self.preemption.is_epoch_over:
            return  # what is due at the end of the epoch comes first
        self._outcore_saves.settle()
        if self.preemption.saves.step != self.state.global_step:
            self._save_checkpoint(self.model, trial=None)
            self.callback_handler.on_save(self.args, self.state, self.control)
            self._outcore_saves.settle()
        self.callback_handler.on_train_end(self.args, self.state, self.control)  # trackers close their files
        raise SystemExit(STATUS)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, after making durable the metrics of steps that are not trained again."""
        self._outcore_saves.before_commit = partial(_sync_metrics, Path(self.args.output_dir, METRICS).absolute())
        if self.preemption is not None:
            self._outcore_saves.settle()
            self.preemption.saves.begin_save()
        super()._save_checkpoint(model, trial)

    def _outcore_saved(self, save: Save, state: TrainerState, held_s: float) -> None:
        if self.preemption is not None:
            self.preemption.saves.end_save(state.global_step, held_s)
        super()._outcore_saved(save, state, held_s)

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
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(max(1, seconds)))
    if begin is not None:
        begin(worker)
