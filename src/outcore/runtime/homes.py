"""Homes and slots: the buffers of a plan, allocated once, exactly as ``planning.reservations`` lists them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from outcore.core.errors import MemoryBudgetError
from outcore.core.quantities import align_up, format_bytes
from outcore.memory.arena import Arena, Buffer
from outcore.memory.disk import DiskStore, Extent
from outcore.memory.host import HostMemory
from outcore.planning.reservations import reservations
from outcore.runtime.device import Device
from outcore.runtime.lanes import Handle, newest
from outcore.spec.lanes import Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, PoolKind, Tier

Home = Buffer | Extent
HomeKind = Literal["weights", "gradients", "states", "next_weights", "next_states"]


@dataclass(slots=True, eq=False)
class Slot:
    """A buffer that units take turns in."""

    buffer: Buffer
    tier: Tier
    free_after: list[Handle] = field(default_factory=list)
    """What must be done before its bytes may be overwritten."""
    kept: Extent | None = None
    """Which bytes of the disk it still has a copy of, while it is idle."""
    kept_after: Handle | None = None
    """What made the copy."""


class SlotPool:
    """Equal slots. Taking and giving happens when operations are submitted; the bytes are guarded by ``free_after``."""

    def __init__(self, kind: PoolKind, tier: Tier, slot_bytes: int) -> None:
        """Start without slots."""
        self.kind, self.tier, self.slot_bytes = kind, tier, slot_bytes
        self.slots: list[Slot] = []
        self._idle: deque[Slot] = deque()

    def add(self, buffer: Buffer) -> None:
        """Add a slot."""
        slot = Slot(buffer, self.tier)
        self.slots.append(slot)
        self._idle.append(slot)

    def take(self) -> Slot | None:
        """The slot that was given back longest ago, or None if all are taken."""
        return self._idle.popleft() if self._idle else None

    def take_kept(self, extent: Extent) -> Slot | None:
        """The idle slot with a copy of an extent, if there is one."""
        slot = next((s for s in self._idle if s.kept == extent), None)
        if slot is not None:
            self._idle.remove(slot)
        return slot

    def idle(self) -> list[Slot]:
        """Slots that can be taken, in the order in which they will be."""
        return list(self._idle)

    def reclaim(self) -> None:
        """Take all slots back, whoever has them, and forget what they hold; nothing may be in flight."""
        for slot in self.slots:
            slot.free_after, slot.kept, slot.kept_after = [], None, None
        self._idle = deque(self.slots)

    def give(self, slot: Slot, free_after: Sequence[Handle]) -> None:
        """Give a slot back; whoever takes it next must wait for ``free_after``."""
        slot.free_after = list(free_after)
        self._idle.append(slot)


class Homes:
    """All memory of a run: an arena per tier, a home per unit and kind, pools of slots."""

    def __init__(self, model: ModelSpec, plan: Plan, device: Device, paths: Sequence[Path]) -> None:
        """Allocate everything. Pages are taken as they are written, and the rest by ``settle``.

        Args:
            model: Units in the plan's order.
            plan: Already checked against the model.
            device: Delivers device memory and registers host memory with its driver.
            paths: Folders of the disk tier; needed if the plan uses it.

        Raises:
            MemoryBudgetError: A tier cannot deliver what the plan takes.
            DiskError: The disk tier cannot be opened.
        """
        self.homes: dict[tuple[str, HomeKind], Home] = {}
        self._pools: dict[tuple[Tier, PoolKind], list[SlotPool]] = {}
        # Buffers stay where they are; gradients of a plain plan are autograd's own tensors.
        elsewhere = ("buffers", "gradients") if plan.plain else ("buffers",)
        items = [r for r in reservations(model, plan) if r.kind not in elsewhere]
        total = {
            tier: sum(align_up(r.nbytes, 4096) for r in items if r.tier == tier) for tier in ("device", "host", "disk")
        }
        self._device, self._host, self.disk = device, None, None
        self.host_is_pinned = False
        try:
            device_arena = Arena("device", _on_device(device, total["device"]))
            if total["disk"]:
                self.disk = DiskStore.open(paths, total["disk"])
            self._host = HostMemory.open(total["host"], is_touched=False) if total["host"] else None
        except BaseException:
            self.close()
            raise
        host_arena = None if self._host is None else Arena("host", self._host.tensor)
        for item in items:
            home: Home
            if item.tier == "disk":
                if self.disk is None:
                    raise AssertionError("disk reservation without a disk store")
                home = self.disk.take(item.nbytes, owner=f"{item.owner or 'root'} {item.kind}")
            else:
                arena = device_arena if item.tier == "device" else host_arena
                if arena is None:
                    raise AssertionError("host reservation without a host arena")
                home = arena.take(item.nbytes)
            if item.kind == "slot":
                if isinstance(home, Buffer):
                    self._add_slot(plan, item.owner, home)
            else:
                self.homes[item.owner, item.kind] = home  # type: ignore[index]

    def settle(self) -> None:
        """First values are written: take all pages that nobody has touched, and pin host memory."""
        self._device.touch_memory()
        if self._host is not None:
            self._host.touch()
            self.host_is_pinned = self._device.register_host(self._host.tensor)

    def _add_slot(self, plan: Plan, owner: str, buffer: Buffer) -> None:
        _, index, _ = owner.split("/")
        pool = plan.pools[int(index)]
        pools = self._pools.setdefault((pool.tier, pool.kind), [])
        match = next((p for p in pools if p.slot_bytes == pool.slot_bytes), None)
        if match is None:
            match = SlotPool(pool.kind, pool.tier, pool.slot_bytes)
            pools.append(match)
            pools.sort(key=lambda p: p.slot_bytes)
        match.add(buffer)

    def pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> SlotPool:
        """The pool of the smallest slots that hold ``nbytes``.

        Raises:
            MemoryBudgetError: The plan has none (``check_plan`` should have refused it).
        """
        pools = self._pools.get((tier, kind), [])
        found = next((p for p in pools if p.slot_bytes >= nbytes), None)
        if found is None:
            raise MemoryBudgetError(
                f"plan: expected a pool of {kind} slots on {tier} of at least {format_bytes(nbytes)}, but the largest "
                "has "
                f"{format_bytes(max((p.slot_bytes for p in pools), default=0))}"
            )
        return found

    def take(self, tier: Tier, kind: PoolKind, nbytes: int) -> tuple[SlotPool, Slot]:
        """Take a slot from a pool whose slots are always given back at submission, so that one is always idle."""
        pool = self.pool(tier, kind, nbytes)
        slot = pool.take()
        if slot is None:
            raise AssertionError(f"no idle {kind} slot on {tier}: one was not given back")
        if slot.kept is not None:
            slot.kept = slot.kept_after = None
            poison = self._device.poison(slot.buffer, Lane.UPDATE, {"slot free": slot.free_after})
            slot.free_after += [] if poison is None else [poison]
        return pool, slot

    def take_kept(self, kind: PoolKind, extent: Extent) -> tuple[SlotPool, Slot] | None:
        """Take the idle slot in host memory with a copy of an extent, if there is one."""
        for pool in self._pools.get(("host", kind), []):
            slot = pool.take_kept(extent)
            if slot is not None:
                return pool, slot
        return None

    def reclaim(self) -> None:
        """Take all slots back; nothing may be in flight.

        Slots of weights are never taken: they are with the unit whose weights they hold.
        """
        for pools in self._pools.values():
            for pool in pools:
                if pool.kind != "weights":
                    pool.reclaim()

    def store(self) -> DiskStore:
        """The disk tier of a plan that has one."""
        if self.disk is None:
            raise AssertionError("bytes on disk without a disk tier")
        return self.disk

    def pools(self, tier: Tier, kind: PoolKind) -> list[SlotPool]:
        """All pools of a kind, smallest slots first."""
        return self._pools.get((tier, kind), [])

    def give_kept(self, pool: SlotPool, slot: Slot, extent: Extent, made: Handle, written: Handle) -> None:
        """Give a slot back that keeps a copy of what it brought to disk. Other copies are worth nothing now.

        Args:
            pool: Its pool.
            slot: In host memory.
            extent: Where its first bytes were written.
            made: What made them.
            written: What wrote them.
        """
        self.forget(extent)
        slot.kept, slot.kept_after = extent, made
        pool.give(slot, newest([*slot.free_after, written]))  # what writes may be skipped, and wait for nothing

    def forget(self, extent: Extent) -> None:
        """Bytes on disk change: copies of them in slots are worth nothing."""
        for pools in self._pools.values():
            for pool in pools:
                for slot in pool.slots:
                    if slot.kept is not None and slot.kept.overlaps(extent):
                        slot.kept = slot.kept_after = None

    def slots(self, tier: Tier, kind: PoolKind) -> list[Slot]:
        """All slots of a kind, smallest first."""
        return [slot for pool in self._pools.get((tier, kind), []) for slot in pool.slots]

    def close(self) -> None:
        """Give memory and files back. Idempotent."""
        if self._host is not None:
            if self.host_is_pinned:
                self._device.unregister_host(self._host.tensor)
            self._host.close()
            self._host = None
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self.homes.clear()
        self._pools.clear()


def _on_device(device: Device, nbytes: int) -> torch.Tensor:
    try:
        return device.allocate(nbytes, is_touched=False)
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"device memory: expected {format_bytes(nbytes)} in one piece on {device.torch_device}, as the plan takes, "
            f"but {format_bytes(device.memory_bytes())} are free, or no piece is so large; the model is as it was. "
            "Free what else is there, or prepare with a smaller outcore.Budget(device=...)"
        ) from error
