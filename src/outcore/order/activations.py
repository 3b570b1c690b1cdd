"""Activations on the move: what forwards saved leaves for host memory or disk, and comes back for backward.

[Note: activations away] What a call saved stays on the device until the next call begins: what backward wants first has
then never left. While that call runs, it is copied to its home; when the one after it begins, the host waits for the
copy and lets go of the memory on the device. So no more than two calls' activations are there besides those of the call
that runs. In backward they come back into slots, those of earlier calls in advance as far as there are slots. What has
not been let go of yet is used where it is, and given up behind its backward: a copy that has not begun by then is
dropped.

A unit has a home for what one call saves at most, or as many homes as pieces in which it runs a batch. If it is called
more often before its backward, calls share a home as far as there is room: each has a part of it, which is a home too.
What does not fit does otherwise.

[Note: lent bytes] A call may save its own result, and the next one gets it as an argument and saves it too. It rests
once, in the home of the call that made it. The other one *borrows* it: for backward it comes from there, to the end of
the borrower's slot. The home stays taken as long as a borrower's backward may come.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

from outcore.core.quantities import PAGE_BYTES
from outcore.order.ledger import H, Home, Ledger, Span, Taken, newest
from outcore.order.port import Deed, Port, Work
from outcore.order.slots import Pools
from outcore.spec.lanes import Lane


class Saved(Protocol):
    """What one call of a unit saved. On paper, only its size."""

    nbytes: int
    is_held: bool
    """It is on the device still, where forward left it."""

    @property
    def memory(self) -> Any:
        """In a run: stands for the memory in which forward left it."""

    def is_wanted(self) -> bool:
        """Whether a backward can come to it."""

    def leave(self, target: Span) -> Deed:
        """Copy it off the device."""

    def let_go(self) -> None:
        """It is home: the memory on the device is not needed any more."""

    def give_up(self) -> None:
        """It is not needed any more, though a copy of it may be under way."""


class Owner(Protocol):
    """Whoever can bring a backward to a call. Lanes may ask, too."""

    @property
    def lives(self) -> bool:
        """Whether it still can."""


class Loan(NamedTuple, Generic[H]):
    """Bytes that one call needs and another one has sent. See [Note: lent bytes]."""

    borrower: Owner
    lender: SavedCall[H]
    start: int
    """Where they begin in its home."""
    nbytes: int
    at: int
    """Where they go in the slot of the call that needs them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedCall(Generic[H]):
    """One call, and what was submitted for it."""

    unit: Ledger[H]
    saved: Saved
    home: Home[H]
    """Where it rests."""
    source: Home[H]
    """Where forward left it; ``ready`` is what made it."""
    left: H | None = None
    """The copy after which it need not be on the device."""
    place: Taken[H] | None = None
    """The slot on the device that it came back to."""
    came: H | None = None
    """What brought it there."""
    staged: Taken[H] | None = None
    """The slot in host memory that it is in, on its way from disk."""
    at_hand: H | None = None
    """What brought it there, or has read it there since."""
    loans: Sequence[Loan[H]] = ()
    """What it borrows."""
    borrowers: list[Owner] = field(default_factory=list)
    is_over: bool = False
    """No backward comes to it any more."""

    @property
    def slot_bytes(self) -> int:
        """What it takes in a slot on the device."""
        return max([self.saved.nbytes, *(loan.at + loan.nbytes for loan in self.loans)])

    @property
    def is_coming(self) -> bool:
        """Whether a backward can come to it."""
        return not self.is_over and self.saved.is_wanted()

    @property
    def is_needed(self) -> bool:
        """Whether one can, or can come to a call that borrows from it."""
        return self.is_coming or any([owner.lives for owner in self.borrowers])

    def span(self) -> Span | None:
        """Where it is on the device, if it came back."""
        return None if self.place is None else self.place.slot.span(self.slot_bytes)

    def repay(self) -> None:
        """It needs nothing of others any more."""
        for loan in self.loans:
            loan.lender.borrowers.remove(loan.borrower)
        self.loans = ()


class _Part(NamedTuple, Generic[H]):
    """The bytes [start, stop) of a unit's home."""

    start: int
    stop: int
    home: Home[H]


def _cut(home: Home[H], start: int, stop: int) -> Home[H]:
    return Home(home.name, home.kind, home.tier, stop - start, home.span(start, stop).memory)


class ActivationOrder(Generic[H]):
    """What is submitted for activations that leave. See [Note: activations away]."""

    def __init__(self, units: Sequence[Ledger[H]], port: Port[H], pools: Pools[H]) -> None:
        self.homes_are_used = any(unit.plan.saved_bytes for unit in units)
        self._port, self._pools = port, pools
        self._calls: dict[Home[H], SavedCall[H]] = {}
        """Who has a home, in the order in which backward comes to them last."""
        self._parts: dict[Home[H], list[_Part[H]]] = {}
        """Of each home, those that were used last; none overlap."""
        self._last: SavedCall[H] | None = None
        self._leaving: SavedCall[H] | None = None

    def room(self, unit: Ledger[H]) -> int:
        """The most bytes that homes of the unit can take of what another call saves."""
        return max((stop - start for home in unit.activations for start, stop in self._gaps(home)), default=0)

    def _gaps(self, home: Home[H]) -> Iterator[tuple[int, int]]:
        """Where nothing lies that a backward may come to."""
        end = 0
        for part in sorted(self._parts.get(home, []), key=lambda part: part.start):
            call = self._calls.get(part.home)
            if call is not None and call.is_needed:
                yield end, part.start
                end = part.stop
        yield end, home.nbytes

    def _part(self, unit: Ledger[H], nbytes: int) -> Home[H]:
        """The first part of a home that can take so many bytes. What was there before is given up."""
        gaps = ((home, *gap) for home in unit.activations for gap in self._gaps(home))
        home, start = next((home, start) for home, start, stop in gaps if stop - start >= nbytes)
        parts, stop = self._parts.setdefault(home, []), start + nbytes
        over = [part for part in parts if part.start < stop and start < part.stop]
        for part in over:
            before = self._calls.pop(part.home, None)
            if before is not None:
                self._give(before, before.came)
                self._give_staged(before)
        if len(over) == 1 and (over[0].start, over[0].stop) == (start, stop):
            return over[0].home
        mine = home if nbytes == home.nbytes else _cut(home, start, stop)
        used = [handle for part in over for handle in (part.home.ready, *part.home.readers) if handle is not None]
        mine.ready, mine.readers = None, newest(used)
        kept = [part for part in parts if part not in over]
        for part in over:  # whoever writes what is left of it comes after what used all of it
            for bounds in ((part.start, start), (stop, part.stop)):
                if bounds[0] < bounds[1]:
                    left = _cut(home, *bounds)
                    left.ready, left.readers = part.home.ready, part.home.readers
                    kept.append(_Part(*bounds, left))
        parts[:] = [*kept, _Part(start, stop, mine)]
        return mine

    def begin_forward(self) -> None:
        """A call begins whose backward may come. What was saved before makes way."""
        last, self._last = self._last, None
        if last is not None and last.saved.is_wanted():
            self._send(last)
        elif last is not None:
            last.saved.give_up()
        leaving, self._leaving = self._leaving, last
        if leaving is not None and leaving.left is not None and leaving.saved.is_held:
            self._port.wait("activations left", leaving.left, frees=[leaving.source.span()])
            leaving.saved.let_go()

    def end_forward(self, unit: Ledger[H], saved: Saved, loans: Sequence[Loan[H]] = ()) -> SavedCall[H]:
        """A call is over, and what it saved has the unit's home. Args: loans: What others have sent of it."""
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
        """Backward comes to the unit's latest calls in the order of forward, as to pieces of one batch."""
        latest = itertools.takewhile(lambda home: self._calls[home].unit is unit, reversed(self._calls))
        for home in list(latest):
            self._calls[home] = self._calls.pop(home)

    def begin_backward(self, call: SavedCall[H]) -> Span | None:
        """Compute uses what a call saved, and earlier calls' follow. Returns where it came back to, if it had left."""
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
            self._bring(other, Taken(pool, free))
        self._read_ahead(call)
        span = call.span()
        if span is not None:
            self._port.compute("use activations of", call.unit, reads=[span], after={"activations came": call.came})
        return span

    def end_backward(self, call: SavedCall[H], *, is_over: bool = True) -> None:
        """Compute is done with it; the slot goes to another call. Args: is_over: No backward comes to it again."""
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
            call.saved.give_up()

    def reset(self) -> None:
        """Forget what was on its way; nothing is in flight, and slots are taken back. See [Note: cut short]."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving.left is not None:
            leaving.saved.let_go()
        for call in self._calls.values():
            call.place = call.came = call.staged = call.at_hand = None

    def let_go(self) -> None:
        """Forget everything, so that memory can be given back."""
        self._calls.clear()
        self._parts.clear()
        self._last = self._leaving = None

    def _before(self, call: SavedCall[H]) -> Iterator[SavedCall[H]]:
        """Earlier calls whose backward comes next, the nearest first."""
        calls = list(self._calls.values())
        for other in reversed(calls[: calls.index(call)] if call in calls else calls):
            if other.is_coming:
                yield other

    def _take(self, call: SavedCall[H]) -> Taken[H]:
        """A slot for what is wanted now: an idle one, or one in which something waits that can be brought again."""
        pool = self._pools.pool("device", "activations", call.slot_bytes)
        slot = pool.take()
        if slot is None:
            other = next(c for c in self._calls.values() if c.place is not None and c.place.pool is pool)
            self._give(other, other.came)
            slot = pool.take()
        if slot is None:
            raise AssertionError("no idle slot for activations: one was not given back")
        return Taken(pool, slot)

    def _give(self, call: SavedCall[H], last_use: H | None) -> None:
        if call.place is not None and last_use is not None:
            self._pools.give(call.place, last_use, Lane.H2D)
        call.place = call.came = None

    def _send(self, call: SavedCall[H]) -> None:
        unit, home, nbytes = call.unit, call.home, call.saved.nbytes
        if not nbytes:  # all is lent
            call.left = call.loans[-1].lender.left
            return
        after, target = home.before_write(), home.span(0, nbytes)
        taken = None
        if home.tier == "disk":
            taken = self._host_slot(nbytes)
            after, target = {"activation slot free": taken.slot.free_after}, taken.slot.span(nbytes)

        def is_due() -> bool:
            return call.is_needed  # else backward was faster

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
            taken.slot.free_after = newest([*taken.slot.free_after, call.left])  # what writes may be skipped alone
            self._pools.give_kept(taken, home, call.left, home_written)
        home.perhaps_written_by(home_written)

    def _bring(self, call: SavedCall[H], place: Taken[H]) -> None:
        call.place = place
        if call.saved.nbytes:
            self._carry(call, place, call, 0, call.saved.nbytes, 0)
            self._give_staged(call)
        for _, lender, start, nbytes, at in call.loans:
            self._carry(call, place, lender, start, nbytes, at)
            if lender.place is not None or not lender.is_coming:
                self._give_staged(lender)

    def _carry(
        self, call: SavedCall[H], place: Taken[H], owner: SavedCall[H], start: int, nbytes: int, at: int
    ) -> None:
        """Bring bytes that a call needs. Args: place: Its slot. owner: In whose home they are. at: Where they go."""
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
        """From disk, for the calls whose backward comes next, as far as slots in host memory are idle."""
        for other in self._before(call) if self._pools.of("host", "activations") else ():
            is_there = other.saved.is_held or other.place or other.staged
            if other.home.tier != "disk" or is_there or not other.saved.nbytes:
                continue
            kept = self._pools.take_kept("activations", other.home)
            taken = kept or self._pools.take_idle("host", "activations", other.saved.nbytes)
            if taken is None:
                break
            self._stage(other, taken)

    def _stage(self, call: SavedCall[H], taken: Taken[H]) -> None:
        """Read it from disk into a slot, unless it is there still."""
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

    def _host_slot(self, nbytes: int) -> Taken[H]:
        """One that is idle, or in which something waits that can be read again."""
        taken = self._pools.take_idle("host", "activations", nbytes)
        if taken is not None:
            return taken
        pool = self._pools.pool("host", "activations", nbytes)
        self._give_staged(next(c for c in self._calls.values() if c.staged is not None and c.staged.pool is pool))
        return self._pools.take("host", "activations", nbytes)

    def _give_staged(self, call: SavedCall[H]) -> None:
        if call.staged is not None and call.at_hand is not None:
            self._pools.give(call.staged, call.at_hand, Lane(call.at_hand.lane))
        call.staged = call.at_hand = None
