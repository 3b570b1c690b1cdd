"""The parts of a Trainer's checkpoint, so that a resumed run equals the run without the interruption.

If states or schedule are missing, the plain Trainer silently starts them anew. Our checkpoints have a manifest, exist
as a whole or not at all, and hold small state as JSON and tensors. Those of plain Trainers are read as they are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from outcore.checkpoint.find_checkpoints import RANDOM_STATE, newest_whole
from outcore.checkpoint.small_state import read_small, write_small
from outcore.checkpoint.training_state import has_states, step_of_states
from outcore.core.errors import ConfigError
from outcore.memory.files.checkpoint_folder import read_manifest, remove
from outcore.spec.manifest import MANIFEST_NAME

_SCHEDULE = "scheduler"  # stem of files
_PLAIN_RANDOM_STATE = "rng_state.pth"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_checked: set[tuple[str, int, int]] = set()
"""Manifests whose files this process has all read and found intact."""


def rotate(folder: Path, limit: int | None, protected: set[Path]) -> None:
    """Remove the oldest checkpoints down to a limit, as the Trainer does. Each is removed as a whole."""
    if limit is None or limit <= 0:
        return
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    oldest = sorted((path for path in found if path not in protected), key=_age)
    for path in oldest[: max(0, len(found) - max(limit, len(protected)))]:
        remove(path)


def _age(path: Path) -> tuple[float, int]:
    return path.stat().st_mtime, int(path.name.rpartition("-")[2])


def newest_to_resume(folder: Path, holding: ExitStack) -> Path | None:
    """Return the newest checkpoint that is intact, or of a plain Trainer; None if there is none. Warns of damage.

    Args:
        folder: Folder of the checkpoints.
        holding: Protects the checkpoint from removal until this is closed.

    Raises:
        ConfigError: All checkpoints are damaged.
    """

    def there() -> list[Path]:
        found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)] if folder.is_dir() else []
        return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)

    newest = newest_whole(there, _refuse_stateless, holding)
    return None if newest is None else newest[0]


def _refuse_stateless(checkpoint: Path) -> None:
    refuse_damaged(checkpoint)
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise ConfigError(f"'{checkpoint}' has no {TRAINER_STATE_NAME}")


def refuse_damaged(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest, once. Old checkpoints and those of plain Trainers have none.

    Raises:
        ConfigError: The checkpoint is damaged.
    """
    manifest = checkpoint / MANIFEST_NAME
    if not manifest.is_file():
        return
    state = manifest.stat()
    known = str(checkpoint.resolve()), state.st_ino, state.st_mtime_ns
    if known not in _checked:
        read_manifest(checkpoint, check=True)
        _checked.add(known)


def refuse_incomplete(checkpoint: str) -> None:
    """Refuse to resume from a part of a checkpoint, or from parts of several.

    Raises:
        ConfigError: Parts are missing or of different steps. The error names them.
    """
    folder = Path(checkpoint)
    refuse_damaged(folder)
    missing = (
        [] if (folder / f"{_SCHEDULE}.json").is_file() or (folder / SCHEDULER_NAME).is_file() else [SCHEDULER_NAME]
    )
    missing += [] if (folder / TRAINER_STATE_NAME).is_file() else [TRAINER_STATE_NAME]
    if not has_states(checkpoint) and not (folder / OPTIMIZER_NAME).is_file():
        missing.insert(0, "optimizer.safetensors")
    if missing:
        raise ConfigError(
            f"resume_from_checkpoint: expected a whole checkpoint in '{checkpoint}', but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not there, and training would silently go on differently; "
            "name a whole checkpoint, or begin anew from these weights: load the model from there and leave "
            "resume_from_checkpoint out"
        )
    _refuse_mixed(folder)
    saved = {f"{RANDOM_STATE}.json", *(path.name for path in folder.glob(f"{RANDOM_STATE}*.pth"))}  # or plain ones
    if not any((folder / name).is_file() for name in saved):
        warnings.warn(
            f"resume_from_checkpoint: '{checkpoint}' has no {_PLAIN_RANDOM_STATE}, so dropout and the like draw "
            "other random numbers than in the interrupted run",
            stacklevel=4,
        )


def save_schedule(schedule: Mapping[str, Any], folder: Path) -> None:
    """Save a schedule without pickle, unless it is the user's own and only pickle can hold it. Raises: OSError."""
    try:
        write_small(folder, _SCHEDULE, schedule)
    except ConfigError:
        torch.save(schedule, folder / SCHEDULER_NAME)


def saved_schedule(folder: Path) -> Any:
    """Read the schedule that ``save_schedule`` wrote, or that of a plain Trainer."""
    if (folder / f"{_SCHEDULE}.json").is_file():
        return read_small(folder, _SCHEDULE)
    return torch.load(folder / SCHEDULER_NAME, weights_only=True)


def _refuse_mixed(folder: Path) -> None:
    """Refuse parts of different steps, for want of a manifest. States of a plain Trainer do not tell their step."""
    if not has_states(folder):
        return
    step = step_of_states(folder)
    at = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)).global_step
    if step not in (None, at):
        raise ConfigError(
            f"resume_from_checkpoint: expected parts of one checkpoint in '{folder}', but {TRAINER_STATE_NAME} is of "
            f"step {at} and optimizer.safetensors of step {step}; name a checkpoint as it was saved, or begin anew "
            "from these weights: load the model from there and leave resume_from_checkpoint out"
        )
