"""The CPU as a device: ordinary memory serves as device memory, the calling thread as compute, threads as lanes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast, final

import torch

from outcore.device.device import Device
from outcore.device.faults import Faults
from outcore.device.lanes import Handle, HostExecution, pause
from outcore.device.race import RaceChecker
from outcore.memory.host import HostMemory
from outcore.memory.machine import host_bytes, host_free_bytes
from outcore.spec.lane_names import Lane


@final
class CpuDevice(Device):
    """Ordinary memory as device memory, the calling thread as compute."""

    has_host_memory = True
    computes_on_host = True
    update_block_bytes = 2 * 2**20
    activation_share = 0.0  # they come from ordinary memory beside the arenas
    group_backend = "gloo"
    interrupts = None  # backward runs on the calling thread: Python itself sees a Ctrl-C

    def __init__(self, faults: Faults, race_checker: RaceChecker | None) -> None:
        """Start the lanes. Use ``open_device``."""
        super().__init__(torch.device("cpu"), HostExecution(), faults, race_checker)
        self._memory: list[HostMemory] = []

    def allocate(self, nbytes: int, *, is_touched: bool = True) -> torch.Tensor:
        """Map memory straight from the system, so that ``close`` gives it back. A forked data loader may read it."""
        memory = HostMemory.open(nbytes, inherit=True, is_touched=is_touched)
        self._memory.append(memory)
        return memory.tensor

    def touch_memory(self) -> None:
        """Make all memory resident."""
        for memory in self._memory:
            memory.touch()

    def finish_copies(self) -> None:
        """Copies are over when they return."""

    def _free_memory(self) -> None:
        while self._memory:
            self._memory.pop().close()

    def register_host(self, memory: torch.Tensor) -> bool:
        """Nothing to pin."""
        return True

    def unregister_host(self, memory: torch.Tensor) -> None:
        """Nothing to undo."""

    def hand_over(self, tensor: torch.Tensor, lane: Lane | None) -> None:
        """A reference is enough on the CPU."""

    def receive(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """A reference is enough on the CPU."""

    def rng_state(self) -> object:
        """State of the default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: object) -> None:
        """Restore the default generator."""
        torch.set_rng_state(cast(torch.Tensor, state))

    def memory_bytes(self) -> int:
        """Free host memory. It serves as both tiers: a caller that divides it must not count it twice."""
        return host_free_bytes()

    def total_bytes(self) -> int:
        """Host memory, which serves as both tiers."""
        return host_bytes()

    def meter(self) -> None:
        """Return None: activations take ordinary host memory, which the device tier's share does not include."""

    def _order_compute(self, dependencies: tuple[Handle, ...]) -> None:
        for handle in dependencies:
            self._blocked_by(handle, handle.wait)

    def _compute_point(self, *, is_late: bool) -> None:
        return None

    def _pause_compute(self, seconds: float) -> None:
        pause(seconds)
