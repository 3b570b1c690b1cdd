"""Gradients of a unit: into a bucket, home, and added to what is there.

[Note: turns] With several ranks a unit's gradients are exchanged once in each backward pass. Exchanges meet in the
order of submission, so units take turns in an order that is the same on all ranks, whatever a rank visits. A rank that
did not reach a unit sends a bucket all the same, and says that nothing in it counts. The runs of all ranks are added
one after another to the sum at home, so the result is that of a plain loop over the micro-batches of all ranks in turn.
From three ranks on, a sum that rests in host memory comes to the device for that, since it is shorter than the runs of
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from outcore.order.ledger import After, ByteSpan, Dependency, H, Ledger, TakenSlot
from outcore.order.port import Port, Work, WorkFunction
from outcore.order.slots import Pools, SlotPool, Supply
from outcore.spec.lane_names import Lane
from outcore.spec.layout import sums_on_device

U = TypeVar("U", bound=Hashable)


class Turns(Generic[U]):
    """Turns of units, in one backward pass after another."""

    def __init__(self, units: Iterable[U]) -> None:
        """Args: units: All trained units in module order. The root, complete only when a pass is over, comes first."""
        self.order = tuple(units)[::-1]  # the order of backward
        self._places = {unit: i for i, unit in enumerate(self.order)}
        self._next = 0
        self._ready: set[int] = set()

    def come(self, unit: U) -> Iterator[U]:
        """Note that all gradients of a unit are there. Yields the units whose turn it is now, if any."""
        self._ready.add(self._places[unit])
        while self._next in self._ready:
            self._next += 1
            yield self.order[self._next - 1]

    def rest(self) -> Iterator[U]:
        """End the pass. Yields the units that had no turn in it."""
        while self._next < len(self.order):
            self._next += 1
            yield self.order[self._next - 1]
        self._next = 0
        self._ready.clear()


class GradientWork(Protocol):
    """The work on a unit's gradients of one pass. On paper it does nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes of gradients that the pass gave."""

    def leave(self, target: ByteSpan) -> WorkFunction:
        """Copy them to host memory as autograd made them."""

    def landed(self) -> None:
        """Note that they replace what is at home."""

    def add_on_device(self) -> None:
        """Add them at once to the sums that live on the device."""

    def add_on_host(self, landing: ByteSpan, target: ByteSpan) -> WorkFunction:
        """Add what landed to the sums at home."""


class SharedWork(Protocol):
    """The work of several ranks on a unit's gradients of one pass. On paper it does nothing."""

    def put_in(self, bucket: ByteSpan) -> None:
        """Let compute put into a bucket what is not there yet."""

    def exchange(self, bucket: ByteSpan, received: ByteSpan) -> WorkFunction:
        """Send every rank its run of the bucket, and receive this rank's run of all buckets, in rank order."""

    def add_runs(self, received: ByteSpan, target: ByteSpan) -> WorkFunction:
        """Add the runs of all ranks to the sums of earlier passes, in rank order."""


class GradientOrder(Generic[H]):
    """Submits the operations of a backward pass on gradients."""

    def __init__(self, port: Port[H], pools: Pools[H], supply: Supply[H]) -> None:
        self._port, self._pools, self._supply = port, pools, supply

    def collect(self, unit: Ledger[H], made: H | None, make_room: Callable[[SlotPool[H]], None]) -> tuple[ByteSpan, H]:
        """Let compute put gradients into the unit's bucket. Returns the bucket and the operation on compute.

        Args:
            unit: A unit whose gradients leave through a bucket.
            made: Operation that put earlier gradients of this pass into the bucket, if there was one.
            make_room: Empties a bucket of another unit if all buckets of a pool are taken: it sends these gradients
                home early, and later ones are added there. With several ranks it takes them out of the bucket.
        """
        nbytes = unit.spec.bucket_bytes
        after: dict[str, Dependency[H]] = {"gradients made": made}
        if unit.bucket is None:
            pool = self._pools.pool("device", "bucket", nbytes)
            slot = pool.take()
            while slot is None:
                make_room(pool)
                slot = pool.take()
            unit.bucket, after = TakenSlot(pool, slot), {"bucket free": slot.free_after}
        bucket = unit.bucket.slot.span(nbytes)
        return bucket, self._port.compute("gradients of", unit, writes=[bucket], after=after)

    def send(self, unit: Ledger[H], work: GradientWork, *, is_first: bool) -> None:
        """Send the sums of a pass home, and give the bucket back.

        Args:
            unit: A unit that autograd is done with in this pass.
            work: Work on its gradients.
            is_first: Whether these are the first gradients, so that the bytes at home do not count.
        """
        home = unit.gradients
        if home.tier == "device":
            self._port.compute("accumulate", unit, writes=[home.span()], after=home.before_write())
            work.add_on_device()
            home.written_by(self._port.mark("accumulated", unit))
        elif home.tier == "host" and is_first:
            copied = self._copy_out(unit, work, home.span(0, unit.spec.bucket_bytes), home.before_write())
            work.landed()
            home.written_by(copied)
        else:
            self._land(unit, work, is_first=is_first)

    # Between ranks. See [Note: turns].

    def share(
        self, unit: Ledger[H], work: SharedWork, make_room: Callable[[SlotPool[H]], None], *, is_first: bool
    ) -> H:
        """Exchange runs, and add up this rank's own. A rank that did not reach the unit takes part, too.

        Args: as for ``collect`` and ``send``. Returns the exchange.
        """
        received, exchanged = self._exchange(unit, work, make_room)
        if sums_on_device(unit.spec, unit.plan):
            self._add_there(unit, work, received, exchanged, is_first=is_first)
            return exchanged
        arrived = exchanged
        home, lane, free = unit.gradients, Lane.DEVICE_UPDATE, received
        landed, after, fetched = received.slot.span(unit.spec.bucket_bytes), home.before_write(), None
        target = home.span()
        if home.tier != "device":
            lane, free = Lane.UPDATE, self._pools.take("host", "landing", unit.spec.bucket_bytes)
            source, landed = landed, free.slot.span(unit.spec.bucket_bytes)
            ready: After[H] = {"gradients exchanged": exchanged, "landing free": free.slot.free_after}
            arrived = self._port.submit(Lane.D2H, "gradients of", unit, reads=[source], writes=[landed], after=ready)
            self._pools.give_back(received, arrived, Lane.D2H)
        if home.tier == "disk":
            fetched = self._supply.room_for_gradients(unit) if is_first else self._supply.fetch_gradients(unit)
            target, after = fetched.span, dict(fetched.after)
        added = self._port.submit(
            lane,
            "accumulate",
            unit,
            reads=[landed],
            writes=[target],
            after={"gradients landed": arrived, **after},
            work=Work(work.add_runs(landed, target)),
        )
        self._pools.give_back(free, added, lane)
        if fetched is None or fetched.taken is None:
            home.written_by(added)
        else:
            self._write(unit, target, fetched.taken, added)
        return exchanged

    def _add_there(
        self, unit: Ledger[H], work: SharedWork, received: TakenSlot[H], exchanged: H, *, is_first: bool
    ) -> None:
        """Bring the sums to the device, add the runs of all ranks, and send them home."""
        taken, home = self._pools.take("device", "sums", unit.spec.update_bytes), unit.gradients
        sums, ready = taken.slot.span(home.nbytes), {"slot free": taken.slot.free_after}
        if not is_first:
            brought = self._port.submit(
                Lane.STATES_H2D,
                "bring gradients of",
                unit,
                reads=[home.span()],
                writes=[sums],
                after={**ready, **home.before_read()},
            )
            home.read_by(brought)
            ready = {"sums there": [brought]}
        source = received.slot.span(unit.spec.bucket_bytes)
        added = self._port.submit(
            Lane.DEVICE_UPDATE,
            "accumulate",
            unit,
            reads=[source],
            writes=[sums],
            after={"gradients exchanged": exchanged, **ready},
            work=Work(work.add_runs(source, sums)),
        )
        self._pools.give_back(received, added, Lane.DEVICE_UPDATE)
        sent = self._port.submit(
            Lane.D2H,
            "gradients of",
            unit,
            reads=[sums],
            writes=[home.span()],
            after={"gradients added up": added, **home.before_write()},
        )
        home.written_by(sent)
        self._pools.give_back(taken, sent, Lane.D2H)

    def _exchange(
        self, unit: Ledger[H], work: SharedWork, make_room: Callable[[SlotPool[H]], None]
    ) -> tuple[TakenSlot[H], H]:
        """Submit the exchange. Returns the slot that receives this rank's run of all buckets, and the operation."""
        nbytes = unit.spec.bucket_bytes
        if unit.bucket is None:
            bucket, _ = self.collect(unit, None, make_room)
            work.put_in(bucket)
        else:  # all gradients of the pass are in it
            bucket = unit.bucket.slot.span(nbytes)
        taken = self._pools.take("device", "received", nbytes)
        received = taken.slot.span(nbytes)
        exchanged = self._port.submit(
            Lane.REDUCE,
            "exchange gradients of",
            unit,
            reads=[bucket],
            writes=[received],
            after={"gradients made": self._port.mark("gradients made", unit), "slot free": taken.slot.free_after},
            work=Work(work.exchange(bucket, received), moved=unit.spec.others_bytes),
        )
        self._give_bucket(unit, exchanged)
        return taken, exchanged

    def give_back(self, unit: Ledger[H]) -> None:
        """Give the unit's bucket back after compute has taken out what was in it."""
        self._give_bucket(unit, self._port.mark("gradients taken out", unit))

    def _give_bucket(self, unit: Ledger[H], last_use: H) -> None:
        if unit.bucket is not None:
            self._pools.give_back(unit.bucket, last_use, Lane.REDUCE)
            unit.bucket = None

    def _copy_out(self, unit: Ledger[H], work: GradientWork, target: ByteSpan, after: After[H]) -> H:
        nbytes, made = unit.spec.bucket_bytes, self._port.mark("gradients made", unit)
        copied = self._port.submit(
            Lane.D2H,
            "gradients of",
            unit,
            reads=[] if unit.bucket is None else [unit.bucket.slot.span(nbytes)],
            writes=[target],
            after={"gradients made": made, **after},
            work=Work(work.leave(target), moved=work.nbytes),
        )
        if unit.bucket is not None:
            pool, slot = unit.bucket
            pool.give_back(slot, [copied, self._port.freed(slot, Lane.D2H)])
            unit.bucket = None
        return copied

    def _land(self, unit: Ledger[H], work: GradientWork, *, is_first: bool) -> None:
        """Send gradients home through a landing slot, since they cannot simply be copied there."""
        taken = self._pools.take("host", "landing", unit.spec.bucket_bytes)
        landing = taken.slot.span(unit.spec.bucket_bytes)
        landed = self._copy_out(unit, work, landing, {"landing free": taken.slot.free_after})
        if is_first:
            self._write(unit, landing, taken, landed)
            work.landed()
        else:
            added = self._add_on_host(unit, work, landing, landed)
            taken.pool.give_back(taken.slot, [added, self._port.freed(taken.slot, Lane.UPDATE)])

    def _add_on_host(self, unit: Ledger[H], work: GradientWork, landing: ByteSpan, landed: H) -> H:
        home, fetched = unit.gradients, None
        target, after = home.span(), home.before_write()
        if home.tier == "disk":
            fetched = self._supply.fetch_gradients(unit)
            target, after = fetched.span, dict(fetched.after)
        added = self._port.submit(
            Lane.UPDATE,
            "accumulate",
            unit,
            reads=[landing],
            writes=[target],
            after={"gradients landed": landed, **after},
            work=Work(work.add_on_host(landing, target)),
        )
        if fetched is None:
            home.written_by(added)
        elif fetched.taken is not None:
            self._write(unit, target, fetched.taken, added)
        return added

    def _write(self, unit: Ledger[H], source: ByteSpan, taken: TakenSlot[H], made: H) -> None:
        home = unit.gradients
        written = self._port.submit(
            Lane.DISK_WRITE,
            "write gradients of",
            unit,
            reads=[source],
            writes=[home.span(0, source.nbytes)],
            after={"gradients at hand": made, **home.before_write()},
        )
        home.written_by(written)
        self._pools.give_back_kept(taken, home, made, written)
