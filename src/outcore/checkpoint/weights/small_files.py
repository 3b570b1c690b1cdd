"""The small files beside weights: each is tried, whatever happens to the others, and what fails is told by name."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outcore.core.errors import ConfigError, DiskError, OutcoreError
from outcore.memory.files.staged_files import staged_files

Writers = Mapping[tuple[str, ...], Callable[[Path], object]]
"""What writes small files into a folder. The keys name the files in the order in which they are written."""
_LONGEST = 300
"""Characters of a library's message; some write pages."""


class SmallFilesError(OutcoreError):
    """Weights were written as a whole, but not all of the small files beside them."""

    def __init__(self, directory: str | Path, failed: Mapping[str, str]) -> None:
        """Args: directory: Where the weights are. failed: What was wrong, by file."""
        said = "; ".join(f"{name}: {why}" for name, why in failed.items())
        super().__init__(
            f"'{directory}': the weights are there and whole, but expected small files beside them could not be "
            f"written: {said}; correct what is named, and write it there with its own save_pretrained"
        )
        self.failed = failed


def write_small_files(directory: str | Path, writers: Writers, *, edited: Sequence[str] = ()) -> None:
    """Write the small files beside weights that are in place already. All are tried, and those that can be stay.

    Args:
        directory: Where the weights are.
        writers: What writes the files.
        edited: As for ``staged_files``.

    Raises:
        SmallFilesError: Some could not be written.
    """
    try:
        with staged_files(directory, edited=edited) as staged:
            failed = _tried(staged, writers)
    except DiskError as error:
        raise SmallFilesError(directory, {"all of them": str(error)}) from error
    if failed:
        said = {name: _said(error) for name, error in failed.items()}
        raise SmallFilesError(directory, said) from next(iter(failed.values()))


def rehearse_small_files(writers: Writers, model_folder: str) -> None:
    """Write the small files to a scratch folder, which goes away again: what is refused on saving is refused at once.

    Args:
        writers: What writes the files.
        model_folder: Folder or configuration that the model came from, for the error; empty if that is not known.

    Raises:
        ConfigError: A file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="outcore-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the save itself warns
        failed = _tried(Path(scratch), writers)
    for name, error in failed.items():
        folder = Path(model_folder).parent if Path(model_folder).is_file() else Path(model_folder)
        is_there = bool(model_folder) and (folder / name).is_file()
        where = f"correct or remove it in '{folder}'" if is_there else "correct it in the model before training"
        raise ConfigError(
            f"{name}: expected what can be saved beside the trained weights, but its library reads it and refuses to "
            f"save it: {_said(error)}; {where}"
        ) from error


def _tried(folder: Path, writers: Writers) -> dict[str, Exception]:
    """Try all writers. Returns: What was raised, by the file at which it was raised."""
    failed: dict[str, Exception] = {}
    for files, write in writers.items():
        try:
            write(folder)
        except Exception as error:  # a library may raise anything
            failed[next((name for name in files if not (folder / name).is_file()), files[-1])] = error
    return failed


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
