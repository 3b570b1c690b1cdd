"""The memory of a run: one arena per tier, from which homes and slots are cut exactly as the plan reserves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from outcore.core.errors import MemoryBudgetError
from outcore.core.quantities import align_up, format_bytes
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.memory.arena import TEMPORARY, Arena, Buffer, Region
from outcore.memory.disk import DiskStore, Extent
from outcore.memory.host import HostMemory
from outcore.memory.shared import SharedMemory
from outcore.order.ledger import Ledger
from outcore.order.step import StepOrder
from outcore.ranks.one_copy import shared_memory
from outcore.ranks.world import World
from outcore.spec.budget import Reservation, is_temporary, reservations
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


class Tiers:
    """Owns the memory of all homes and slots of a run."""

    def __init__(
        self, model: ModelSpec, plan: Plan, device: Device, paths: Sequence[Path], world: World | None = None
    ) -> None:
        """Allocate everything. Pages are touched as first values are written, and the rest by ``settle``.

        Args:
            model: Model with units in the plan's order.
            plan: Plan that was checked against the model.
            device: Device that provides its memory and registers host memory with its driver.
            paths: Folders of the disk tier; needed if the plan uses it.
            world: The ranks that train together; None: a single rank.

        Raises:
            MemoryBudgetError: A tier cannot provide what the plan takes.
            DiskError: The disk tier cannot be opened.
        """
        # Module buffers stay where they are; gradients of a plain plan are autograd's own tensors.
        elsewhere = ("buffers", "workspace", *(["gradients"] if plan.plain else []))
        self._items = [r for r in reservations(model, plan) if r.kind not in elsewhere and not is_temporary(r)]
        total = dict.fromkeys(("device", "host", "disk", "shared"), 0)
        for item in self._items:
            total[_arena_of(item)] += align_up(item.nbytes * item.num_sharers, 4096)
        self._device, self._host, self.disk = device, None, None
        self._shared: SharedMemory | None = None
        self._pinned: list[torch.Tensor] = []
        self.host_is_pinned = False
        try:
            if total["shared"] and world is not None:
                sharers = max(item.num_sharers for item in self._items)
                self._shared = shared_memory(world, total["shared"], sharers)
            self._arenas = {"device": Arena("device", _on_device(device, total["device"]))}
            if total["disk"]:
                self.disk = DiskStore.open(paths, total["disk"])
            self._host = HostMemory.open(total["host"], is_touched=False) if total["host"] else None
        except BaseException:
            self.close()
            raise
        if self._host is not None:
            self._arenas["host"] = Arena("host", self._host.tensor)
        if self._shared is not None:
            self._arenas["shared"] = Arena("shared", self._shared.tensor)

    def hand_out(self, order: StepOrder[Handle]) -> None:
        """Give every home and every slot its memory."""
        by_name = {ledger.spec.name: ledger for ledger in order.ledgers}
        for item in self._items:
            memory = self._take(item)
            if item.kind == "slot":
                _, pool, slot = item.owner.split("/")
                order.pools.planned[int(pool)][int(slot)].memory = memory
            else:
                by_name[item.owner].rest_in(item.kind, memory)
        for ledger in order.ledgers:
            if ledger.spec.trainable and not ledger.spec.update_bytes:  # else nobody asks for homes without bytes
                self._rest_nowhere(ledger)

    def _rest_nowhere(self, ledger: Ledger[Handle]) -> None:
        """Give homes without bytes a buffer without bytes: the unit trains parameters, but none has elements."""
        for home in ledger.homes:
            if not home.nbytes:
                device = self._device.torch_device if home.tier == "device" else "cpu"
                home.memory = Buffer(torch.empty(0, dtype=torch.uint8, device=device), Region(TEMPORARY, 0, 0))

    def _take(self, item: Reservation) -> Buffer | Extent:
        if item.tier == "disk":
            return self.store().take(item.nbytes, owner=f"{item.owner or 'root'} {item.kind}")
        return self._arenas[_arena_of(item)].take(item.nbytes * item.num_sharers)

    def settle(self) -> None:
        """Touch all pages that are still untouched, and pin host memory. Call it once first values were written."""
        self._device.touch_memory()
        if self._host is not None:
            self._host.touch()
        for memory in (self._host, self._shared):
            if memory is not None and self._device.register_host(memory.tensor):
                self._pinned.append(memory.tensor)
        self.host_is_pinned = bool(self._pinned)

    def store(self) -> DiskStore:
        """Return the disk tier. The plan must have one."""
        if self.disk is None:
            raise AssertionError("bytes on disk without a disk tier")
        return self.disk

    def close(self) -> None:
        """Give memory and files back. Idempotent."""
        while self._pinned:
            self._device.unregister_host(self._pinned.pop())
        for memory in (self._host, self._shared):
            if memory is not None:
                memory.close()
        self._host = self._shared = None
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self._arenas = {}


def _arena_of(item: Reservation) -> str:
    return item.tier if item.num_sharers == 1 else "shared"


def _on_device(device: Device, nbytes: int) -> torch.Tensor:
    try:
        return device.allocate(nbytes, is_touched=False)
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"device memory: expected {format_bytes(nbytes)} in one piece on {device.torch_device}, as the plan takes, "
            f"but {format_bytes(device.memory_bytes())} are free, or no piece is so large; the model is as it was. "
            "Free what else is there, or prepare with a smaller outcore.Budget(device=...)"
        ) from error
