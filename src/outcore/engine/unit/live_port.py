"""The order of a step in a run: operations get their work and go to the device's lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from outcore.device.device import Device
from outcore.device.lanes import SKIPPED, Handle
from outcore.memory.arena import Buffer, Region
from outcore.memory.disk import DiskStore, Extent
from outcore.order.ledger import After, ByteSpan, Dependency, Home, Ledger, Slot
from outcore.order.port import COPY, NOTHING, Answer, Work
from outcore.spec.lane_names import GIVING_WAY, Lane
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
