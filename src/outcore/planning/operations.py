"""What a schedule is laid out with: operations in a row, and at homes and slots who must wait for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outcore.core.errors import ConfigError
from outcore.planning.weight_cache import Move
from outcore.spec.layout import has_master, states_of
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, PoolKind, Tier, UnitPlan
from outcore.spec.schedule import Kind, Operation
from outcore.spec.timeline import COMPUTE

Index = int | None
"""Of an operation in the row; None: nothing to wait for."""


@dataclass(slots=True)
class Home:
    """Operations, as the runtime's units have handles: who wrote a home last, and who reads it since."""

    ready: Index = None
    readers: list[int] = field(default_factory=list)


class Kept(NamedTuple):
    """What of the disk a slot still has a copy of."""

    home: str
    unit: int
    form: str = ""
    """Gradients: of one pass, or of several."""


@dataclass(slots=True, eq=False)
class Slot:
    """Of a pool: what must be over before it is written again, and what it keeps."""

    free_after: list[int] = field(default_factory=list)
    kept: Kept | None = None
    made: Index = None
    """What made what it keeps."""


class SlotPool:
    """Slots that are taken in turn."""

    def __init__(self, num_slots: int) -> None:
        self._idle = deque(Slot() for _ in range(num_slots))
        self._num_slots = num_slots

    @property
    def is_empty(self) -> bool:
        """Whether all are taken."""
        return not self._idle

    def take(self) -> Slot:
        """The slot that was given back longest ago."""
        slot = self._idle.popleft()
        slot.kept = slot.made = None
        return slot

    def take_kept(self, kept: Kept) -> Slot | None:
        """The slot with a copy, if there is one."""
        slot = next((s for s in self._idle if s.kept == kept), None)
        if slot is not None:
            self._idle.remove(slot)
        return slot

    def give(self, slot: Slot, free_after: Iterable[int]) -> None:
        """Give a slot back."""
        slot.free_after = list(free_after)
        self._idle.append(slot)

    def forget(self, home: str, unit: int) -> None:
        """A home on disk changes: copies are worth nothing."""
        for slot in self._idle:
            if slot.kept is not None and slot.kept[:2] == (home, unit):
                slot.kept = None

    def spared(self) -> list[Kept]:
        """What slots keep, but for the one that is taken next; all if there is only one."""
        return [slot.kept for slot in list(self._idle)[min(1, self._num_slots - 1) :] if slot.kept is not None]


Taken = tuple[SlotPool, Slot]


class ScheduledUnit:
    """A unit and the operations that concern it."""

    def __init__(self, index: int, spec: UnitSpec, plan: UnitPlan, model: ModelSpec) -> None:
        self.index, self.spec, self.plan = index, spec, plan
        self.states_bytes = spec.update_bytes * len(states_of(plan, model))
        self.has_master = has_master(plan, model.precision)
        self.weights, self.gradients, self.states = Home(), Home(), Home()
        self.is_open = False
        """Has gradients of this pass on the device."""
        self.bucket: Taken | None = None
        self.has_gradients = False
        self.num_passes = 0
        """Backward passes of this step that gave it gradients."""
        self.is_counted = False
        """This pass is among them."""
        self.attempt: tuple[int, int] | None = None
        """An early update of this step, and what has its states ready."""
        self.states_home = 0
        """Which of the two homes of states is the current one."""

    def kept_states(self, *, is_next: bool = False) -> Kept:
        """How slots name its states on disk."""
        return Kept(f"states {self.states_home ^ is_next}", self.index)


class Operations:
    """The row of operations, and the pools of the plan; slots for weights are not among them."""

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        self.row: list[Operation] = []
        self.computed: Index = None
        """The last operation of compute."""
        self.units: Sequence[ScheduledUnit] = [
            ScheduledUnit(i, spec, unit, model)
            for i, (spec, unit) in enumerate(zip(model.units, plan.units, strict=True))
        ]
        self._plan = plan
        self._pools = [SlotPool(pool.num_slots) for pool in plan.pools]

    def add(
        self,
        lane: str,
        kind: Kind,
        unit: ScheduledUnit,
        nbytes: int,
        after: Iterable[Index],
        move: Move | None = None,
    ) -> int:
        """Append an operation and return its index."""
        slot = move.slot if move is not None else None
        evicts = self.units[move.evicts].spec.name if move is not None and move.evicts is not None else None
        order = tuple(sorted({i for i in after if i is not None}))
        self.row.append(
            Operation(lane=lane, kind=kind, unit=unit.spec.name, nbytes=nbytes, after=order, slot=slot, evicts=evicts)
        )
        if lane == COMPUTE:
            self.computed = len(self.row) - 1
        return len(self.row) - 1

    def pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> SlotPool:
        """The pool of the smallest slots that hold so much.

        Raises:
            ConfigError: The plan has none.
        """
        pools = [(p.slot_bytes, i) for i, p in enumerate(self._plan.pools) if (p.tier, p.kind) == (tier, kind)]
        found = min((pair for pair in pools if pair[0] >= nbytes), default=None)
        if found is None:
            raise ConfigError(
                f"schedule: expected a pool of {kind} slots on {tier} of at least {nbytes} bytes in the plan"
            )
        return self._pools[found[1]]

    def pools(self, kind: PoolKind) -> list[SlotPool]:
        """All pools of a kind in host memory."""
        pairs = zip(self._plan.pools, self._pools, strict=True)
        return [pool for of, pool in pairs if (of.tier, of.kind) == ("host", kind)]

    def take_kept(self, kind: PoolKind, kept: Kept) -> Taken | None:
        """The slot in host memory with a copy, if there is one."""
        found = ((pool, pool.take_kept(kept)) for pool in self.pools(kind))
        return next(((pool, slot) for pool, slot in found if slot is not None), None)

    def newest(self, indices: Iterable[int]) -> list[int]:
        """The last operation of each lane: what comes after these comes after all of them."""
        return sorted({self.row[i].lane: i for i in sorted(indices)}.values())

    def give_kept(self, pool: SlotPool, slot: Slot, kept: Kept, made: int, written: int) -> None:
        """Give a slot back that keeps a copy of what it brought to disk."""
        self.forget(kept)
        slot.kept, slot.made = kept, made
        pool.give(slot, self.newest([*slot.free_after, written]))

    def forget(self, kept: Kept) -> None:
        """A home on disk changes."""
        for pool in self._pools:
            pool.forget(kept.home, kept.unit)
