"""Copies and sums of device memory by threads that serve no lane, beside what compute and lanes were given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

_COLUMNS = 4093
"""Of words that are summed; prime, so that rows of a matrix that change places do not stay in their columns."""


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

    def sum(self, memory: torch.Tensor) -> torch.Tensor:
        """``sum_of_words``."""
        with self._here():
            return sum_of_words(memory)

    def is_sum_of(self, before: torch.Tensor, memory: torch.Tensor) -> bool:
        """Whether ``sum_of_words`` is what it was."""
        with self._here():
            return torch.equal(sum_of_words(memory), before)

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
