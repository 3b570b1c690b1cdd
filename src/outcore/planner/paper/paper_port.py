"""The order of a step on paper: a list of operations, each with the indices of those that it comes after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outcore.order.attempts import Attempt, Attempts
from outcore.order.ledger import After, ByteSpan, Dependency, Home, Ledger, Slot
from outcore.order.port import COPY, NOTHING, Work
from outcore.order.weight_cache import Move
from outcore.spec.lane_names import RANK_LANES, Lane
from outcore.spec.schedule import Access, Kind, Operation
from outcore.spec.timeline import COMPUTE, HOST


@dataclass(slots=True, eq=False)
class PaperEntry:
    """A submitted operation on paper: its index, counted from the first of all steps, and its lane."""

    index: int
    lane: str


class Clock(Protocol):
    """Plays steps in time while they are laid out. Its time decides which updates inside backward are made."""

    def play(self, row: Sequence[Operation], attempts: Mapping[int, Attempt]) -> None:
        """Play until the last operation of a row is over.

        Args:
            row: Operations of the step, from its first one.
            attempts: Attempt of each operation that has one, by index counted from the first of all steps.
        """

    def is_over(self, index: int) -> bool:
        """Return whether an operation is over. Args: index: Index counted from the first of all steps."""


class InTime:
    """Lets played time decide which updates inside backward are made, as time does in a run: see ``order.attempts``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._of_step = clock, Attempts()
        self.of_operations: dict[int, Attempt] = {}
        """Attempt of each operation that has one, by index counted from the first of all steps."""
        self.attempt: Attempt | None = None
        """Attempt that is being written down. Operations with ``is_due`` belong to it."""

    def begin(self, unit: Ledger[PaperEntry]) -> Attempt | None:
        """Begin a unit's attempt. Returns None if it is left out."""
        if not self._of_step.wants_next():
            return None
        is_over, home = self._clock.is_over, unit.gradients.ready
        attempt = Attempt(
            lambda: home is None or is_over(home.index),
            lambda: (made := unit.next_weights.ready) is None or is_over(made.index),
        )
        self._of_step.add(attempt)
        return attempt

    def settle(self, row: Sequence[Operation], started: Sequence[Attempt]) -> None:
        """End backward. Args: row: Operations of the step so far. started: Attempts of the step."""
        if started:
            self._clock.play(row, self.of_operations)
        self._of_step.settle(started)


class Paper:
    """Takes operations and writes them down. See ``order.port.Port``."""

    def __init__(self, names: Sequence[str]) -> None:
        """Args: names: Names of the units."""
        self.row: list[Operation] = []
        """Operations of the step, with indices counted from its first one."""
        self.move: Move | None = None
        """Move that the next fetches and reads make."""
        self.in_time: InTime | None = None
        """Set if played time decides which updates inside backward are made."""
        self.says_where = True
        """Whether operations list the bytes that they read and write."""
        self._begin = 0
        self._names = names
        self._computed = PaperEntry(-1, COMPUTE)

    def begin_step(self) -> None:
        """Begin another step with a new row."""
        self._begin, self.row = self._begin + len(self.row), []

    def submit(
        self,
        lane: Lane,
        kind: Kind,
        unit: Ledger[PaperEntry],
        *,
        reads: Sequence[ByteSpan],
        writes: Sequence[ByteSpan],
        after: After[PaperEntry],
        work: Work = COPY,
    ) -> PaperEntry:
        """Write down an operation of a lane. One that is not due moves nothing and waits for nothing."""
        if work.is_due is not None and self.in_time is not None and self.in_time.attempt is not None:
            self.in_time.of_operations[self._begin + len(self.row)] = self.in_time.attempt
        elif work.is_due is not None and not work.is_due():
            return self._append(lane.value, kind, unit.spec.name, (), (), NOTHING)
        moved = work.moved if lane in RANK_LANES else None
        return self._append(lane.value, kind, unit.spec.name, reads, writes, after, moved)

    def compute(
        self,
        kind: Kind,
        unit: Ledger[PaperEntry],
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        after: After[PaperEntry],
    ) -> PaperEntry:
        """Write down an operation of compute."""
        self._computed = self._append(COMPUTE, kind, unit.spec.name, reads, writes, after)
        return self._computed

    def mark(self, what: str, unit: Ledger[PaperEntry], *, wrote: Sequence[ByteSpan] = ()) -> PaperEntry:
        """Return the last operation of compute."""
        return self._computed

    def wait(self, label: str, dependency: Dependency[PaperEntry], *, frees: Sequence[ByteSpan] = ()) -> None:
        """Write down that the host blocks."""
        self._append(HOST, "wait", "", (), (), {label: dependency})

    def freed(self, of: Home[PaperEntry] | Slot[PaperEntry], lane: Lane, after: After[PaperEntry] = NOTHING) -> None:
        """Do nothing."""

    def _append(
        self,
        lane: str,
        kind: Kind,
        unit: str,
        reads: Sequence[ByteSpan],
        writes: Sequence[ByteSpan],
        after: After[PaperEntry],
        moved: int | None = None,
    ) -> PaperEntry:
        begin, move, row, order = self._begin, self.move, self.row, {-1}
        for dependency in after.values():
            if isinstance(dependency, PaperEntry):
                order.add(dependency.index)
            elif dependency is not None:
                order.update([entry.index for entry in dependency if entry is not None])
        order.remove(-1)  # stands for compute before its first operation
        fields = (
            lane,
            kind,
            unit,
            sum([span.nbytes for span in writes]) if moved is None else moved,
            tuple([index - begin for index in sorted(order)]),
            None if move is None else move.slot,
            None if move is None or move.evicts is None else self._names[move.evicts],
            _accesses(reads) if self.says_where else (),
            _accesses(writes) if self.says_where else (),
        )
        row.append(tuple.__new__(Operation, fields))  # faster than its constructor
        return PaperEntry(begin + len(row) - 1, lane)


def _accesses(spans: Sequence[ByteSpan]) -> tuple[Access, ...]:
    return tuple([Access(span.of.name, span.start, span.stop) for span in spans])
