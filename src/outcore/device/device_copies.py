"""Copies and sums of device memory by threads that serve no lane, beside the work of compute and lanes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
import torch

_COLUMNS = 4093
"""Columns in ``sum_of_words``: a prime, so that rows of a matrix that change places also change columns."""


@final
class DeviceChecksum:
    """``sum_of_words`` of memory on a device, taken at the first call of ``take`` and then kept."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Take nothing yet."""
        self._memory, self._taking = memory, threading.Lock()
        self._value: torch.Tensor | None = None
        self._taken: torch.cuda.Event | None = None

    def take(self) -> torch.Tensor:
        """Return the sum. Later work on the caller's stream is ordered behind it, whichever stream computed it."""
        with self._taking:
            if self._value is None:
                self._value = sum_of_words(self._memory)
                if self._memory.is_cuda:
                    self._taken = torch.cuda.Event()
                    self._taken.record(torch.cuda.current_stream(self._memory.device))
            elif self._taken is not None:
                self._taken.wait(torch.cuda.current_stream(self._memory.device))
            return self._value


class DeviceCopies:
    """Copies and sums on one device.

    On CUDA it has its own stream: on the default stream its work would wait behind all work of compute.
    """

    def __init__(self, torch_device: torch.device) -> None:
        """Takes no memory."""
        self._stream = torch.cuda.Stream(torch_device) if torch_device.type == "cuda" else None

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy into host memory; the bytes are there when this returns."""
        if source.is_cpu:  # numpy's copies release the interpreter lock and start no threads
            np.copyto(target.numpy(), source.numpy())
            return
        with self._here():
            target.copy_(source)

    def take(self, sums: Iterable[DeviceChecksum]) -> None:
        """Take the sums that are not taken yet."""
        with self._here():
            for each in sums:
                each.take()

    def is_sum_of(self, before: DeviceChecksum, memory: torch.Tensor) -> bool:
        """Whether ``sum_of_words`` of the memory still equals an earlier sum."""
        with self._here():
            return torch.equal(sum_of_words(memory), before.take())

    def _here(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def sum_of_words(memory: torch.Tensor) -> torch.Tensor:
    """Sum the 8-byte words of some bytes (1D) by columns: a word that changes, or moves to another column, shows.

    Does not wait for the device.
    """
    whole = memory.numel() // 8 * 8
    words, rest = memory[:whole].view(torch.int64), memory[whole:].long()
    rows = words.numel() // _COLUMNS * _COLUMNS
    return torch.cat([words[:rows].view(-1, _COLUMNS).sum(0), words[rows:], rest])
