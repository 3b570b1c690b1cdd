"""What a Trainer's checkpoint must hold, so that the resumed run is the run that was not interrupted.

The plain Trainer begins states and schedule anew without a word if either is missing. Ours has a manifest, is there as
a whole or not at all, and holds small state as JSON and tensors; those of plain Trainers are read as they are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from outcore.core.errors import ConfigError, DiskError
from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint, read_manifest, remove
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.saving.training_state import has_states, saved_with
from outcore.spec.checkpoint import MANIFEST_NAME, Manifest

RANDOM_STATE, SCHEDULE = "rng_state", "scheduler"
"""Stems of files."""
_PLAIN_RANDOM_STATE = "rng_state.pth"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_checked: set[tuple[str, int, int]] = set()
"""Manifests whose files were all read and found right in this process."""


@contextmanager
def committed(target: Path, step: int) -> Iterator[Path]:
    """A checkpoint that is there as a whole when the block ends, or not at all.

    Yields:
        A hidden folder: what lies in its folder of the target's name will be the target.

    Raises:
        DiskError: It cannot be written. An older one of the same name is untouched.
    """
    unfinished = UnfinishedCheckpoint(target)
    try:
        yield unfinished.path
        inner = unfinished.path / target.name
        for path in sorted(inner.iterdir()):
            path.rename(unfinished.path / path.name)
        inner.rmdir()
        unfinished.commit(lambda files: Manifest(step=step, files=files))
    except DiskError:
        raise
    except OSError as error:
        raise unfinished.error(error) from error
    finally:
        unfinished.abandon()


def rotate(folder: Path, limit: int | None, protected: set[Path]) -> None:
    """Remove the oldest checkpoints, as the Trainer does, so that so many are there; each as a whole."""
    if limit is None or limit <= 0:
        return
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    oldest = sorted((path for path in found if path not in protected), key=_age)
    for path in oldest[: max(0, len(found) - max(limit, len(protected)))]:
        remove(path)


def _age(path: Path) -> tuple[float, int]:
    return path.stat().st_mtime, int(path.name.rpartition("-")[2])


def newest_whole(folder: Path) -> Path | None:
    """The newest checkpoint that is as it was saved. Of damaged ones it is said."""
    found = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)] if folder.is_dir() else []
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            refuse_damaged(path)
            if (path / TRAINER_STATE_NAME).is_file():
                return path
            warnings.warn(f"'{path}' has no {TRAINER_STATE_NAME}: the one before is taken", stacklevel=3)
        except ConfigError as damaged:
            warnings.warn(f"{damaged}. The one before is taken", stacklevel=3)
    return None


def refuse_damaged(checkpoint: Path) -> None:
    """Compare a checkpoint with its manifest, once; older ones and those of plain Trainers have none.

    Raises:
        ConfigError: It is not as it was saved.
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
        ConfigError: Naming what is missing, or which steps the parts are of.
    """
    folder = Path(checkpoint)
    refuse_damaged(folder)
    missing = [] if (folder / f"{SCHEDULE}.json").is_file() or (folder / SCHEDULER_NAME).is_file() else [SCHEDULER_NAME]
    missing += [] if (folder / TRAINER_STATE_NAME).is_file() else [TRAINER_STATE_NAME]
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
    if not any((folder / name).is_file() for name in (f"{RANDOM_STATE}.json", _PLAIN_RANDOM_STATE)):
        warnings.warn(
            f"resume_from_checkpoint: '{checkpoint}' has no {_PLAIN_RANDOM_STATE}, so dropout and the like go on with "
            "other random numbers than the interrupted run",
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
