"""Memory of the device: taken, pinned and measured. Each kind of device says where it comes from."""

from __future__ import annotations

import abc
from typing import Protocol

import torch

from outcore.core.quantities import PAGE_BYTES

ACCELERATOR_SHARE = 0.3
"""``DeviceMemory.activation_share`` of a device with memory of its own."""


def aligned_bytes(nbytes: int, torch_device: torch.device) -> torch.Tensor:
    """Return a 1D uint8 tensor of ``nbytes`` that begins at a multiple of 4 KiB; allocates 4 KiB more."""
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device=torch_device)
    return memory.narrow(0, -memory.data_ptr() % PAGE_BYTES, nbytes)


class MemoryMeter(Protocol):
    """Measures device memory."""

    def begin(self) -> None:
        """Forget the peak and begin anew."""

    def peak_bytes(self) -> int:
        """Peak of memory in use since ``begin``, without what was already in use when the meter was made."""


class DeviceMemory(abc.ABC):
    """Memory that a device computes in, and host memory that it copies from."""

    has_host_memory: bool
    """Whether device memory is host memory, so that both tiers share the same free bytes."""
    activation_share: float
    """Share of the device budget that a plan leaves to activations and workspace if their size is not known."""

    @abc.abstractmethod
    def allocate(self, nbytes: int, *, is_touched: bool = True) -> torch.Tensor:
        """Allocate device memory: 1D uint8 of ``nbytes``, aligned to 4 KiB, not initialised.

        If device memory is host memory, ``is_touched=False`` leaves its pages to the first write or ``touch_memory``.
        Memory: device, ``nbytes`` and at most 4 KiB more, until the tensor and its views are gone.
        """

    @abc.abstractmethod
    def touch_memory(self) -> None:
        """Make resident the pages that ``allocate(is_touched=False)`` left. Nothing may be in flight."""

    @abc.abstractmethod
    def register_host(self, memory: torch.Tensor) -> bool:
        """Pin host memory (contiguous, aligned, alive until ``unregister_host``) in place, which makes copies fast.

        Returns:
            False if the driver refuses; the memory then stays pageable.
        """

    @abc.abstractmethod
    def unregister_host(self, memory: torch.Tensor) -> None:
        """Undo ``register_host``. Nothing may be in flight to or from the memory."""

    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of device memory that are free now."""

    @abc.abstractmethod
    def total_bytes(self) -> int:
        """Bytes of device memory in all, free or in use."""

    @abc.abstractmethod
    def meter(self) -> MemoryMeter | None:
        """Return a meter of memory taken beyond what is in use now; None if that memory is not the device tier's."""

    @abc.abstractmethod
    def _free_memory(self) -> None:
        """Free memory of ``allocate`` that is not freed together with its tensors."""
