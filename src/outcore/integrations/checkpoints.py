"""What a Trainer's checkpoint must hold, so that the resumed run is the run that was not interrupted.

The plain Trainer begins states and schedule anew without a word if either is missing.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from outcore.core.errors import ConfigError
from outcore.memory.weights_file import WeightsDirectory
from outcore.saving.training_state import has_states, saved_with

_RANDOM_STATE = "rng_state.pth"


def refuse_incomplete(checkpoint: str) -> None:
    """Refuse to resume from a part of a checkpoint, or from parts of several.

    Raises:
        ConfigError: Naming what is missing, or which steps the parts are of.
    """
    folder = Path(checkpoint)
    missing = [name for name in (SCHEDULER_NAME, TRAINER_STATE_NAME) if not (folder / name).is_file()]
    if not has_states(checkpoint) and not (folder / OPTIMIZER_NAME).is_file():
        missing.insert(0, "optimizer.safetensors")
    if missing:
        raise ConfigError(
            f"resume_from_checkpoint: expected a whole checkpoint in '{checkpoint}', but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not there, and training would go on differently without a word; "
            "name a whole checkpoint, or begin anew from these weights: load the model from there and leave "
            "resume_from_checkpoint out"
        )
    _refuse_mixed(folder)
    if not (folder / _RANDOM_STATE).is_file():
        warnings.warn(
            f"resume_from_checkpoint: '{checkpoint}' has no {_RANDOM_STATE}, so dropout and the like go on with other "
            "random numbers than the interrupted run",
            stacklevel=4,
        )


def mark_of_weights(folder: Path) -> str | None:
    """What tells the weights or adapters in a checkpoint from others; None if they are not in safetensors."""
    if WeightsDirectory.is_there(folder, "model"):
        return WeightsDirectory.open(folder).digest()
    adapters = sorted(path.parent for path in folder.rglob("adapter_model.safetensors"))
    return " ".join(WeightsDirectory.open(path, "adapter_model").digest() for path in adapters) or None


def _refuse_mixed(folder: Path) -> None:
    """Older checkpoints, and those of plain Trainers, do not say what their states were saved with."""
    if not has_states(folder):
        return
    step, weights = saved_with(folder)
    at = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    found = f"{TRAINER_STATE_NAME} is of step {at} and optimizer.safetensors of step {step}"
    if step in (None, at):
        if weights in (None, mark_of_weights(folder)):
            return
        found = "its weights are others than those that optimizer.safetensors was saved with"
    raise ConfigError(
        f"resume_from_checkpoint: expected parts of one checkpoint in '{folder}', but {found}; name a checkpoint as it "
        "was saved, or begin anew from these weights: load the model from there and leave resume_from_checkpoint out"
    )
