"""Writes a Trainer's checkpoints while training goes on.

[Note: a Trainer's saves] The Trainer writes its small files at once, into a hidden folder. Weights and states follow on
the save lane, and then the commit. So all that the Trainer does with a whole checkpoint waits for the commit. Old
checkpoints are removed on the lane. Uploads and ``on_save`` come with the next step that finds the checkpoint durable,
with the state of the checkpoint's step. Nothing waits longer than until the next save or the end of training. The error
of a failed save is raised by the next step, the next save or the end of training, whichever comes first. A Ctrl-C gives
up the save that is under way.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from outcore.checkpoint.begin_checkpoint import begun
from outcore.checkpoint.library_files import LibraryFiles
from outcore.checkpoint.run_manifest import manifest_maker
from outcore.checkpoint.shared_checkpoint import all_random_states, odd_buffers
from outcore.checkpoint.small_state import random_states
from outcore.engine.checkpoint_saves import EditedError, Save
from outcore.integrations.checkpoints import rotate
from outcore.ranks.agreement import agreed
from outcore.spec.manifest import ChecksummedBlock, Manifest


class EndedAtOnceError(SystemExit):
    """Ends a run without waiting for its save, as a Ctrl-C does. Other exits let the save finish first."""


@dataclass(eq=False)
class _UnderWay:
    """A checkpoint that is not reported yet."""

    save: Save
    state: TrainerState
    """The Trainer's state at the checkpoint's step."""
    best_before: str | None
    held_s: float
    """Seconds for which training stood still."""
    is_owed: bool = False
    """Whether callbacks must still be told."""


@final
class TrainerSaves:
    """The saves of one Trainer, one at a time. See [Note: a Trainer's saves]."""

    def __init__(self, trainer: Trainer, on_durable: Callable[[Save, TrainerState, float], None]) -> None:
        """Args: on_durable: Called before callbacks are told of a checkpoint; see ``OutcoreMixin._outcore_saved``."""
        self.aside: Path | None = None
        """Folder in which the Trainer writes its small files now; None outside of a save."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called on the save lane before the commit; with several ranks, on rank 0 only."""
        self.random: dict[str, Any] = {}
        """Random generators and buffers that ranks have of their own, for the checkpoint that is being made."""
        self.random_of_epoch: list[dict[str, Any]] = []
        """Random generators as this epoch began, by rank: some samplers draw the order of its rows from them."""
        self._looked_at, self._is_pass_over = -1, False
        self._trainer, self._on_durable = trainer, on_durable
        self._under_way: _UnderWay | None = None
        self._inner = Path()
        self._files: LibraryFiles | None = None

    def files(self, folder: str) -> LibraryFiles | None:
        """Return the files that take weights and states in place of ``folder``; None: save to ``folder`` itself."""
        return self._files if Path(folder) == self._inner else None

    def save(self, folder: Path, write: Callable[[], None]) -> None:
        """Begin a checkpoint, after the previous one is finished. With several ranks a collective.

        Args:
            folder: Folder of the checkpoints.
            write: The Trainer's own way to save, which uses ``aside`` and ``files()``.

        Raises:
            DiskError: The checkpoint cannot be begun, or the previous one has failed. Older ones are untouched.
        """
        self.settle(is_last=False)
        trainer, state, begun_s = self._trainer, self._trainer.state, time.monotonic()
        self._hear_of_on_save()
        engine, step, before = trainer.optimizer.engine, state.global_step, state.best_model_checkpoint
        world = engine.access.world
        self.random = {"ranks": all_random_states(engine)} if world is not None else random_states(engine.device)
        self.random |= {
            "epoch": self.random_of_epoch,
            "is_pass_over": self._is_pass_over,
            **({"buffers": odd_buffers(engine)} if world is not None else {}),
        }
        target = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        at = folder.absolute()  # so a later change of the working directory does not move it
        kept = {at / target.name}

        def tidy_up() -> None:
            rotate(at, trainer.args.save_total_limit, kept)

        def describe(files: Mapping[str, tuple[ChecksummedBlock, ...]]) -> Manifest:
            self.before_commit()
            return Manifest(step=step, files=files) if make is None else make(unfinished.path, files)

        try:
            with begun(engine, at / target.name, describe, tidy_up) as (unfinished, save):
                self.aside = unfinished.path
                self._inner = inner = unfinished.path / target.name
                with agreed(world, "checkpoint"):
                    self._files = library = LibraryFiles(engine, unfinished, save)
                    write()
                    library.submit()
                make = manifest_maker(trainer.optimizer, step, library.held) if library.is_whole else None
                best = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
                is_found = best == target or best.is_dir()  # the Trainer looked for it in the hidden folder
                if is_found:
                    state.best_model_checkpoint = str(best)
                kept |= {Path(best).absolute() for best in [state.best_model_checkpoint] if best}
                if world is None or world.rank == 0:
                    if is_found:
                        state.save_to_json(inner / TRAINER_STATE_NAME)
                    _move_into(inner, inner.parent)
        except BaseException:
            state.best_model_checkpoint = before
            raise
        finally:
            self.aside = self._files = None
        self._under_way = _UnderWay(save, _as_it_is(state), before, time.monotonic() - begun_s)

    def look(self) -> None:
        """Settle the save that is under way if it is done; with several ranks, on all of them in the same step.

        A second look in the same step is that of the end of a pass over the data.

        Raises: As ``settle``.
        """
        step = self._trainer.state.global_step
        self._is_pass_over, self._looked_at = step == self._looked_at, step
        if self._under_way is None:
            return
        world, is_done = self._trainer.optimizer.engine.access.world, self._under_way.save.done
        if is_done if world is None else all(world.all_of(is_done)):
            self.settle(is_last=False)

    def settle(self, *, is_last: bool = True) -> None:
        """Wait for the save that is under way, and report it.

        Args:
            is_last: Whether no other save may follow. If one may, and there is one rank, a checkpoint whose weights
                were edited unseen meanwhile is dropped with a warning: the next save waits for such units.

        Raises:
            DiskError: The checkpoint could not be written. Older ones are untouched.
            EditedError: Weights were edited during the save.
        """
        now = self._under_way
        if now is None:
            return
        trainer, begun_s = self._trainer, time.monotonic()
        try:
            now.save.wait()
        except Exception as error:
            self._forget(now)
            if isinstance(error, EditedError) and not is_last and trainer.optimizer.engine.access.world is None:
                warnings.warn(f"checkpoint '{now.save.path}' was not made: {error}", stacklevel=2)
                return
            raise
        self._under_way = None
        self._on_durable(now.save, now.state, now.held_s + time.monotonic() - begun_s)
        if now.is_owed:
            control = trainer.control
            is_due = control.should_save  # for this step; on_save would reset it
            trainer.control = control = trainer.callback_handler.on_save(trainer.args, now.state, control)
            control.should_save |= is_due

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Settle after a block, whose own error wins. A Ctrl-C or an ``EndedAtOnceError`` gives up the save."""
        at_once = KeyboardInterrupt, EndedAtOnceError
        try:
            try:
                yield
            except at_once:
                raise
            except BaseException as error:
                try:
                    self.settle()
                except Exception as failed:
                    error.add_note(f"the last save failed: {failed}")
                raise
            self.settle()
        except at_once:
            if self._under_way is not None:
                self._under_way.save.end_at_once()
                self._forget(self._under_way)
            raise

    def _forget(self, failed: _UnderWay) -> None:
        self._under_way, state = None, self._trainer.state
        if Path(state.best_model_checkpoint or "").name == failed.save.path.name:
            state.best_model_checkpoint = failed.best_before

    def _hear_of_on_save(self) -> None:
        """Make callbacks hear of a checkpoint only once it is durable."""
        handler = self._trainer.callback_handler
        if "on_save" in vars(handler):
            return
        tell = handler.on_save

        def on_save(args: Any, state: TrainerState, control: Any) -> Any:
            if self._under_way is None:
                return tell(args, state, control)
            self._under_way.is_owed, control.should_save = True, False
            return control

        handler.on_save = on_save


def _move_into(folder: Path, target: Path) -> None:
    """Move the content of a folder into another one. Folders of adapters may be there already, with other files."""
    for path in sorted(folder.iterdir()):
        there = target / path.name
        if path.is_dir() and there.is_dir():
            _move_into(path, there)
        else:
            path.rename(there)
    folder.rmdir()


def _as_it_is(state: TrainerState) -> TrainerState:
    """Copy the state, so that the copy lacks what training appends later."""
    now = copy.copy(state)
    now.log_history, now.stateful_callbacks = [*state.log_history], copy.deepcopy(state.stateful_callbacks)
    return now
