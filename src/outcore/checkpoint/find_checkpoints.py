"""Checkpoints in a folder: finding the newest one that is as it was saved, and removing those that are too many."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from outcore.core.errors import ConfigError
from outcore.memory.files.checkpoint_folder import clear_away, read_manifest, remove, small_file
from outcore.memory.files.locked_folder import held
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.spec.manifest import MANIFEST_NAME, Manifest

_STEP = re.compile(r"(?:step|checkpoint)-(\d+)")
_OURS = "step-"
"""Prefix of the names of our checkpoints. Others are a Trainer's, which removes old ones itself."""
TRAINER_STATE, RECORD, RANDOM_STATE = "trainer_state.json", "settings.json", "rng_state"
"""Files of a Trainer's checkpoint: what a Trainer writes last, the command's record, and the stem of random states."""
NOT_OF_A_MODEL = (
    *("optimizer*", "unit-*", "scheduler.*", "scaler.pt", "rng_state*", "training_args.bin"),
    *("rest.safetensors*", "rest-*", "state.json", "state.safetensors"),
    *(TRAINER_STATE, RECORD, MANIFEST_NAME, "checkpoint-*", "step-*", "runs"),
)
"""Files and folders of a checkpoint that only training needs."""
T = TypeVar("T")


def found_in(directory: Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a folder, newest first. They may be damaged."""
    if not os.path.isdir(directory):  # False if the system refuses to look, where Path raises
        return []
    steps = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted((pair for pair in steps if (pair[1] / MANIFEST_NAME).is_file()), reverse=True)


@contextmanager
def found(directory: Path, *, step: int | None = None, check: bool = True) -> Iterator[tuple[Path, Manifest]]:
    """Give the newest checkpoint that is as it was saved, or that of a step. It is not removed inside the block.

    Args:
        directory: One checkpoint, or a folder of them.
        step: Step of the checkpoint. None: the newest; a damaged one gives a warning, and the one before is taken.
        check: Read everything, and compare it with the checksums.

    Raises:
        ConfigError: There is no checkpoint, or it is damaged.
    """
    with ExitStack() as holding:
        if os.path.isfile(directory / MANIFEST_NAME) and step is None:
            holding.enter_context(held(directory))
            path, manifest = directory, read_manifest(directory, check=check)
        else:
            if os.path.isdir(directory):
                clear_away(directory)
            path, manifest = _newest(directory, step, holding, check=check)
        refuse_other_tensors(path, manifest)
        yield path, manifest


def refuse_other_tensors(path: Path, manifest: Manifest) -> None:
    """Compare the manifest of a checkpoint with the headers of its files.

    Raises:
        ConfigError: The files hold other tensors than the manifest says.
    """
    files = dict[str, WeightsDirectory]()
    for name, record in manifest.tensors.items():
        for part in record.parts:
            if part.file not in files:
                files[part.file] = WeightsDirectory.open(path, part.file.removesuffix(".safetensors"))
            there = record.name or name
            numel, dtype = math.prod(files[part.file].shape(there)), str(files[part.file].dtype(there))
            if (numel, dtype) != (part.stop - part.start, f"torch.{record.dtype}"):
                raise ConfigError(
                    f"checkpoint '{path}': expected {part.stop - part.start:,} {record.dtype} of '{name}' in "
                    f"'{part.file}', but it has {numel:,} {dtype.removeprefix('torch.')}; take another one "
                    "(outcore checkpoint ls)"
                )


def _newest(directory: Path, step: int | None, holding: ExitStack, *, check: bool) -> tuple[Path, Manifest]:
    newest = newest_whole(
        lambda: [path for number, path in found_in(directory) if step in (None, number)],
        lambda path: read_manifest(path, check=check),
        holding,
    )
    if newest is not None:
        return newest
    what = "a checkpoint" if step is None else f"a checkpoint of step {step}"
    plain = "it is a plain Trainer's (for resume_from_checkpoint)"
    raise ConfigError(
        f"checkpoint: expected {what} in '{directory}', but "
        f"{plain if os.path.isfile(directory / TRAINER_STATE) else 'there is none'}; name a folder that "
        "outcore.save_checkpoint() or a Trainer with OutcoreMixin wrote"
    )


def newest_whole(
    there: Callable[[], list[Path]], read: Callable[[Path], T], holding: ExitStack
) -> tuple[Path, T] | None:
    """Take the first of some checkpoints that can be read. A damaged one gives a warning, and the next one is tried.

    Args:
        there: Lists the checkpoints, newest first. Called again if one was removed meanwhile, because a newer one is
            there then.
        read: Reads a checkpoint; raises ``ConfigError`` if it is damaged.
        holding: Holds locks that keep the checkpoint from being removed, until it is closed.

    Returns:
        The checkpoint, and what was read. None if there are no checkpoints.

    Raises:
        ConfigError: All are damaged.
    """
    paths = there()
    for path in paths:
        holding.enter_context(held(path))
        try:
            return path, read(path)
        except ConfigError as damaged:
            if not path.exists():
                return newest_whole(there, read, holding)
            if path == paths[-1]:
                raise
            warnings.warn(f"{damaged}. The one before it is taken", stacklevel=7)
    return None


def prune(
    directory: Path, keep: int, *, newest: int | None = None, of_trainers: bool = False, check: bool = False
) -> list[Path]:
    """Remove all checkpoints older than the newest ``keep`` whole ones. A checkpoint that is being read stays.

    Args:
        directory: A folder of checkpoints.
        keep: Number of whole checkpoints to keep.
        newest: Leave checkpoints of later steps than this alone. None: there are none.
        of_trainers: Remove checkpoints of Trainers, too, except the one that the newest whole one calls the best.
        check: Read every byte to find out whether a checkpoint is whole. False: compare sizes of files only.

    Returns:
        Folders of the removed checkpoints.

    Raises:
        DiskError: A checkpoint cannot be removed.
    """
    whole, removed, best = 0, list[Path](), ""
    for step, path in found_in(directory):
        if (newest is not None and step > newest) or not (of_trainers or path.name.startswith(_OURS)):
            continue
        if whole >= keep:
            removed += [path] if path.name != best and remove(path) else []
            continue
        with suppress(ConfigError):
            manifest = read_manifest(path, check=check)
            best = best or _best_of(path, manifest)
            whole += 1
    return removed


def _best_of(path: Path, manifest: Manifest) -> str:
    """Name of the checkpoint that a Trainer's checkpoint calls the best so far; empty if there is none."""
    if TRAINER_STATE not in manifest.files:
        return ""
    return Path(json.loads(small_file(path / TRAINER_STATE)).get("best_model_checkpoint") or "").name
