"""Memory that processes of one machine share.

[Note: one copy in memory] The copy is an anonymous file in memory, without a name in any folder. One process makes
it; the others open it through ``/proc`` of that process. It ends with the last mapping, however processes end, and the
size of ``/dev/shm`` does not limit it. All pages are taken when it is made, so that no process is killed later for lack
of them.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Self, final

import numpy as np
import torch

from outcore.core.closing import Closing
from outcore.core.errors import MemoryBudgetError, OutcoreError
from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes
from outcore.memory.host import interleave, kept_from_children
from outcore.memory.machine import host_free_bytes


@final
class SharedMemory(Closing):
    """A piece of host memory that several processes share. See [Note: one copy in memory]."""

    def __init__(self, descriptor: int, nbytes: int, address: str) -> None:
        """Only ``make`` and ``join`` call this. Args: descriptor: Owned by this object from now on."""
        self._descriptor, self.address = descriptor, address
        mapping = mmap.mmap(descriptor, align_up(nbytes, PAGE_BYTES), flags=mmap.MAP_SHARED)
        kept_from_children(mapping)
        self.tensor = torch.from_numpy(np.frombuffer(mapping, np.uint8, nbytes))
        """The memory as 1D uint8, aligned to a page. The mapping lives as long as any view of it."""

    @classmethod
    def make(cls, nbytes: int) -> Self:
        """Take ``nbytes`` from the system, zeroed.

        Raises:
            MemoryBudgetError: The machine or this container does not have that much free.
        """
        free, what = host_free_bytes(), f"host memory: expected {format_bytes(nbytes)} to be free, for all ranks"
        todo = "lower the host budget, or stop what else uses memory on this machine or in this container"
        if nbytes > free:
            raise MemoryBudgetError(f"{what}, but only {format_bytes(free)} are; {todo}")
        size, token = align_up(nbytes, PAGE_BYTES), f"outcore-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = cls(descriptor, nbytes, f"{os.getpid()} {descriptor} {token}")
            interleave(memory.tensor.data_ptr(), size)  # before the pages are taken: a policy applies to later pages
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.close(descriptor)
            raise MemoryBudgetError(f"{what}, but the system refuses: {error.strerror}; {todo}") from error
        return memory

    @classmethod
    def join(cls, address: str, nbytes: int) -> Self:
        """Map memory that another process has made.

        Args:
            address: The ``address`` of that process's ``SharedMemory``.
            nbytes: The size with which it was made.

        Raises:
            OutcoreError: The memory is not there: the process runs on another machine, or in another container.
        """
        pid, number, token = address.split()
        path = Path(f"/proc/{pid}/fd/{number}")
        try:
            if token not in str(path.readlink()):
                raise FileNotFoundError(2, "another file is there")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise OutcoreError(
                f"host memory: expected to share what process {pid} has taken, at {path}, but: {error.strerror}; ranks "
                "that share a copy run on one machine, in one container, for one user. Set gather to 'link' in the "
                "plan, or start them so"
            ) from error
        try:
            return cls(descriptor, nbytes, address)
        except OSError:
            os.close(descriptor)
            raise

    def settle(self) -> None:
        """Close the file, since all processes have joined; no other can join any more. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the memory. Other processes keep it; it ends with the last view in any of them. Idempotent."""
        self.settle()
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
