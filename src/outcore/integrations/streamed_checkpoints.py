"""A Trainer's checkpoints: streamed, and written beside training by one rank or several.

[Note: a Trainer's ranks] All ranks take part in every save and every load. Rank 0 writes the library's files. States
are cut over the ranks: each writes its own, and any number of ranks can read them. A failure on one rank fails on all.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy

from outcore.checkpoint.find_checkpoints import RANDOM_STATE
from outcore.checkpoint.shared_checkpoint import all_random_states, restore_odd_buffers, restore_random_states_of
from outcore.checkpoint.small_state import read_small, write_small
from outcore.checkpoint.training_state import check_adapters, has_states, load_states, load_weights
from outcore.checkpoint.weights.conversions import is_adapter_model
from outcore.checkpoint.weights.export import rehearse_save, save_model
from outcore.checkpoint.weights.small_files import Writers
from outcore.core.errors import ConfigError, OutcoreError, UnsupportedError
from outcore.engine.checkpoint_saves import Save
from outcore.engine.engine import attachment_of, engine_of
from outcore.integrations.checkpoints import newest_to_resume, refuse_incomplete, save_schedule, saved_schedule
from outcore.integrations.trainer_saves import TrainerSaves
from outcore.memory.files.locked_folder import held
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.ranks.agreement import agreed
from outcore.ranks.world import World, num_ranks

_CALL = "checkpoint"


class StreamedCheckpoints(Trainer):  # type: ignore[misc]  # the library has no types here
    """The checkpoints of a Trainer. See [Note: a Trainer's ranks]."""

    optimizer: Any  # a StreamedOptimizer from the first use on
    state: TrainerState
    _outcore_saves: TrainerSaves
    _outcore_checkpoint: str | None
    """Checkpoint to load when the model is prepared; None if there is none, and afterwards."""
    _outcore_is_saved = False
    """Whether the model is saved after training, whatever the arguments say."""
    _outcore_reading: ExitStack
    """Protects the checkpoint to resume from against removal while it is read."""

    @property
    def _outcore_world(self) -> World | None:
        """The ranks; None if there is one."""
        known = attachment_of(self.model)
        return None if known is None else known.engine.access.world

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 (the Trainer's)
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train. If the newest checkpoint is asked for, take the newest one that is intact."""
        if resume_from_checkpoint is True:
            found = newest_to_resume(Path(self.args.output_dir), self._outcore_reading)
            resume_from_checkpoint = True if found is None else str(found)  # without one, let the Trainer raise
        with self._outcore_saves.settled(), self._outcore_reading:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Find the pass over the data in which a checkpoint was made, and the micro-batches of that pass before it.

        The Trainer takes all steps of a run for one pass if it does not know where the data ends.
        """
        found: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or num_train_epochs != sys.maxsize:  # which stands for an unknown length
            return found
        saved = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
        per_pass = saved.max_steps * self.args.gradient_accumulation_steps  # as the Trainer counted ``epoch``
        passes, batches = divmod(round((saved.epoch or 0) * per_pass), per_pass)
        if _random_states(resume_from_checkpoint).get("is_pass_over"):
            passes, batches = passes + 1, 0
        return passes, 0 if self.args.ignore_data_skip else batches

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Begin a resumed epoch with the random numbers with which it began at first, so that rows keep their order.

        The Trainer restores those of the checkpoint behind the rows that it leaves out.
        """
        given = inspect.signature(super()._run_epoch).bind(*args, **kwargs).arguments
        engine, checkpoint = self.optimizer.engine, given["resume_from_checkpoint"]
        if checkpoint is not None and given["epoch"] == given["epochs_trained"]:
            if given["steps_trained_in_current_epoch"] == 0:
                self._load_rng_state(checkpoint)  # as the Trainer does first
            elif not self.args.ignore_data_skip:
                states = _random_states(checkpoint).get("epoch")
                if states:
                    restore_random_states_of(states, engine, "resume_from_checkpoint")
        self._outcore_saves.random_of_epoch = all_random_states(engine)
        super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(  # noqa: PLR0913 (the Trainer's)
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Check on the save that is under way. The Trainer calls this after steps and after epochs."""
        self._outcore_saves.look()
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
        )

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Wait for the last checkpoint, since the best one may be loaded next, and others removed."""
        self._outcore_saves.settle()
        return super()._finalize_training(trial, num_train_samples, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save beside training. The checkpoint will exist as a whole, with checksums, or not at all."""
        self._outcore_reading.close()
        save = super()._save_checkpoint
        self._outcore_saves.save(Path(self._get_output_dir(trial)), lambda: save(model, trial))

    def _outcore_saved(self, save: Save, state: TrainerState, held_s: float) -> None:
        """Handle a durable checkpoint. Args: state: That of its step. held_s: Seconds that training stood still."""
        if self.args.push_to_hub:
            now, self.state = self.state, state
            try:
                self._push_from_checkpoint(str(save.path))
            finally:
                self.state = now

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._outcore_saves.aside or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint, but not before it is whole."""
        if self._outcore_saves.aside is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            write_small(Path(output_dir), RANDOM_STATE, self._outcore_saves.random)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        saved = {} if checkpoint is None else _random_states(checkpoint)
        if saved:
            restore_random_states_of(saved.get("ranks", [saved]), self.optimizer.engine, "resume_from_checkpoint")
            restore_odd_buffers(saved.get("buffers", []), self.optimizer.engine)
        else:
            super()._load_rng_state(checkpoint)
        self._outcore_reading.close()  # everything is loaded now

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Stream in a checkpoint's weights, now or when the model is prepared. Refuse an incomplete checkpoint."""
        self._outcore_reading.enter_context(held(Path(resume_from_checkpoint)))
        refuse_incomplete(resume_from_checkpoint)
        if attachment_of(self.model) is not None:
            load_weights(self.model, resume_from_checkpoint)
            return
        if is_adapter_model(self.model):
            check_adapters(self.model, resume_from_checkpoint)
        elif not WeightsDirectory.is_there(resume_from_checkpoint, "model"):
            raise ConfigError(
                f"resume_from_checkpoint: expected model.safetensors in '{resume_from_checkpoint}', but there is none"
                "; name a folder that a run of this model saved"
            )
        self._outcore_checkpoint = resume_from_checkpoint

    def _load_best_model(self) -> None:
        load_weights(self.model, self.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002
        """Let rank 0 write and others give their cut weights. In a checkpoint, all ranks raise if it fails."""
        is_checkpoint = output_dir is not None and self._outcore_saves.files(output_dir) is not None
        with agreed(self._outcore_world if is_checkpoint else None, _CALL):
            super().save_model(output_dir, _internal_call)
            if not self.args.should_save and attachment_of(self.model) is not None:
                save_model(engine_of(self.model, "save_model"), self.args.output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None or attachment_of(self.model) is None:
            super()._save(output_dir, state_dict)
            return
        if self.args.should_save:
            self._outcore_save_model(output_dir if output_dir is not None else self.args.output_dir)

    def _outcore_save_model(self, directory: str) -> None:
        files = self._outcore_saves.files(directory)
        if files is None:
            save_model(engine_of(self.model, "save_model"), directory, self._outcore_small_files())
            return
        files.weights(Path(directory))
        for write in self._outcore_small_files().values():
            write(Path(directory))

    def _outcore_small_files(self) -> Writers:
        """What is written beside the model."""
        tokenizer = self.processing_class
        tokenizer = tokenizer if tokenizer is not None else getattr(self.data_collator, "tokenizer", None)
        return {
            **({} if tokenizer is None else {("tokenizer_config.json",): tokenizer.save_pretrained}),
            (TRAINING_ARGS_NAME,): lambda folder: torch.save(self.args, folder / TRAINING_ARGS_NAME),
        }

    def _outcore_rehearse(self) -> None:
        """Have rank 0 find out before training whether what is trained can be saved. With several ranks a collective.

        Raises:
            ConfigError, UnsupportedError: It cannot be saved. If nothing is to be saved, this is a warning.
        """
        if num_ranks() == 1:
            self._outcore_rehearse_alone()
            return
        world = World()
        with world.kept("train"):
            if world.rank == 0:
                self._outcore_rehearse_alone()
            world.all_of(None)
        world.close()

    def _outcore_rehearse_alone(self) -> None:
        try:
            rehearse_save(self.model, self._outcore_small_files())
        except OutcoreError as error:
            if self._outcore_is_saved or self.args.save_strategy != SaveStrategy.NO:
                raise
            warnings.warn(f"what is trained here cannot be saved as a whole: {error}", stacklevel=2)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        files = self._outcore_saves.files(output_dir)
        with agreed(self._outcore_world, _CALL):
            if files is None:
                raise UnsupportedError(
                    f"expected states to be saved in a checkpoint of this Trainer, but got '{output_dir}'; call "
                    "outcore.save_checkpoint() for a checkpoint elsewhere"
                )
            files.states(self.optimizer, step=self.state.global_step)
            if self.args.should_save:
                save_schedule(self.lr_scheduler.state_dict(), Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Resume from a checkpoint of this Trainer or the plain one. It was checked before to be complete."""
        if checkpoint is None:
            return
        if has_states(checkpoint):
            load_states(self.optimizer, checkpoint)
        else:
            plain = os.path.join(checkpoint, OPTIMIZER_NAME)
            self.optimizer.load_state_dict(torch.load(plain, map_location="cpu", weights_only=True, mmap=True))
        self.lr_scheduler.load_state_dict(saved_schedule(Path(checkpoint)))
        theirs = super()._load_optimizer_and_scheduler
        if theirs.__module__ != Trainer.__module__:  # it loads more, such as a coefficient of GRPO
            theirs(checkpoint)


def _random_states(checkpoint: str) -> Any:
    """Read what the mixin saved of random numbers; nothing from a checkpoint of the plain Trainer."""
    is_there = (Path(checkpoint) / f"{RANDOM_STATE}.json").is_file()
    return read_small(Path(checkpoint), RANDOM_STATE) if is_there else {}
