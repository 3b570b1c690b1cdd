"""Activations on the move: what forwards saved leaves for host memory or disk, and comes back for backward.

[Note: activations away] What a call saved stays on the device until the next call begins, so that activations of the
last call, which backward needs first, never leave. While the next call runs they are copied to their home. When the
call after that begins, the host waits for the copy and lets go of the memory on the device. So the device holds
activations of at most two calls in addition to those of the running call. In backward activations come back into slots,
those of earlier calls in advance as far as there are slots. If they have not been let go of yet, they are used where
they are and given up behind their backward; a copy that has not begun by then is dropped.

A unit has one home with room for what one call saves at most, or one home for each piece in which it runs a batch. If a
unit is called more often before its backward, calls share a home as far as there is room: each gets a part of it, which
is a home, too. A call that finds no room does not use this mechanism.

[Note: lent bytes] A call may save its own result; the next call gets it as an argument and saves it, too. These bytes
rest once, in the home of the call that made them. The other call *borrows* them: for its backward they come from there,
to the end of the borrower's slot. The home stays taken as long as a borrower's backward may come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

from outcore.core.quantities import PAGE_BYTES
from outcore.order.ledger import ByteSpan, H, Home, HomeParts, Ledger, TakenSlot, newest
from outcore.order.port import Port, Work, WorkFunction
from outcore.order.slots import Pools
from outcore.spec.lane_names import Lane


class SavedActivations(Protocol):
    """Activations that one call of a unit saved. On paper, only their size."""

    nbytes: int
    is_held: bool
    """True while they are still on the device, where forward left them."""

    @property
    def memory(self) -> Any:
        """In a run, an object that stands for the memory in which forward left them."""

    def is_wanted(self) -> bool:
        """Return whether a backward can still need them."""

    def leave(self, target: ByteSpan) -> WorkFunction:
        """Copy them off the device."""

    def close(self) -> None:
        """Free the memory on the device, since they are home."""

    def close_early(self) -> None:
        """Free the memory on the device, since they are not needed any more. A copy of them may be under way."""


class CallOwner(Protocol):
    """The object through which a backward can come to a call. Lanes may ask it, too."""

    @property
    def lives(self) -> bool:
        """Whether a backward can still come."""


class Loan(NamedTuple, Generic[H]):
    """Bytes that one call needs and another call has sent away. See [Note: lent bytes]."""

    borrower: CallOwner
    lender: SavedCall[H]
    start: int
    """First byte in the lender's home."""
    nbytes: int
    at: int
    """First byte in the slot of the borrowing call."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedCall(Generic[H]):
    """A call, its saved activations, and what was submitted for them."""

    unit: Ledger[H]
    saved: SavedActivations
    home: Home[H]
    """Home where the activations rest."""
    source: Home[H]
    """Place on the device where forward left them; its ``ready`` is the operation that made them."""
    left: H | None = None
    """Copy after which they need not be on the device."""
    place: TakenSlot[H] | None = None
    """Slot on the device to which they came back."""
    came: H | None = None
    """Operation that brought them there."""
    staged: TakenSlot[H] | None = None
    """Slot in host memory that holds them on their way from disk."""
    at_hand: H | None = None
    """Operation that brought them to that slot, or the last one that read them there since."""
    loans: Sequence[Loan[H]] = ()
    """Loans in which this call is the borrower."""
    borrowers: list[CallOwner] = field(default_factory=list)
    is_over: bool = False
    """True when no backward comes to the call any more."""

    @property
    def slot_bytes(self) -> int:
        """Bytes that the call needs in a slot on the device, with what it borrows."""
        return max([self.saved.nbytes, *(loan.at + loan.nbytes for loan in self.loans)])

    @property
    def is_coming(self) -> bool:
        """Whether a backward can come to the call."""
        return not self.is_over and self.saved.is_wanted()

    @property
    def is_needed(self) -> bool:
        """Whether a backward can come to the call, or to a call that borrows from it."""
        return self.is_coming or any([owner.lives for owner in self.borrowers])

    def span(self) -> ByteSpan | None:
        """Return where the activations are on the device if they came back, else None."""
        return None if self.place is None else self.place.slot.span(self.slot_bytes)

    def repay(self) -> None:
        """End all loans of this call, since it needs nothing of other calls any more."""
        for loan in self.loans:
            loan.lender.borrowers.remove(loan.borrower)
        self.loans = ()


class ActivationOrder(Generic[H]):
    """Submits the operations of activations that leave. See [Note: activations away]."""

    def __init__(self, units: Sequence[Ledger[H]], port: Port[H], pools: Pools[H]) -> None:
        self.homes_are_used = any(unit.plan.saved_bytes for unit in units)
        self._port, self._pools = port, pools
        self._calls: dict[Home[H], SavedCall[H]] = {}
        """Calls by their home; backward comes to the last one first."""
        self._parts: HomeParts[H] = HomeParts()
        self._last: SavedCall[H] | None = None
        self._leaving: SavedCall[H] | None = None

    def room(self, unit: Ledger[H]) -> int:
        """Return the largest free range in the unit's homes, in bytes."""
        return max(
            (stop - start for home in unit.activations for start, stop in self._parts.gaps(home, self._is_needed)),
            default=0,
        )

    def _is_needed(self, home: Home[H]) -> bool:
        call = self._calls.get(home)
        return call is not None and call.is_needed

    def _part(self, unit: Ledger[H], nbytes: int) -> Home[H]:
        """Take the first part of a home with room for so many bytes. What was there before is given up."""
        home, displaced = self._parts.take(unit.activations, nbytes, self._is_needed)
        for before in (self._calls.pop(one, None) for one in displaced):
            if before is not None:
                self._give(before, before.came)
                self._give_staged(before)
        return home

    def begin_forward(self) -> None:
        """Begin a call whose backward may come: send earlier activations away, and let go of those that have left."""
        last, self._last = self._last, None
        if last is not None and last.saved.is_wanted():
            self._send(last)
        elif last is not None:
            last.saved.close_early()
        leaving, self._leaving = self._leaving, last
        if leaving is not None and leaving.left is not None and leaving.saved.is_held:
            self._port.wait("activations left", leaving.left, frees=[leaving.source.span()])
            leaving.saved.close()

    def end_forward(self, unit: Ledger[H], saved: SavedActivations, loans: Sequence[Loan[H]] = ()) -> SavedCall[H]:
        """End a call and give what it saved a home. Args: loans: Parts that other calls have sent away."""
        name = f"activations of {unit.name} as made"
        source: Home[H] = Home(name, "activations", "device", saved.nbytes, saved.memory)
        source.written_by(self._port.mark("activations made", unit, wrote=[source.span()]))
        home = self._part(unit, max(saved.nbytes, PAGE_BYTES))
        call = SavedCall(unit, saved, home, source, loans=loans)
        for loan in loans:
            loan.lender.borrowers.append(loan.borrower)
        self._calls[home] = self._last = call  # the newest comes last
        return call

    def turn(self, unit: Ledger[H]) -> None:
        """Expect backward to come to the unit's latest calls in the order of forward, as to pieces of one batch."""
        latest = itertools.takewhile(lambda home: self._calls[home].unit is unit, reversed(self._calls))
        for home in list(latest):
            self._calls[home] = self._calls.pop(home)

    def begin_backward(self, call: SavedCall[H]) -> ByteSpan | None:
        """Let compute use what a call saved, and bring what earlier calls saved. Returns its slot if it had left."""
        if self._last is call:
            self._last = None
        if not call.saved.is_held and call.place is None:
            self._bring(call, self._take(call))
        for other in self._before(call):
            if other.saved.is_held or other.place is not None:
                continue
            pool = self._pools.pool("device", "activations", other.slot_bytes)
            free = pool.take()
            if free is None:
                break
            self._bring(other, TakenSlot(pool, free))
        self._read_ahead(call)
        span = call.span()
        if span is not None:
            self._port.compute("use activations of", call.unit, reads=[span], after={"activations came": call.came})
        return span

    def end_backward(self, call: SavedCall[H], *, is_over: bool = True) -> None:
        """End the backward of a call: its slot is free again. Args: is_over: No backward comes to the call again."""
        self._give(call, self._port.mark("activations used", call.unit))
        if not is_over:
            return
        call.is_over = True
        call.repay()
        if self._calls.get(call.home) is call and not call.is_needed:
            self._give_staged(call)
            del self._calls[call.home]
        if self._leaving is call:
            self._leaving = None
            call.saved.close_early()

    def clear(self) -> None:
        """Forget what was on its way. Nothing is in flight, and slots have been reclaimed. See [Note: cut short]."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.left is not None:
            leaving.saved.close()
        for call in self._calls.values():
            call.place = call.came = call.staged = call.at_hand = None

    def close(self) -> None:
        """Forget everything, so that memory can be given back."""
        self._calls.clear()
        self._parts.clear()
        self._last = self._leaving = None

    def _before(self, call: SavedCall[H]) -> Iterator[SavedCall[H]]:
        """Yield earlier calls whose backward comes next, the nearest first."""
        calls = list(self._calls.values())
        for other in reversed(calls[: calls.index(call)] if call in calls else calls):
            if other.is_coming:
                yield other

    def _take(self, call: SavedCall[H]) -> TakenSlot[H]:
        """Take a slot for what is needed now: an idle one, or that of another call, which can be brought again."""
        pool = self._pools.pool("device", "activations", call.slot_bytes)
        slot = pool.take()
        if slot is None:
            other = next(c for c in self._calls.values() if c.place is not None and c.place.pool is pool)
            self._give(other, other.came)
            slot = pool.take()
        if slot is None:
            raise AssertionError("no idle slot for activations: one was not given back")
        return TakenSlot(pool, slot)

    def _give(self, call: SavedCall[H], last_use: H | None) -> None:
        if call.place is not None and last_use is not None:
            self._pools.give_back(call.place, last_use, Lane.H2D)
        call.place = call.came = None

    def _send(self, call: SavedCall[H]) -> None:
        unit, home, nbytes = call.unit, call.home, call.saved.nbytes
        if not nbytes:  # all of it is borrowed
            call.left = call.loans[-1].lender.left
            return
        after, target = home.before_write(), home.span(0, nbytes)
        taken = None
        if home.tier == "disk":
            taken = self._host_slot(nbytes)
            after, target = {"activation slot free": taken.slot.free_after}, taken.slot.span(nbytes)

        def is_due() -> bool:
            return call.is_needed  # False if its backward came first

        call.left = self._port.submit(
            Lane.D2H,
            "activations of",
            unit,
            reads=[call.source.span()],
            writes=[target],
            after={"activations made": call.source.ready, **after},
            work=Work(call.saved.leave(target), moved=nbytes, is_due=is_due),
        )
        home_written = call.left
        if taken is not None:
            home_written = self._port.submit(
                Lane.DISK_WRITE,
                "write activations of",
                unit,
                reads=[target],
                writes=[home.span(0, nbytes)],
                after={"activations at hand": call.left, **home.before_write()},
                work=Work(is_due=is_due),
            )
            taken.slot.free_after = newest([*taken.slot.free_after, call.left])  # the write alone may be skipped
            self._pools.give_back_kept(taken, home, call.left, home_written)
        home.perhaps_written_by(home_written)

    def _bring(self, call: SavedCall[H], place: TakenSlot[H]) -> None:
        call.place = place
        if call.saved.nbytes:
            self._carry(call, place, call, 0, call.saved.nbytes, 0)
            self._give_staged(call)
        for _, lender, start, nbytes, at in call.loans:
            self._carry(call, place, lender, start, nbytes, at)
            if lender.place is not None or not lender.is_coming:
                self._give_staged(lender)

    def _carry(
        self, call: SavedCall[H], place: TakenSlot[H], owner: SavedCall[H], start: int, nbytes: int, at: int
    ) -> None:
        """Bring bytes that a call needs.

        Args:
            call: The call that needs them.
            place: Its slot on the device.
            owner: The call in whose home they rest.
            start: First byte in that home.
            nbytes: Number of bytes.
            at: First byte in the slot.
        """
        home = owner.home
        source, after = home.span(start, start + nbytes), home.before_read()
        if home.tier == "disk" and owner.staged is None:
            self._stage(owner, self._pools.take_kept("activations", home) or self._host_slot(owner.saved.nbytes))
        if owner.staged is not None:
            source = owner.staged.slot.span(start + nbytes, start)
            after = {"activations at hand": owner.at_hand}
        call.came = self._port.submit(
            Lane.H2D,
            "bring activations of",
            owner.unit,
            reads=[source],
            writes=[place.slot.span(at + nbytes, at)],
            after={"slot of activations free": place.slot.free_after, **after},
        )
        if owner.staged is None:
            home.read_by(call.came)
        else:
            owner.at_hand = call.came

    def _read_ahead(self, call: SavedCall[H]) -> None:
        """Read from disk for the calls whose backward comes next, as far as slots in host memory are idle."""
        for other in self._before(call) if self._pools.of("host", "activations") else ():
            is_there = other.saved.is_held or other.place or other.staged
            if other.home.tier != "disk" or is_there or not other.saved.nbytes:
                continue
            kept = self._pools.take_kept("activations", other.home)
            taken = kept or self._pools.take_idle("host", "activations", other.saved.nbytes)
            if taken is None:
                break
            self._stage(other, taken)

    def _stage(self, call: SavedCall[H], taken: TakenSlot[H]) -> None:
        """Read what a call saved from disk into a slot, unless the slot still holds a copy."""
        home, nbytes = call.home, call.saved.nbytes
        call.staged, call.at_hand = taken, taken.slot.kept_after
        if taken.slot.kept is not home:
            call.at_hand = self._port.submit(
                Lane.WEIGHTS_READ,
                "read activations of",
                call.unit,
                reads=[home.span(0, nbytes)],
                writes=[taken.slot.span(nbytes)],
                after={"activation slot free": taken.slot.free_after, **home.before_read()},
            )
            home.read_by(call.at_hand)

    def _host_slot(self, nbytes: int) -> TakenSlot[H]:
        """Take a slot in host memory: an idle one, or that of another call, which can be read again."""
        taken = self._pools.take_idle("host", "activations", nbytes)
        if taken is not None:
            return taken
        pool = self._pools.pool("host", "activations", nbytes)
        self._give_staged(next(c for c in self._calls.values() if c.staged is not None and c.staged.pool is pool))
        return self._pools.take("host", "activations", nbytes)

    def _give_staged(self, call: SavedCall[H]) -> None:
        if call.staged is not None and call.at_hand is not None:
            self._pools.give_back(call.staged, call.at_hand, Lane(call.at_hand.lane))
        call.staged = call.at_hand = None
