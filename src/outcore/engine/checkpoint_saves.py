"""Homes on their way into a checkpoint's files, beside training. See [Note: saving beside training]."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from outcore.core.errors import OutcoreError, UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.order.ledger import Home, Ledger


class Writer(Protocol):
    """Takes the bytes of a file, front to back."""

    def write(self, nbytes: int, fill: Callable[[int, int, torch.Tensor], None]) -> None:
        """Append bytes. See ``memory.files.checkpoint_file.CheckpointFile``."""


Spans = Sequence[tuple[int, int]]
"""Ranges [start, stop) of a home's bytes, in the order in which they stand in a file; ascending."""


Read = Callable[[int, int], torch.Tensor]
"""Returns the bytes [start, stop) of a source: 1D uint8 in host memory, freshly allocated."""


class EditedError(UnsupportedError):
    """Weights were edited unseen while they were saved. The next save of this model waits for such units."""


class Source(NamedTuple):
    """The bytes [start, stop) of a home."""

    unit: Ledger[Handle]
    home: Home[Handle]
    start: int
    stop: int


class Save:
    """A checkpoint that is being written."""

    def __init__(
        self,
        path: Path,
        remove: Callable[[], None],
        told: Callable[[OSError], OutcoreError],
        stop: Callable[[], None] | None = None,
    ) -> None:
        """Begin with nothing written.

        Args:
            path: Where it will be.
            remove: Removes what was written. Idempotent.
            told: Turns an ``OSError`` into the error for the user.
            stop: Ends writing but removes nothing: other ranks may still write, and must not find it gone. Idempotent.
        """
        self.path = path
        self.error: BaseException | None = None
        self.complaint: Exception | None = None
        """What went wrong after it was durable: older checkpoints could not be removed."""
        self.is_told = False
        """Whether a caller has waited for it, and so knows how it ended."""
        self.num_pieces = 0
        """Pieces submitted. Counted apart from those written, which another thread counts."""
        self.num_written = 0
        self.busy_s = 0.0
        """Seconds that writing took, without waiting."""
        self._is_durable = False
        self._is_committing = False
        self._remove, self._told, self._stop = remove, told, stop or remove
        self._is_shared = stop is not None
        self._failing = threading.Lock()
        self._last: tuple[Handle, Device] | None = None

    def ends_with(self, last: Handle, device: Device) -> None:
        """Note the last operation: everything was submitted."""
        self._last = last, device

    def fail(self, error: BaseException) -> None:
        """Note that the save has failed. The first error counts: others follow from it."""
        with self._failing:
            if self.done or self._is_committing:
                return
            if isinstance(error, OSError) and not isinstance(error, OutcoreError):
                told = self._told(error)
                told.__cause__ = error
                error = told
            self.error = error
        self._stop()

    def close(self) -> None:
        """Remove what was written if the save has failed. Nothing writes any more."""
        if self.error is not None:
            self._remove()

    def end_at_once(self) -> None:
        """Fail the save, unless it is as good as durable: a run that is ended at once does not wait for it."""
        self.fail(OutcoreError("expected to wait for the save, but the run was ended at once"))
        self.is_told = True

    def refuse_missing(self) -> None:
        """Raise if something that was submitted was not written."""
        if self.num_written < self.num_pieces:
            raise OutcoreError("expected whole updates to save, but one has failed; see its own error")

    def commit(self, work: Callable[[], None]) -> bool:
        """Do what makes it durable, unless it has failed; meanwhile ``fail`` has no effect. Returns whether it did."""
        with self._failing:
            if self.done:
                return False
            self._is_committing = True
        began_s = time.monotonic()
        try:
            work()
            self._is_durable = True
            self.busy_s += time.monotonic() - began_s
        finally:
            self._is_committing = False
        return True

    @property
    def done(self) -> bool:
        """Whether it is durable, or has failed."""
        return self._is_durable or self.error is not None

    def wait(self) -> Path:
        """Block until the checkpoint is durable.

        Returns:
            Its folder.

        Raises:
            DiskError: It could not be written. Older checkpoints are untouched, and the model can go on. Or it is
                there, but may not survive a power loss; the error says so.
            OutcoreError: What was to be saved has failed.
        """
        # If other ranks may still write, a failed save is removed only at its end.
        if self._last is not None and (self.error is None or (self._is_shared and not self.is_told)):
            handle, device = self._last
            device.wait("checkpoint saved", handle)
        if self.complaint is not None and not self.is_told:
            warnings.warn(f"checkpoint '{self.path}' is there, but: {self.complaint}", RuntimeWarning, stacklevel=2)
        self.is_told = True
        if self.error is not None:
            raise self.error
        return self.path


def append_bytes(file: Writer, data: bytes | memoryview) -> None:
    """Append bytes that are in memory. Raises: OSError."""

    def fill(start: int, stop: int, to: torch.Tensor) -> None:
        to.numpy().data[:] = data[start:stop]

    if len(data):
        file.write(len(data), fill)


@contextmanager
def last_save(attachment: Any, error: BaseException | None) -> Iterator[None]:
    """Wait for the last save, then run the block. Behind it, raise the save's error, or add it to the run's own error.

    Args:
        attachment: The model's attachment; None if it is not prepared.
        error: The error that ends the run, if there is one.
    """
    failed: BaseException | None = None
    try:
        if attachment is not None:
            attachment.engine.opened.saves.finish()
    except BaseException as caught:
        failed = caught
        if not isinstance(caught, Exception):  # an interrupt: the block does not wait for the save either
            attachment.engine.opened.saves.end_at_once()
    yield
    if failed is not None:
        if error is None or not isinstance(failed, Exception):
            raise failed
        error.add_note(f"the last save failed: {failed}")
