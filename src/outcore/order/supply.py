"""Supply of updates in host memory: gradients, states and room for new weights, brought from other tiers if needed.

See [Note: what slots keep].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from outcore.order.ledger import After, ByteSpan, H, Home, Ledger, TakenSlot, newest
from outcore.order.port import Answer, Port, Work
from outcore.order.slots import Pools
from outcore.spec.lane_names import Lane


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
