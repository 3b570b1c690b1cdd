"""Pools of slots, and what they supply to an update: gradients, states and room for new weights, from other tiers.

[Note: what slots keep] A slot through which states, gradients or activations went to disk keeps its copy until the slot
is taken for something else. Bytes that are still in a slot are not read again. ``step()`` begins with the units whose
states are still in slots, unless the plan says otherwise (``Plan.kept_updated_first``). The gradients that came last
are taken from the slots in which they landed, and so are the activations of the last forwards.
Any other write to that home on disk makes the copy worthless (``Pools.invalidate``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from outcore.core.errors import MemoryBudgetError
from outcore.core.quantities import format_bytes
from outcore.order.ledger import After, ByteSpan, H, Home, Ledger, Slot, TakenSlot, newest
from outcore.order.port import Answer, Port, Work
from outcore.spec.lane_names import Lane
from outcore.spec.plan import Plan, PoolKind, Tier


class SlotPool(Generic[H]):
    """Equal slots. They are taken and given back when operations are submitted; ``free_after`` guards the bytes."""

    def __init__(self, kind: PoolKind, tier: Tier, slot_bytes: int) -> None:
        self.kind, self.tier, self.slot_bytes = kind, tier, slot_bytes
        self.slots: list[Slot[H]] = []
        self._idle: deque[Slot[H]] = deque()

    def add(self) -> Slot[H]:
        """Add a slot."""
        name = f"{self.kind} slot {len(self.slots)} of {self.slot_bytes} bytes on {self.tier}"
        slot: Slot[H] = Slot(name, self.tier, self.slot_bytes)
        self.slots.append(slot)
        self._idle.append(slot)
        return slot

    def take(self) -> Slot[H] | None:
        """Take the slot that was given back longest ago. Returns None if all are taken."""
        return self._idle.popleft() if self._idle else None

    def take_kept(self, home: Home[H]) -> Slot[H] | None:
        """Take the idle slot with a copy of a home. Returns None if there is none."""
        slot = next((s for s in self._idle if s.kept is home), None)
        if slot is not None:
            self._idle.remove(slot)
        return slot

    def spared(self) -> list[Home[H]]:
        """Return homes of which idle slots keep a copy. The slot next in line counts only if the pool has no other."""
        idle = list(self._idle)[min(1, len(self.slots) - 1) :]
        return [slot.kept for slot in idle if slot.kept is not None]

    def give_back(self, slot: Slot[H], free_after: Iterable[H | None]) -> None:
        """Give a slot back. Whatever is written to it next must wait for ``free_after``."""
        slot.free_after = [handle for handle in free_after if handle is not None]
        self._idle.append(slot)

    def clear(self) -> None:
        """Take all slots back from their holders and forget what they hold. Nothing may be in flight."""
        for slot in self.slots:
            slot.free_after, slot.kept, slot.kept_after = [], None, None
        self._idle = deque(self.slots)


class Pools(Generic[H]):
    """All slots of a plan."""

    def __init__(self, plan: Plan, port: Port[H]) -> None:
        """Args: plan: A checked plan, which has every pool that a unit needs."""
        self._port = port
        self._pools: dict[tuple[Tier, PoolKind], list[SlotPool[H]]] = {}
        self.planned: list[list[Slot[H]]] = []
        """Slots of each pool, by the pool's index in the plan."""
        for pool in plan.pools:
            mine = self._alike(pool.tier, pool.kind, pool.slot_bytes)
            self.planned.append([mine.add() for _ in range(pool.num_slots)])

    def _alike(self, tier: Tier, kind: PoolKind, slot_bytes: int) -> SlotPool[H]:
        pools = self._pools.setdefault((tier, kind), [])
        found = next((pool for pool in pools if pool.slot_bytes == slot_bytes), None)
        if found is None:
            found = SlotPool(kind, tier, slot_bytes)
            pools.append(found)
            pools.sort(key=lambda pool: pool.slot_bytes)
        return found

    def of(self, tier: Tier, kind: PoolKind) -> list[SlotPool[H]]:
        """Return all pools of a kind, smallest slots first."""
        return self._pools.get((tier, kind), [])

    def slots(self, tier: Tier, kind: PoolKind) -> list[Slot[H]]:
        """Return all slots of a kind, smallest first."""
        return [slot for pool in self.of(tier, kind) for slot in pool.slots]

    def pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> SlotPool[H]:
        """Return the pool with the smallest slots that hold ``nbytes``.

        Raises:
            MemoryBudgetError: The plan has no such pool; ``check_plan`` should have refused it.
        """
        pools = self.of(tier, kind)
        found = next((p for p in pools if p.slot_bytes >= nbytes), None)
        if found is None:
            largest = format_bytes(max((p.slot_bytes for p in pools), default=0))
            raise MemoryBudgetError(
                f"plan: expected a pool of {kind} slots on {tier} of at least {format_bytes(nbytes)}, but the largest "
                f"has {largest}"
            )
        return found

    def take(self, tier: Tier, kind: PoolKind, nbytes: int) -> TakenSlot[H]:
        """Take a slot from a pool in which one is always idle, since its slots are given back at submission."""
        taken = self.take_idle(tier, kind, nbytes)
        if taken is None:
            raise AssertionError(f"no idle {kind} slot on {tier}: one was not given back")
        return taken

    def take_idle(self, tier: Tier, kind: PoolKind, nbytes: int) -> TakenSlot[H] | None:
        """Take a slot. Returns None if none is idle."""
        pool = self.pool(tier, kind, nbytes)
        slot = pool.take()
        if slot is None:
            return None
        if slot.kept is not None:
            slot.kept = slot.kept_after = None
            free = self._port.freed(slot, Lane.UPDATE, {"slot free": slot.free_after})
            slot.free_after += [] if free is None else [free]
        return TakenSlot(pool, slot)

    def take_kept(self, kind: PoolKind, home: Home[H]) -> TakenSlot[H] | None:
        """Take the idle slot in host memory with a copy of a home. Returns None if there is none."""
        for pool in self.of("host", kind):
            slot = pool.take_kept(home)
            if slot is not None:
                return TakenSlot(pool, slot)
        return None

    def give_back(self, taken: TakenSlot[H], last_use: H, lane: Lane) -> None:
        """Give a slot back after its last use, on a lane. It keeps no copy."""
        pool, slot = taken
        free_after = newest([*slot.free_after, last_use])  # an earlier copy in it may still be on its way to disk
        slot.kept = slot.kept_after = None
        free = self._port.freed(slot, lane, {"slot free": free_after})
        pool.give_back(slot, free_after if free is None else [free])

    def give_back_kept(self, taken: TakenSlot[H], home: Home[H], made: H, written: H) -> None:
        """Give back a slot that keeps a copy of what was written from it to disk. Older copies are forgotten.

        Args:
            taken: The slot, in host memory.
            home: Home on disk to which its first bytes were written.
            made: Operation that made these bytes.
            written: Operation that wrote them.
        """
        self.invalidate(home)
        pool, slot = taken
        slot.kept, slot.kept_after = home, made
        pool.give_back(slot, newest([*slot.free_after, written]))  # a skipped write does not wait for ``free_after``

    def invalidate(self, home: Home[H]) -> None:
        """Forget copies of a home on disk, because its bytes change."""
        for slots in self.planned:
            for slot in slots:
                if slot.kept is home:
                    slot.kept = slot.kept_after = None

    def clear(self) -> None:
        """Take all slots back; nothing may be in flight.

        Slots for weights are left alone: they are never taken from a pool, but stay with the unit that they hold.
        """
        for (_, kind), pools in self._pools.items():
            if kind != "weights":
                for pool in pools:
                    pool.clear()

    def close(self) -> None:
        """Forget all slots, so that their memory can be given back."""
        self._pools.clear()
        self.planned.clear()


@dataclass(slots=True)
class Borrowed(Generic[H]):
    """Bytes that an update needs in memory, the operations to wait for, and the slot if the bytes are in one."""

    span: ByteSpan
    after: After[H]
    taken: TakenSlot[H] | None = None


class Supply(Generic[H]):
    """Brings the bytes of an update together, and gives slots back afterwards."""

    def __init__(self, port: Port[H], pools: Pools[H]) -> None:
        self._port, self._pools = port, pools

    def gradients(self, unit: Ledger[H], is_due: Answer | None = None) -> Borrowed[H]:
        """Provide accumulated gradients in host memory, to be given back with ``give_back_gradients``.

        Args:
            unit: The unit.
            is_due: Asked before gradients are read from disk. With ``is_due`` they are read even if a slot still holds
                them, since slots for gradients on their way home must not wait for updates.
        """
        home = unit.gradients
        if home.tier == "host":
            return Borrowed(home.span(), home.before_read())
        if home.tier == "disk" and is_due is None:
            kept = self._pools.take_kept("landing", home) or self._pools.take_kept("gradients", home)
            if kept is not None:
                return Borrowed(kept.slot.span(kept.slot.nbytes), {"gradients kept": kept.slot.kept_after}, kept)
        return self.fetch_gradients(unit, is_due)

    def room_for_gradients(self, unit: Ledger[H]) -> Borrowed[H]:
        """Take a host slot in which the first gradients of a unit are put together, if their home is disk."""
        taken = self._pools.take("host", "gradients", unit.gradients.nbytes)
        return Borrowed(taken.slot.span(unit.gradients.nbytes), {"gradient slot free": taken.slot.free_after}, taken)

    def fetch_gradients(self, unit: Ledger[H], is_due: Answer | None = None) -> Borrowed[H]:
        """Start bringing gradients from disk or device into a host slot."""
        home = unit.gradients
        taken = self._pools.take("host", "gradients", home.nbytes)
        target = taken.slot.span(home.nbytes)
        after = {"gradient slot free": taken.slot.free_after, **home.before_read()}
        if home.tier == "disk":
            fetched = self._port.submit(
                Lane.STATES_READ,
                "read gradients of",
                unit,
                reads=[home.span()],
                writes=[target],
                after=after,
                work=Work(is_due=is_due),
            )
        else:
            fetched = self._port.submit(
                Lane.D2H, "gradients of", unit, reads=[home.span()], writes=[target], after=after
            )
        home.read_by(fetched)
        # The operation that uses the slot may be skipped, and then it waits for nothing.
        taken.slot.free_after = newest([*taken.slot.free_after, fetched])
        return Borrowed(target, {"gradients fetched": fetched}, taken)

    def states(self, unit: Ledger[H], is_due: Answer | None = None) -> Borrowed[H] | None:
        """Provide states in host memory: their home, or a slot filled from disk. Returns None if there are none.

        With ``is_due`` the home is only read, since new states go to the second home.
        """
        home = unit.states
        if not home.nbytes:
            return None
        if home.tier == "host":
            return Borrowed(home.span(), home.before_write() if is_due is None else home.before_read())
        kept = self._pools.take_kept("states", home)
        if kept is not None:
            return Borrowed(kept.slot.span(home.nbytes), {"kept states written": kept.slot.free_after}, kept)
        taken = self._pools.take("host", "states", home.nbytes)
        target = taken.slot.span(home.nbytes)
        read = self._port.submit(
            Lane.STATES_READ,
            "read states of",
            unit,
            reads=[home.span()],
            writes=[target],
            after={"state slot free": taken.slot.free_after, **home.before_read()},
            work=Work(is_due=is_due),
        )
        return Borrowed(target, {"states fetched": read}, taken)

    def new_weights(self, unit: Ledger[H]) -> Borrowed[H]:
        """Provide the place to write new trainable weights to: their home, or a slot on the way there."""
        start, stop = unit.cut.updated
        if unit.weights.tier == "host":
            return Borrowed(unit.weights.span(start, stop), unit.weights.before_write())
        taken = self._pools.take("host", "new_weights", stop - start)
        target, after = taken.slot.span(stop - start), {"new weights slot free": taken.slot.free_after}
        if unit.starts_from_weights:
            return Borrowed(target, self.old_weights(unit, target, after), taken)
        return Borrowed(target, after, taken)

    def old_weights(self, unit: Ledger[H], target: ByteSpan, after: After[H], is_due: Answer | None = None) -> After[H]:
        """Start reading old trained weights from disk into the place of the new ones. Returns what to wait for then."""
        read = self._port.submit(
            Lane.STATES_READ,
            "read old weights of",
            unit,
            reads=[unit.weights.span(0, target.nbytes)],
            writes=[target],
            after={**after, **unit.weights.before_read()},
            work=Work(is_due=is_due),
        )
        unit.weights.read_by(read)
        return {"old weights read": read}

    def give_back_gradients(self, unit: Ledger[H], grads: Borrowed[H], done: H) -> None:
        """Give gradients back after their last use by an update."""
        if grads.taken is None:
            unit.gradients.read_by(done)
        else:
            self._pools.give_back(grads.taken, done, Lane.UPDATE)

    def write_states(
        self,
        unit: Ledger[H],
        states: Borrowed[H],
        home: Home[H],
        done: H,
        is_due: Answer | None = None,
        is_wanted: Answer | None = None,
    ) -> None:
        """Note that ``done`` updates states. If they are in a slot, write them to disk; the slot keeps a copy.

        Args:
            unit: The unit.
            states: Place where the states are updated.
            home: Their home.
            done: The update that makes them.
            is_due: See ``Work``.
            is_wanted: See ``Work``.
        """
        read = home.readers  # saves that read the bytes that are written now
        written_by = home.written_by if is_due is None else home.perhaps_written_by
        written_by(done)
        if states.taken is None:
            return
        written = self._port.submit(
            Lane.STATES_WRITE,
            "write states of",
            unit,
            reads=[states.span],
            writes=[home.span()],
            after={"states updated": done, "states read": read},
            work=Work(is_due=is_due, is_wanted=is_wanted),
        )
        self._pools.give_back_kept(states.taken, home, done, written)
        written_by(written)
