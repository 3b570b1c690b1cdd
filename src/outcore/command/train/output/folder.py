"""The folder that a run writes to: checked before anything is written, and left as it was if the run cannot begin.

[Note: one run per folder] A run holds a lock on the folder itself (``flock``): no file marks it, and it goes with the
process, however that ends. Only the run that holds it exclusively writes, and removes what killed runs left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from outcore.checkpoint.find_checkpoints import NOT_OF_A_MODEL, TRAINER_STATE
from outcore.checkpoint.weights.small_files import SmallFilesError
from outcore.core.errors import ConfigError
from outcore.core.quantities import format_bytes
from outcore.integrations.checkpoints import refuse_damaged
from outcore.memory.files.checkpoint_folder import clear_away, read_manifest
from outcore.spec.manifest import MANIFEST_NAME

PLAN, METRICS, MODEL = "plan.json", "metrics.jsonl", "model"
_CACHE = ".outcore-data-"
_DAMAGED = ".damaged"
_IS_OURS = re.compile(
    rf"{re.escape(PLAN)}|{re.escape(METRICS)}|{re.escape(_CACHE)}.*|checkpoint-\d+({re.escape(_DAMAGED)})?"
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int


@final
class OutputFolder:
    """The folder of ``--out``. Nothing is written before ``opened``, whose work is undone unless the run begins."""

    def __init__(self, path: Path, *, resume: bool | Literal["auto"]) -> None:
        """Check the folder, and look for checkpoints.

        Args:
            path: The folder, which may be missing.
            resume: Whether to go on with what is there; else it must be empty. ``auto``: begin anew where a run was
                stopped before it saved anything.

        Raises:
            ConfigError: The folder cannot be written to; another run writes to it; it is not empty; or ``resume`` finds
                nothing to resume from.
        """
        self.path, self._resume = path, resume
        self.checkpoint: Checkpoint | None = None
        """The newest complete checkpoint, if the run resumes from one. None: it begins at step 0."""
        self.incomplete: list[Path] = []
        """Newer checkpoints, which a run was interrupted in writing."""
        self.damaged: dict[Path, str] = {}
        """Newer checkpoints that are not as they were saved, and what is wrong with them."""
        self.has_begun = False
        """Whether the run has begun. What is written stays then."""
        _refuse_unusable(path)
        try:
            is_there = path.is_dir()
        except OSError as error:  # its name is too long
            raise _unwritable(path, error) from error
        if is_there:
            with _locked(path, fcntl.LOCK_SH):
                self._look(_refuse_cut)
        else:
            self._look(_refuse_cut)

    def _look(self, refuse: Callable[[Path], None]) -> None:
        """Args: refuse: Raises ``ConfigError`` if a checkpoint with a manifest is not as it was saved."""
        self._stale = [p for p in self.path.glob(f"{_CACHE}*") if p.is_dir() and not p.is_symlink()]
        names = sorted(p.name for p in self.path.iterdir()) if self.path.is_dir() else []
        if self._resume:
            self.checkpoint, self.incomplete, self.damaged = _newest(self.path, refuse)
            if self.checkpoint is None:
                self._begin_anew(names)
        elif names:
            raise ConfigError(
                f"--out: expected an empty or a new folder, but '{self.path}' holds '{names[0]}'; pass --resume auto "
                "to go on with the run in it, or name another"
            )

    def _begin_anew(self, names: Sequence[str]) -> None:
        """Allow a run to begin at step 0. Raise unless ``resume`` permits it and only a run's first steps are lost."""
        where = f"--resume: expected a complete checkpoint in '{self.path}', but"
        for why in self.damaged.values():
            raise ConfigError(f"{where} none is as it was saved: {why}")
        if self._resume != "auto":
            found = f"only {self.incomplete[-1].name}, which is incomplete" if self.incomplete else "there is none"
            raise ConfigError(
                f"{where} {found}; begin anew with --resume auto, and with --save-every to have checkpoints"
            )
        if MODEL in names:
            raise ConfigError(
                f"{where} there is only a finished {MODEL}/, which a new run would replace; name another --out, or "
                f"remove '{self.path / MODEL}'"
            )
        if names and not any(_IS_OURS.fullmatch(name) for name in names):
            raise ConfigError(
                f"--out: expected a new folder, or one that a run has written to, but '{self.path}' holds "
                f"'{names[0]}'; name another"
            )

    def refuse_full(self, needed_bytes: int) -> None:
        """Raise if the least that the run will write does not fit.

        Raises:
            ConfigError: Too little is free.
        """
        free_bytes = shutil.disk_usage(_existing(self.path)).free
        if free_bytes < needed_bytes:
            raise ConfigError(
                f"--out: expected room for {format_bytes(needed_bytes)} (the model, and with --save-every a "
                f"checkpoint), but {format_bytes(free_bytes)} are free at '{self.path}'; free some, "
                "or name a folder on another drive"
            )

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Make the folder, and keep other runs from writing to it. See [Note: one run per folder].

        Yields:
            A folder in it for what the run needs only while it runs; removed at the end.

        Raises:
            ConfigError: It cannot be made or written to; another run writes to it, or has written to it meanwhile.
        """
        made = [p for p in (self.path, *self.path.parents) if not os.path.exists(p)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _remove(made)
            raise _unwritable(self.path, error) from error
        with _locked(self.path, fcntl.LOCK_EX):
            try:
                self._look(refuse_damaged)
                cache = Path(tempfile.mkdtemp(prefix=_CACHE, dir=self.path))
            except OSError as error:
                _remove(made)
                raise _unwritable(self.path, error) from error
            try:
                yield cache
            finally:
                shutil.rmtree(cache, ignore_errors=True)
                if not self.has_begun:
                    _remove(made)

    def begin(self) -> None:
        """Begin the run: what is written from now on stays. What a killed run left half-done is removed."""
        self.has_begun = True
        clear_away(self.path)
        for path in (*self.incomplete, *self._stale):
            shutil.rmtree(path)
        for path in self.damaged:
            aside = path.with_name(path.name + _DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        self.incomplete, self._stale, self.damaged = [], [], {}

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint that is there now."""
        return _newest(self.path, _refuse_cut)[0]

    def model_of(self, checkpoint: Checkpoint, *, best: bool) -> None:
        """Copy the model from the last checkpoint to ``model/``, unless what is there was saved after it.

        Args:
            checkpoint: The last checkpoint; what only training needs is left out.
            best: Take the best checkpoint instead, as the last one names it.
        """
        model, state = self.path / MODEL, checkpoint.path / TRAINER_STATE
        if model.is_dir() and model.stat().st_mtime >= state.stat().st_mtime:
            return
        named = json.loads(state.read_text()).get("best_model_checkpoint") if best else None
        source = self.path / Path(named).name if named else checkpoint.path
        with self.new_model() as folder:
            left_out = shutil.ignore_patterns(*NOT_OF_A_MODEL)
            # The copies' own times say that this model is newer than the checkpoints.
            shutil.copytree(source, folder, ignore=left_out, copy_function=shutil.copyfile, dirs_exist_ok=True)

    @contextmanager
    def new_model(self) -> Iterator[Path]:
        """Yield a folder that becomes ``model/`` when the block ends, in place of an older one.

        If the block fails, the folder becomes ``model/`` only if nothing but small files beside its weights is missing.

        Raises:
            ConfigError: It cannot be made.
        """
        partial, model = self.path / f".{MODEL}-partial", self.path / MODEL
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            yield partial
        except SmallFilesError:
            _replace(model, partial)
            raise
        _replace(model, partial)


def _replace(model: Path, whole: Path) -> None:
    shutil.rmtree(model, ignore_errors=True)
    whole.rename(model)


def _refuse_unusable(path: Path) -> None:
    existing = _existing(path)
    if not existing.is_dir():
        raise ConfigError(
            f"--out: expected a folder that exists or can be made, but '{existing}' is a file; name another"
        )
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise _unwritable(existing, None)


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """Hold a lock on a folder. File systems without locks, such as NFS, are used without one."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        is_free = _lock(folder, kind)
        # Another run that could not begin may just have removed the folder.
        if not is_free or not (path.exists() and os.path.samestat(path.stat(), os.fstat(folder))):
            raise ConfigError(
                f"--out: expected a folder that no other run writes to, but one that still runs has '{path}'; wait for "
                "its end or stop it, or name another"
            )
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # closing is not enough: workers of the data loader inherit it
        os.close(folder)


def _lock(folder: int, kind: int) -> bool:
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _unwritable(path: Path, error: OSError | None) -> ConfigError:
    if error is not None and error.errno == errno.ENOSPC:
        return ConfigError(f"--out: expected room at '{path}', but its drive is full; free some, or name another")
    why = "is not writable" if error is None else f"cannot be written to: {error.strerror}"
    return ConfigError(f"--out: expected a folder to write to, but '{path}' {why}; name one that is yours")


def _existing(path: Path) -> Path:
    """Return the folder itself, or the nearest above it that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if os.path.exists(p))


def _remove(made: list[Path]) -> None:
    """Remove folders that were made, the innermost first, as long as they are empty."""
    for path in made:
        try:
            path.rmdir()
        except OSError:
            if os.path.exists(path):  # another program has put something there
                return


def _newest(path: Path, refuse: Callable[[Path], None]) -> tuple[Checkpoint | None, list[Path], dict[Path, str]]:
    """Return the newest complete checkpoint, and of newer ones the incomplete, oldest first, and the damaged."""
    incomplete: list[Path] = []
    damaged: dict[Path, str] = {}
    newest: Checkpoint | None = None
    steps = {p: step for p in (path.iterdir() if path.is_dir() else ()) if (step := _step(p)) is not None}
    for folder in sorted(steps, key=steps.__getitem__, reverse=True):
        if (folder / MANIFEST_NAME).is_file():
            try:
                refuse(folder)
            except ConfigError as error:
                damaged[folder] = str(error)
                continue
        elif not _is_complete(folder):
            incomplete.insert(0, folder)
            continue
        newest = Checkpoint(path=folder, step=steps[folder])
        break
    return newest, incomplete, damaged


def _refuse_cut(folder: Path) -> None:
    """Raise if a checkpoint is not whole, as far as names and sizes tell."""
    read_manifest(folder, check=False)


def _is_complete(folder: Path) -> bool:
    try:
        return isinstance(json.loads((folder / TRAINER_STATE).read_text()), dict)
    except (FileNotFoundError, ValueError):
        return False
    except OSError as error:  # it may be complete: it must not be taken for half-done and removed
        raise ConfigError(
            f"--out: expected to read '{folder / TRAINER_STATE}', but got: {error}; make it readable, or move it away"
        ) from error


def _step(folder: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match.group(1)) if match is not None and folder.is_dir() and not folder.is_symlink() else None
