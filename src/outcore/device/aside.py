"""Copies and sums of device memory by threads that serve no lane, beside what compute and lanes were given."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
import torch

_COLUMNS = 4093
"""Of words that are summed; prime, so that rows of a matrix that change places do not stay in their columns."""


@final
class Sum:
    """``sum_of_words`` of memory on a device, as it is when the first one asks."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Not taken yet."""
        self._memory, self._taking = memory, threading.Lock()
        self._value: torch.Tensor | None = None
        self._taken: torch.cuda.Event | None = None

    def take(self) -> torch.Tensor:
        """The sum. What the caller's stream does next comes behind it, whoever has taken it."""
        with self._taking:
            if self._value is None:
                self._value = sum_of_words(self._memory)
                if self._memory.is_cuda:
                    self._taken = torch.cuda.Event()
                    self._taken.record(torch.cuda.current_stream(self._memory.device))
            elif self._taken is not None:
                self._taken.wait(torch.cuda.current_stream(self._memory.device))
            return self._value


class Aside:
    """Of one device. On CUDA a stream of its own: on the default one all would come behind what compute was given."""

    def __init__(self, torch_device: torch.device) -> None:
        """Takes no memory."""
        self._stream = torch.cuda.Stream(torch_device) if torch_device.type == "cuda" else None

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Into host memory; the bytes are there when this returns."""
        if source.is_cpu:  # numpy's copies let other threads run, and begin none of their own
            np.copyto(target.numpy(), source.numpy())
            return
        with self._here():
            target.copy_(source)

    def take(self, sums: Iterable[Sum]) -> None:
        """Those that nobody has taken yet."""
        with self._here():
            for each in sums:
                each.take()

    def is_sum_of(self, before: Sum, memory: torch.Tensor) -> bool:
        """Whether ``sum_of_words`` is what it was."""
        with self._here():
            return torch.equal(sum_of_words(memory), before.take())

    def _here(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def sum_of_words(memory: torch.Tensor) -> torch.Tensor:
    """Sums of the words of some bytes (1D), by columns: a word that changes, or goes to another place, changes them.

    On a device nobody waits for it.
    """
    whole = memory.numel() // 8 * 8
    words, rest = memory[:whole].view(torch.int64), memory[whole:].long()
    rows = words.numel() // _COLUMNS * _COLUMNS
    return torch.cat([words[:rows].view(-1, _COLUMNS).sum(0), words[rows:], rest])
