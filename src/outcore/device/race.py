"""The race checker: finds pairs of conflicting accesses that no wait orders, whatever their timing was.

It keeps vector clocks over the actors: the host, compute (one per stream) and the lanes. It decides everything from
declarations at submission. So a run on the CPU, where compute is never late, finds the bugs of a GPU, where compute
always is late. The rules of order:

- An operation begins after everything that the host knew when it submitted the operation, after the previous operation
  of its lane, and after the handles in its ``after``. The host and each stream of compute work in program order.
- Handles order streams of compute among themselves, and so does ``order``, which reports that other code joined them.
  Nothing else does.
- The host knows only the operations that it waited for. So submission does not put an operation behind earlier compute:
  only a handle of compute (``mark``) does.

The log follows FastTrack (Flanagan and Freund, PLDI 2009). For each byte range it keeps the last write and the reads
since, at most one per actor. An access makes each access that happened before it redundant: whatever is unordered with
the earlier one is also unordered with the later one. Cost: O(log n + pieces touched) per access over n pieces of an
arena.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

from outcore.core.errors import RaceError
from outcore.device.lanes import Clock
from outcore.memory.arena import Region
from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE, HOST

ACTORS = (HOST, COMPUTE, *(lane.value for lane in Lane))
_INDEX = {actor: index for index, actor in enumerate(ACTORS)}


class _RecordedAccess(NamedTuple):
    """One access: the ``tick``-th thing that ``actor`` did."""

    actor: int
    tick: int
    name: str


class _LoggedRange(NamedTuple):
    """The remembered accesses to a range of bytes."""

    write: _RecordedAccess | None
    reads: tuple[_RecordedAccess, ...]


_UNTOUCHED = _LoggedRange(None, ())


@final
class _ArenaLog:
    """An arena's bytes as consecutive pieces: piece i covers [starts[i], starts[i + 1]); the last one has no end."""

    def __init__(self) -> None:
        self._starts = [0]
        self._pieces = [_UNTOUCHED]

    def pieces(self, region: Region) -> Sequence[_LoggedRange]:
        """The pieces that ``region`` touches."""
        first = bisect_right(self._starts, region.start) - 1
        return self._pieces[first : bisect_left(self._starts, region.stop, first + 1)]

    def add_read(self, region: Region, access: _RecordedAccess, clock: Clock) -> None:
        """Remember a read; forget the reads that happened before it."""
        first, end = self._cut(region)
        for i in range(first, end):
            write, reads = self._pieces[i]
            self._pieces[i] = _LoggedRange(write, (*(r for r in reads if clock[r.actor] < r.tick), access))

    def add_write(self, region: Region, access: _RecordedAccess) -> None:
        """Remember a write, which makes all earlier accesses redundant."""
        first, end = self._cut(region)
        self._starts[first:end] = [region.start]
        self._pieces[first:end] = [_LoggedRange(access, ())]

    def _cut(self, region: Region) -> tuple[int, int]:
        """Make pieces begin at both ends of ``region``; return the range of indices between them."""
        first = self._cut_at(region.start)
        return first, self._cut_at(region.stop)

    def _cut_at(self, position: int) -> int:
        index = bisect_left(self._starts, position)
        if index == len(self._starts) or self._starts[index] != position:
            self._starts.insert(index, position)
            self._pieces.insert(index, self._pieces[index - 1])
        return index

    def __len__(self) -> int:
        return len(self._starts)


@final
class RaceChecker:
    """Checks the accesses declared to one device. Owns the clocks of all actors and a log per arena.

    Memory: one entry per arena and distinct range in use, whatever the number of operations.
    """

    def __init__(self) -> None:
        self._actors, self._index = list(ACTORS), dict(_INDEX)
        self._clocks: list[Clock] = [(0,) * len(ACTORS)] * len(ACTORS)
        self._logs: dict[str, _ArenaLog] = {}
        self._lock = threading.RLock()
        self._num_accesses = 0

    @property
    def num_accesses(self) -> int:
        """Regions checked so far."""
        return self._num_accesses

    @property
    def num_pieces(self) -> int:
        """Pieces in the logs of all arenas."""
        return sum(len(log) for log in self._logs.values())

    def act(
        self,
        actor: str,
        name: str,
        *,
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        after: Iterable[Clock] = (),
    ) -> Clock:
        """Declare an operation of a lane or of compute, or an access of the host, and check it.

        Args:
            actor: A lane's value, ``host``, ``compute``, or a name that begins with ``compute`` for another stream.
            name: Name for errors.
            reads: Bytes read.
            writes: Bytes written; may overlap ``reads``.
            after: Clocks of the handles that come first.

        Returns:
            The clock for the operation's handle.

        Raises:
            RaceError: An earlier access conflicts and is not ordered before. This operation is then not remembered.
        """
        me = self._number(actor)
        reads = [region for region in reads if region.stop > region.start]
        writes = [region for region in writes if region.stop > region.start]
        with self._lock:
            clock = self._joined(me, after)
            tick = clock[me] + 1
            clock = (*clock[:me], tick, *clock[me + 1 :])
            access = _RecordedAccess(me, tick, name)
            for region in reads:
                self._check(region, access, clock, is_write=False)
            for region in writes:
                self._check(region, access, clock, is_write=True)
            self._clocks[me] = clock
            for region in reads:
                self._log(region).add_read(region, access, clock)
            for region in writes:
                self._log(region).add_write(region, access)
            self._num_accesses += len(reads) + len(writes)
        return clock

    def mark(self, stream: str = COMPUTE) -> Clock:
        """Return the clock of a point behind all work that a stream of compute was given so far."""
        with self._lock:
            me = self._number(stream)
            clock = self._clocks[me] = self._joined(me, ())
        return clock

    def order(self, later: str, earlier: str) -> None:
        """Take note that autograd, or the user's ``wait_stream``, put one stream of compute behind another."""
        with self._lock:
            me, other = self._number(later), self._number(earlier)
            self._clocks[me] = self._joined(me, (self._clocks[other],))

    def wait(self, clocks: Iterable[Clock]) -> None:
        """Take note that the host waited for handles with these clocks."""
        with self._lock:
            self._clocks[_INDEX[HOST]] = self._joined(_INDEX[HOST], clocks)

    def synchronize(self) -> None:
        """Take note that the host waited for everything: all later accesses are ordered behind all earlier ones."""
        with self._lock:
            self.wait(tuple(self._clocks))
            self._logs.clear()

    def _number(self, actor: str) -> int:
        if actor not in self._index and actor.startswith(COMPUTE):
            self._index[actor] = len(self._actors)
            self._actors.append(actor)
            self._clocks = [(*clock, 0) for clock in self._clocks]
            self._clocks.append((0,) * len(self._actors))
        return self._index[actor]

    def _joined(self, actor: int, clocks: Iterable[Clock]) -> Clock:
        joined = self._clocks[actor]
        for clock in (self._clocks[_INDEX[HOST]], *clocks):
            if clock and clock is not joined:  # a clock is shorter if it is older than the first use of a stream
                joined = (*map(max, joined, clock), *joined[len(clock) :])
        return joined

    def _log(self, region: Region) -> _ArenaLog:
        log = self._logs.get(region.arena)
        if log is None:
            log = self._logs[region.arena] = _ArenaLog()
        return log

    def _check(self, region: Region, access: _RecordedAccess, clock: Clock, *, is_write: bool) -> None:
        for write, reads in self._log(region).pieces(region):
            if write is not None and clock[write.actor] < write.tick:
                raise self._race(region, access, write, ("writes" if is_write else "reads", "write"))
            if is_write:
                for read in reads:
                    if clock[read.actor] < read.tick:
                        raise self._race(region, access, read, ("writes", "read"))

    def _race(
        self, region: Region, access: _RecordedAccess, earlier: _RecordedAccess, verbs: tuple[str, str]
    ) -> RaceError:
        mine, theirs = self._actors[access.actor], self._actors[earlier.actor]
        if mine == HOST:
            repair = f"wait for a handle of '{earlier.name}' first"
        else:
            repair = f"name a handle of '{earlier.name}' in its `after`"
        if theirs.startswith(COMPUTE):
            repair += " (a mark taken after the access)"
        return RaceError(
            f"expected '{access.name}' on {mine} to come after '{earlier.name}' on {theirs}, but nothing orders them: "
            f"it {verbs[0]} bytes [{region.start}, {region.stop}) of arena '{region.arena}', which the other one may "
            f"still {verbs[1]}; {repair}"
        )
