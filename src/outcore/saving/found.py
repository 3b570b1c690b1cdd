"""Which checkpoints a folder holds: the newest that is as it was saved, and those that are too many."""

from __future__ import annotations

import json
import math
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
from outcore.spec.checkpoint import MANIFEST_NAME, Manifest

_STEP = re.compile(r"(?:step|checkpoint)-(\d+)")
_OURS = "step-"
"""Others are a Trainer's, who rotates them himself."""
_TRAINER_STATE = "trainer_state.json"
T = TypeVar("T")


def found_in(directory: Path) -> list[tuple[int, Path]]:
    """Checkpoints in a folder, by step, the newest first. Whether they are whole is another question."""
    if not directory.is_dir():
        return []
    steps = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted((pair for pair in steps if (pair[1] / MANIFEST_NAME).is_file()), reverse=True)


@contextmanager
def found(directory: Path, *, step: int | None = None, check: bool = True) -> Iterator[tuple[Path, Manifest]]:
    """The newest checkpoint that is as it was saved, or that of a step. Nobody removes it inside the block.

    Args:
        directory: One checkpoint, or a folder of them.
        step: Which. None: of damaged ones it is said, and the one before is taken.
        check: Read everything, and compare with its checksums.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    with ExitStack() as holding:
        if (directory / MANIFEST_NAME).is_file() and step is None:
            holding.enter_context(held(directory))
            yield _of_a_run(directory, read_manifest(directory, check=check))
            return
        if directory.is_dir():
            clear_away(directory)
        yield _of_a_run(*_newest(directory, step, holding, check=check))


def _of_a_run(path: Path, manifest: Manifest) -> tuple[Path, Manifest]:
    if _TRAINER_STATE in manifest.files:
        raise ConfigError(
            f"checkpoint '{path}': expected what outcore.save_checkpoint() wrote, but it is a Trainer's; give it to "
            "--resume or resume_from_checkpoint. from_pretrained reads the model in it as it is"
        )
    refuse_other_tensors(path, manifest)
    return path, manifest


def refuse_other_tensors(path: Path, manifest: Manifest) -> None:
    """Compare the manifest of a checkpoint with the headers of its files.

    Raises:
        ConfigError: They hold other tensors: whoever wrote both did not mean it.
    """
    files = dict[str, WeightsDirectory]()
    for name, record in manifest.tensors.items():
        for part in record.parts:
            if part.file not in files:
                files[part.file] = WeightsDirectory.open(path, part.file.removesuffix(".safetensors"))
            numel, dtype = math.prod(files[part.file].shape(name)), str(files[part.file].dtype(name))
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
    raise ConfigError(
        f"checkpoint: expected {what} in '{directory}', but there is none; name a folder that "
        "outcore.save_checkpoint() wrote"
    )


def newest_whole(
    there: Callable[[], list[Path]], read: Callable[[Path], T], holding: ExitStack
) -> tuple[Path, T] | None:
    """The first of some checkpoints that can be read. Of damaged ones it is said, and the next one is taken.

    Args:
        there: They, the newest first; asked again where one was removed meanwhile, behind a newer one.
        read: Raises ``ConfigError`` if one is damaged.
        holding: Nobody removes it until this is closed.

    Returns:
        It, and what was read. None: there are none.

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
            warnings.warn(f"{damaged}. The one before is taken", stacklevel=7)
    return None


def prune(
    directory: Path, keep: int, *, newest: int | None = None, of_trainers: bool = False, check: bool = False
) -> list[Path]:
    """Remove all but the newest ``keep`` that are whole, and older ones that are not. What somebody reads stays.

    Args:
        directory: Of checkpoints.
        keep: How many.
        newest: Leave those of later steps alone. None: there are none.
        of_trainers: Those of Trainers too, but for the one that the newest whole one calls the best.
        check: Take those for whole of which every byte is as it was saved; else their files' sizes are compared.

    Returns:
        What was removed.

    Raises:
        DiskError: One cannot be removed.
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
    """The name of the checkpoint that a Trainer's calls the best so far; empty if none."""
    if _TRAINER_STATE not in manifest.files:
        return ""
    return Path(json.loads(small_file(path / _TRAINER_STATE)).get("best_model_checkpoint") or "").name
