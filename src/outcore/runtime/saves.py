"""Homes on their way into a checkpoint's files, beside training. See [Note: saving beside training]."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from outcore.core.errors import OutcoreError
from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.device.device import Device, aligned_bytes
from outcore.device.lanes import Handle
from outcore.memory.arena import TEMPORARY, Arena, Buffer, Region
from outcore.memory.disk import Extent
from outcore.order.ledger import Home, Ledger, Slot
from outcore.order.saves import SaveOrder
from outcore.runtime.unit.port import LivePort
from outcore.runtime.unit.tiers import Tiers
from outcore.spec.checkpoint import BLOCK_BYTES
from outcore.spec.lanes import Lane

SLOT_BYTES = 4 * BLOCK_BYTES


class Writer(Protocol):
    """Takes the bytes of a file, front to back."""

    def write(self, nbytes: int, fill: Callable[[int, int, torch.Tensor], None]) -> None:
        """Append. See ``memory.checkpoint_folder.CheckpointFile``."""


class Save:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, abandon: Callable[[], None], told: Callable[[OSError], OutcoreError]) -> None:
        """Args: path: Where it will be. abandon: Leaves nothing of it. told: The error for the user."""
        self.path = path
        self.error: BaseException | None = None
        self.is_told = False
        """Whether somebody has waited for it."""
        self._is_durable = False
        self._abandon, self._told = abandon, told
        self._last: tuple[Handle, Device] | None = None

    def ends_with(self, last: Handle, device: Device) -> None:
        """Everything was submitted."""
        self._last = last, device

    def fail(self, error: BaseException) -> None:
        """It will not be."""
        self.error = error
        if isinstance(error, OSError) and not isinstance(error, OutcoreError):
            self.error = self._told(error)
            self.error.__cause__ = error
        self._abandon()

    def complete(self) -> None:
        """It is durable."""
        self._is_durable = True

    @property
    def done(self) -> bool:
        """Whether it is durable, or has failed."""
        return self._is_durable or self.error is not None

    def wait(self) -> Path:
        """Block until the checkpoint is durable.

        Returns:
            Its folder.

        Raises:
            DiskError: It could not be written. Older checkpoints are untouched, and the model can go on.
            OutcoreError: What was to be saved has failed.
        """
        if not self.done and self._last is not None:
            handle, device = self._last
            device.wait("checkpoint saved", handle)
        self.is_told = True
        if self.error is not None:
            raise self.error
        return self.path


class Saves:
    """Of one engine: one at a time."""

    def __init__(self, device: Device, port: LivePort, tiers: Tiers) -> None:
        self._device, self._port, self._tiers = device, port, tiers
        self._order: SaveOrder[Handle]
        self._running: Save | None = None
        self._missing = 0
        """Pieces of the running one that were not written yet."""

    def make_room(self) -> None:
        """Wait for the one before. Raises: what that one ended with, if nobody was told."""
        running, self._running = self._running, None
        if running is not None and not running.is_told:
            running.wait()

    def begin(self, save: Save) -> None:
        """Nothing of it was submitted."""
        self._running, self._missing = save, 0
        if not hasattr(self, "_order"):
            arena = Arena("save", aligned_bytes(2 * SLOT_BYTES, torch.device("cpu")))
            slots = [Slot[Handle](f"save slot {i}", "host", SLOT_BYTES, arena.take(SLOT_BYTES)) for i in range(2)]
            self._order = SaveOrder(self._port, slots)

    def finish(self) -> None:
        """Wait for the one that is under way; say it if it failed and nobody was told."""
        running, self._running = self._running, None
        if running is None or running.is_told:
            return
        try:
            running.wait()
        except OutcoreError as error:
            warnings.warn(f"the last checkpoint was not saved: {error}", RuntimeWarning, stacklevel=2)

    def abandon(self) -> None:
        """The lanes have stopped: leave nothing of what was not written."""
        if self._running is not None and not self._running.done:
            self._running.fail(OutcoreError("expected a model whose checkpoint can be written, but it was closed"))

    def home(self, unit: Ledger[Handle], home: Home[Handle], span: tuple[int, int], save: Save, file: Writer) -> None:
        """Let the bytes [start, stop) of a home be appended to a file, with zeros up to a multiple of 4 KiB.

        Weights that live on the device are written before this returns: whoever has them may change them in place.
        """
        if home.kind == "weights" and home.tier == "device":
            self._at_once(home, span, file)
            return

        def copy(start: int, stop: int, slot: Slot[Handle] | None) -> Callable[[], None]:
            memory = home.span(start, stop).memory if slot is None else slot.span(stop - start).memory
            self._missing += 1
            return partial(self._write, save, file, memory)

        self._order.home(unit, home, span, copy)

    def last(self, save: Save, name: str, finish: Callable[[], None]) -> None:
        """Behind everything that was submitted."""

        def end() -> None:
            if save.error is not None:
                return
            try:
                self._refuse_missing()
                finish()
                save.complete()
            except Exception as error:
                save.fail(error)

        save.ends_with(self._device.submit(Lane.SAVE, name, end), self._device)

    def _refuse_missing(self) -> None:
        if self._missing:
            raise OutcoreError("expected whole updates to save, but one has failed; see its own error")

    def _write(self, save: Save, file: Writer, memory: Buffer | Extent) -> None:
        """What fails fails the save, and not the training."""
        if save.error is not None:
            return
        try:
            file.write(align_up(memory.nbytes, PAGE_BYTES), partial(self._fill, memory))
            self._missing -= 1
        except Exception as error:
            save.fail(error)

    def _at_once(self, home: Home[Handle], span: tuple[int, int], file: Writer) -> None:
        for start in range(*span, SLOT_BYTES):
            stop = min(start + SLOT_BYTES, span[1])
            memory = home.span(start, stop).memory
            self._device.compute("save weights", reads=[memory.region], after=home.before_read())
            copied = Buffer(memory.bytes.cpu(), Region(TEMPORARY, 0, stop - start))
            file.write(align_up(stop - start, PAGE_BYTES), partial(self._fill, copied))

    def _fill(self, memory: Buffer | Extent, start: int, stop: int, to: torch.Tensor) -> None:
        """Bytes of a part of a home; zeros behind its end."""
        inside = min(stop, memory.nbytes) - start
        if isinstance(memory, Extent):
            self._tiers.store().read(memory.part(start, start + inside), to[:inside])
        else:  # numpy's copies let other threads run, and begin none of their own
            np.copyto(to[:inside].numpy(), memory.bytes[start : start + inside].numpy())
        to[inside:].zero_()
