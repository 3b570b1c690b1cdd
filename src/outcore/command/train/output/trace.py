"""``--trace FILE``: what every lane did in a few steps of the run, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import final

from outcore.command.train.output.folder import METRICS, MODEL, PLAN
from outcore.core.errors import ConfigError
from outcore.device.recorder import Recorder
from outcore.spec.timeline import TRACE_BEGINNING, Timeline

TRACED_STEPS = 3
WARM_UP_STEPS = 2  # in the first steps, memory is touched and kernels are chosen for the first time
_IS_OURS = re.compile(rf"{re.escape(PLAN)}|{re.escape(METRICS)}.*|\.?{re.escape(MODEL)}.*|checkpoint-\d+")


def trace_target(path: Path, *, out: Path) -> Path:
    """Return the file that ``--trace`` names, with links resolved. Nothing is written yet.

    Args:
        path: The file. It may be missing; a trace that is there is replaced later.
        out: The run's output folder, which may hold the file and need not be there yet.

    Raises:
        ConfigError: It cannot be written to, or would replace something else.
    """
    try:
        target, out = path.resolve(), out.resolve()
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(target)  # the name may be too long
        _refuse_other(path, target)
        _refuse_unusable(path, target.parent, out)
    except (OSError, RuntimeError) as error:  # errors of the drive; links in a circle
        raise _unwritable(path, error) from error
    if target == out or (out in target.parents and _IS_OURS.fullmatch(target.relative_to(out).parts[0])):
        raise ConfigError(
            f"--trace: expected a file of its own, but the run itself writes '{path}'; name it trace.json"
        )
    return target


def write_trace(target: Path, timeline: Timeline) -> None:
    """Write a timeline, atomically. If that fails there is only a warning: no run is lost over it."""
    try:
        # Written under a name that nothing else has, in the same folder, then moved.
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            partial.write_text(timeline.to_trace())
            partial.replace(target)
    except OSError as error:
        warnings.warn(f"--trace: '{target}' could not be written: {error.strerror}", stacklevel=1)


@final
class StepTracer:
    """Records ``TRACED_STEPS`` steps of a run, after ``WARM_UP_STEPS``, or the last ones of a short run."""

    def __init__(self, target: Path, recorder: Recorder, *, done: int, steps: int) -> None:
        """Record nothing yet.

        Args:
            target: File that the timeline is written to.
            recorder: The recorder of the run's device.
            done: Steps that an earlier run did.
            steps: Steps of the whole run.
        """
        self._target, self._recorder = target, recorder
        self._first = done + 1 + max(0, min(WARM_UP_STEPS, steps - done - TRACED_STEPS))
        self._last = self._first + TRACED_STEPS - 1
        self._is_recording = False

    def begin_step(self, step: int) -> None:
        """Begin a step, counted from 1."""
        if step == self._first:
            self._recorder.begin(num_steps=TRACED_STEPS)
            self._is_recording = True

    def is_last(self, step: int) -> bool:
        """Return whether a step is the last one to be recorded."""
        return step == self._last

    def close(self) -> None:
        """Record no more, and write what was recorded, if anything was. Waits for the device. Idempotent."""
        if self._is_recording:
            self._is_recording = False
            self._recorder.end()
            with suppress(RuntimeError):  # a device that failed has no times to give
                write_trace(self._target, self._recorder.timeline())


def _refuse_other(path: Path, target: Path) -> None:
    """Raise if the path holds something that is no trace: a wrong name must not cost a data file."""
    if not os.path.lexists(target):
        return
    if not target.is_file():
        kind = "a folder" if target.is_dir() else "not a file"
        raise ConfigError(f"--trace: expected a file that exists or can be made, but '{path}' is {kind}; name another")
    with target.open("rb") as file:
        beginning = file.read(len(TRACE_BEGINNING))
    if beginning not in (b"", TRACE_BEGINNING.encode()):
        raise ConfigError(
            f"--trace: expected a new file or an older trace to replace, but '{path}' holds something else; name "
            "another, or remove it"
        )
    if not os.access(target, os.W_OK):
        raise _unwritable(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def _refuse_unusable(path: Path, folder: Path, out: Path) -> None:
    if not folder.is_dir():
        if folder == out:  # made when the run begins, and judged as --out
            return
        found = "is a file" if folder.exists() else "is not"
        raise ConfigError(
            f"--trace: expected a folder that is there, but '{path.parent}' {found}; make it, or name another"
        )
    with tempfile.TemporaryFile(dir=folder):
        """The folder can be written to. The file never has a name."""


def _unwritable(path: Path, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"--trace: expected a file to write to, but '{path}' cannot be written to: {why}; name another")
