"""Copies and sums of device memory by threads that serve no lane, beside what compute and lanes were given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch


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
            return bool(sum_of_words(memory) == before)

    def _here(self) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def sum_of_words(memory: torch.Tensor) -> torch.Tensor:
    """Of bytes (1D); any word that changes changes it. On a device nobody waits for it."""
    whole = memory.numel() // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum()
