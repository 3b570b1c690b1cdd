"""The order of a step in a run: operations go to the device's lanes, homes get memory, and both recover.

[Note: cut short] An exception may cut a forward or backward short: Ctrl-C, out of memory, or one of the user's. It can
come between any two statements: a slot was taken and its holder is unknown, an operation was submitted and its handle
is lost, a call has begun and will not end. Code that undoes such things one by one could be interrupted, too. So code
that notices an interruption only sets a flag. The next request to the engine first waits for everything that is under
way. Then it puts calls, slots and passes into the state that they have when nothing runs. Homes are left alone: forward
and backward change no weights and no states there, and gradients that may be incomplete are known to be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from outcore.core.errors import MemoryBudgetError, OutcoreError
from outcore.core.quantities import align_up, format_bytes
from outcore.device.device import Device
from outcore.device.lanes import SKIPPED, Handle
from outcore.memory.arena import TEMPORARY, Arena, Buffer, Region
from outcore.memory.disk import DiskStore, Extent
from outcore.memory.host import HostMemory
from outcore.memory.shared import SharedMemory
from outcore.order.ledger import After, ByteSpan, Dependency, Home, Ledger, Slot
from outcore.order.port import COPY, NOTHING, Answer, Work
from outcore.order.step import StepOrder
from outcore.ranks.one_copy import shared_memory
from outcore.ranks.world import World
from outcore.spec.budget import Reservation, is_temporary, reservations
from outcore.spec.lane_names import GIVING_WAY, RANK_LANES, Lane
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import Kind, Phase

_memory: Callable[[ByteSpan], Any] = attrgetter("memory")
_nbytes: Callable[[ByteSpan], int] = attrgetter("nbytes")
_region: Callable[[Any], Region] = attrgetter("region")
_VISITS = frozenset(phase.value for phase in Phase)


class LivePort:
    """Takes operations in the order of submission. See ``order.port.Port``."""

    def __init__(self, device: Device, traffic: Traffic, store: Callable[[], DiskStore]) -> None:
        """Args: store: Returns the disk tier; called only if the plan has one."""
        self._device, self._traffic, self._store = device, traffic, store

    def submit(
        self,
        lane: Lane,
        kind: Kind,
        unit: Ledger[Handle],
        *,
        reads: Sequence[ByteSpan],
        writes: Sequence[ByteSpan],
        after: After[Handle],
        work: Work = COPY,
    ) -> Handle:
        """Queue an operation at the end of a lane, and count the bytes that it moves."""
        sources, targets = list(map(_memory, reads)), list(map(_memory, writes))
        function, moved, is_due = work.function, work.moved, work.is_due
        if function is None:
            function = self._copy(sources, targets, work.is_wanted, gives_way=lane in GIVING_WAY)
            moved = sum(map(_nbytes, writes))
        if moved is not None:
            is_due = self._traffic.add(lane, moved, is_due)
        return self._device.submit(
            lane,
            f"{kind} {unit.name}",
            function,
            reads=list(map(_region, sources)),
            writes=list(map(_region, targets)),
            after=after,
            is_due=is_due,
        )

    def compute(
        self,
        kind: Kind,
        unit: Ledger[Handle],
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        after: After[Handle],
    ) -> Handle:
        """Let compute wait for ``after``. The caller then does the work."""
        name = f"use weights of {unit.name}" if kind in _VISITS else f"{kind} {unit.name}"
        return self._device.compute(
            name,
            reads=list(map(_region, map(_memory, reads))),
            writes=list(map(_region, map(_memory, writes))),
            after=after,
        )

    def mark(self, what: str, unit: Ledger[Handle], *, wrote: Sequence[ByteSpan] = ()) -> Handle:
        """Return a handle that is done when compute has done all that it was given so far."""
        name = f"{unit.name}: {what}"
        if wrote:
            self._device.compute(name, writes=list(map(_region, map(_memory, wrote))))
        return self._device.mark(name)

    def wait(self, label: str, dependency: Dependency[Handle], *, frees: Sequence[ByteSpan] = ()) -> None:
        """Block the host until these operations are over."""
        self._device.wait(label, dependency)
        self._device.host_access(f"free: {label}", writes=list(map(_region, map(_memory, frees))))

    def freed(self, of: Home[Handle] | Slot[Handle], lane: Lane, after: After[Handle] = NOTHING) -> Handle | None:
        """Poison the bytes, if the faults include poison."""
        return self._device.poison(of.memory, lane, after)

    def _copy(
        self, sources: Sequence[Any], targets: Sequence[Any], is_wanted: Answer | None, *, gives_way: bool
    ) -> Callable[[], object]:
        if len(sources) == 1 and isinstance(sources[0], Extent):
            return partial(self._store().read, sources[0], targets[0].bytes, gives_way=gives_way)
        if len(targets) == 1 and isinstance(targets[0], Extent):
            return self._write(sources[0], targets[0], is_wanted, gives_way=gives_way)
        pairs = [(to.bytes, origin.bytes) for origin, to in zip(sources, targets, strict=True)]

        def copy() -> None:
            for to, origin in pairs:
                to.copy_(origin, non_blocking=True)

        return copy

    def _write(
        self, buffer: Buffer, extent: Extent, is_wanted: Answer | None, *, gives_way: bool
    ) -> Callable[[], object]:
        store = self._store()

        def write() -> object:
            if is_wanted is not None and not is_wanted():
                return SKIPPED
            store.write(extent, buffer.bytes, gives_way=gives_way)
            return None

        return write


class Traffic:
    """Counters of moved bytes: raised when an operation is submitted, and lowered if it is not due at its turn."""

    def __init__(self) -> None:
        self._bytes, self._skipped = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)

    def add(self, lane: Lane, nbytes: int, is_due: Answer | None = None) -> Answer | None:
        """Count bytes. Returns the question that the lane must ask instead of ``is_due``."""
        self._bytes[lane] += nbytes
        if is_due is None:
            return None
        counted = [nbytes]

        def answer() -> bool:
            if is_due():
                return True
            while counted:
                self._skipped[lane] += counted.pop()  # only the lane's own thread writes this
            return False

        return answer

    def since(self, totals: Mapping[str, int]) -> dict[str, int]:
        """Return lane name -> bytes counted since these ``totals`` were taken."""
        return {lane: nbytes - totals[lane] for lane, nbytes in self.totals().items()}

    def totals(self) -> dict[str, int]:
        """Return lane name -> bytes."""
        return {lane.value: nbytes - self._skipped[lane] for lane, nbytes in self._bytes.items()}


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


class Recovery:
    """Knows whether a run is open, and what was cut short; repairs the bookkeeping. See [Note: cut short]."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_closed = False
        self.refusal: OutcoreError | None = None
        """Why the run may not go on; None while it may."""
        self.is_due = False
        self.signs: list[Callable[[], None]] = []
        """Functions that set ``is_due`` if they find something that was cut short unnoticed."""
        self.parts: list[Callable[[], None]] = []
        """Functions that put a part's own bookkeeping into its idle state.
        When they are called nothing is in flight."""

    def refuse_if_closed(self) -> None:
        """Raise if the model was closed, or can only be closed. Else clear up behind what was cut short."""
        if self.is_closed:
            raise OutcoreError(
                "expected a prepared model, but it was closed; prepare it again, or load what was saved before close()"
            )
        if self.refusal is not None:
            raise self.refusal
        self.look()

    def notice(self) -> None:
        """Ask all ``signs`` whether anything was cut short."""
        for notice in self.signs:
            notice()

    def look(self) -> None:
        """Repair the bookkeeping if anything was cut short."""
        self.notice()
        if self.is_due:
            self.run()

    def run(self) -> None:
        """Repair the bookkeeping. If this is interrupted, it is run again as a whole."""
        for lane in set(Lane) - set(
            RANK_LANES
        ):  # an operation whose submission was interrupted may have no other operation behind it
            self.device.submit(lane, "catch up", _nothing)
        self.device.synchronize()
        self.device.refuse_after_failure()  # here, since the handles of failed operations are thrown away below
        for part in self.parts:
            part()
        self.is_due = False


def _nothing() -> object:
    return SKIPPED
