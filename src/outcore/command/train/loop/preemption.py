"""A run that is told to stop by SIGTERM or SIGUSR1: its step is finished and saved, if there is time for that.

[Note: what a signal does] Before the first step there is nothing to save: the run ends at once. From then on the first
signal is only noted, and the second ends the run at once. A noted signal is obeyed where a step is over
(``stoppable``): there the state of the model, of random numbers and of the data is that of any other checkpoint. A
signal that comes between two steps is obeyed before the next one, except at the beginning of an epoch, where the data
has drawn random numbers since.

An evaluation is given up after a batch: from the first batch on, its random numbers are drawn. The checkpoint says so,
and a run that goes on from it makes up for the evaluation first. What can be seen not to fit into the time is not
begun: the run ends at once, with the last checkpoint. The time begins when the signal comes, although Python may notice
it only after a backward pass. Whatever else goes wrong, a timer ends the process.

[Note: signals and ranks] A signal comes to all ranks, but not at the same step. So all ask one another where a step is
over and after each batch of an evaluation, and stop together if any was told to. What one rank decides alone, by its
own clock (no time is left, a second signal came), ends that rank at once, and the others with it.
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
from types import FrameType
from typing import Any, Self, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from outcore.command.train.loop.measured_saves import SaveDurations
from outcore.integrations.trainer_saves import EndedAtOnceError
from outcore.ranks.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STATUS = 128 + signal.SIGTERM
_TO_CLOSE_S = 1.0  # the most of the time that is reserved for giving memory, files and threads back


class EvaluationStoppedError(Exception):
    """An evaluation was given up, to save before the time is over."""


@final
class Preemption(TrainerCallback):  # type: ignore[misc]  # the library has no types here
    """Obeys signals to a run as a callback of its Trainer. As a context manager it handles them.

    See [Note: what a signal does].
    """

    def __init__(self, saves: SaveDurations, grace_s: float) -> None:
        """Handle nothing yet. Args: grace_s: Seconds from the first signal until the process is gone."""
        self.saves, self.grace_s = saves, grace_s
        self.owed: Callable[[], None] | None = None
        """Makes up for an evaluation that was given up; None: there is none."""
        self.stop: Callable[[], None] | None = None
        """Saves and ends the run between two steps."""
        self.is_epoch_over = False
        self._process = os.getpid()
        self._arrivals = _Arrivals()
        self._is_held = False
        self._saves_later = False
        self._end_s: float | None = None
        self._timers: list[threading.Timer] = []
        self._step = 0
        self._world: World | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._arrivals.listen()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for timer in self._timers:
            timer.cancel()
        self._arrivals.listen_no_more()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        lost = None if self._world is None else self._world.failure
        if self.is_asked and error is not None and lost is not None and lost in (error, error.__cause__):
            raise self.exit() from error  # another rank ended at once

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

    def all_late(self, late: str | None) -> str | None:
        """Return any rank's reason not to begin something, if any. With several ranks a collective.

        Args:
            late: The reason of this rank; None: it has none.
        """
        said = [late] if self._world is None else self._world.all_of(late)
        return next((one for one in said if one is not None), None)

    def late(self, needs_s: float) -> str | None:
        """Return why something that takes so long is not begun; None: there is time for it."""
        left_s = self._end_s - time.monotonic() if self._end_s is not None else self.grace_s
        if 0 < left_s >= needs_s:
            return None
        return (
            f"step {self._step} was not saved: that would take about {_shown(needs_s)} s, and of --grace "
            f"({self.grace_s:g} s) {_shown(max(0.0, left_s))} s were left"
        )

    @staticmethod
    def exit(note: str | None = None, kind: type[SystemExit] = SystemExit) -> SystemExit:
        """Return the exception that ends the run."""
        stop = kind(STATUS)
        if note is not None:
            stop.add_note(note)
        return stop

    # Called by the Trainer.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to time saves: they may be due from now on."""
        self._world = kwargs["optimizer"].engine.access.world
        self.saves.begin()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make up first for an evaluation that the checkpoint's run gave up."""
        self.is_epoch_over = False
        owed, self.owed = self.owed, None
        if owed is not None:
            owed()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Only note signals from now on: there is something to lose. Exit if there is no time for this step."""
        is_asked = self.is_asked and self._world is None  # several ranks may be in different places
        if is_asked and self.stop is not None and (state.epoch or 0.0) % 1:
            self.stop()
        self._is_held, self._step = True, state.global_step + 1
        self.saves.begin_step()
        if is_asked and (late := self.late(self.saves.needs_s())):
            raise self.exit(late)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a save if one is due.

        If an evaluation follows at the end of the epoch, the save comes after it: a run that goes on from a checkpoint
        made before it would lack the evaluation, and the random numbers that it draws.
        """
        self.saves.end_step(state.global_step)
        is_last = state.global_step >= state.max_steps
        if self._is_due(is_last=is_last):
            control.should_save = True
        if args.eval_strategy == "epoch" and (is_last or state.epoch == int(state.epoch)):
            self._saves_later, control.should_save = control.should_save, False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for the save that was put off until after the epoch's evaluation."""
        self.is_epoch_over = True
        if self._saves_later:
            self._saves_later, control.should_save = False, True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Predict no more: what is written now makes the run whole, and is worth trying however long it takes."""
        self.saves.end()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Give up the rest of an evaluation, if need be. Raises: EvaluationStoppedError: The run is to stop."""
        if self.hears():
            raise EvaluationStoppedError

    def _is_due(self, *, is_last: bool) -> bool:
        """Return whether a save is due. Ranks have clocks of their own: that of rank 0 counts."""
        is_due = self.saves.is_due(is_last=is_last)
        return is_due if self._world is None or not self.saves.is_timed else self._world.from_first(is_due)

    # Called by the system.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process and number == signal.SIGUSR1:
            return  # a child that was forked; it has nothing to save
        if not self._is_held or os.getpid() != self._process:
            raise self.exit()
        if self.is_asked:
            is_over = self._soft_left_s() <= 0
            late = f"step {self._step} was not saved within --grace ({self.grace_s:g} s)"
            raise self.exit(late if is_over and self.saves.step != self._step else None, EndedAtOnceError)
        self._ask()

    def _soft_left_s(self) -> float:
        """Return the seconds until the run must be over, except for closing it."""
        end_s = self._end_s if self._end_s is not None else math.inf
        return end_s - min(_TO_CLOSE_S, self.grace_s / 10) - time.monotonic()

    def _ask(self) -> None:
        self._end_s = (self._arrivals.last_s or time.monotonic()) + self.grace_s
        main = threading.main_thread().ident or 0
        self._timers = [
            threading.Timer(max(0.0, self._soft_left_s()), partial(signal.pthread_kill, main, signal.SIGTERM)),
            threading.Timer(max(0.0, self._end_s - time.monotonic()), _end_process),
        ]
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        if late := self.late(self.saves.needs_s()):  # needs_s may write a sample: no longer than the timers allow
            raise self.exit(late)


class _Arrivals:
    """Notes when signals come: Python's handlers run only where the main thread is back in Python."""

    last_s: float | None = None
    """When the last signal came; None: none came, or it is not noted yet."""

    def listen(self) -> None:
        """Begin to note signals, in a thread."""
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=[reader], name="outcore-signals", daemon=True)
        self._thread.start()

    def listen_no_more(self) -> None:
        """End the thread."""
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, b"\0")  # no signal's number; forked children may have the pipe, too
        self._thread.join()
        os.close(self._writer)

    def _listen(self, reader: int) -> None:
        while 0 not in (numbers := os.read(reader, 64)):
            if set(numbers) & set(SIGNALS):
                self.last_s = time.monotonic()
        os.close(reader)


def _listen_no_more() -> None:
    """In a child that was forked, do not report its signals to its parent."""
    with suppress(ValueError):  # not in its main thread
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_listen_no_more)


def _shown(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _end_process() -> None:
    with suppress(OSError):
        os.write(2, b"outcore: stopped: the run could not be closed within --grace\n")
    os._exit(STATUS)
