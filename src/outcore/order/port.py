"""The port to which the order of a step submits operations: it leads to lanes in a run, to a list on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from outcore.order.ledger import After, ByteSpan, Dependency, Home, Ledger, OnLane, Slot
from outcore.spec.lane_names import Lane
from outcore.spec.schedule import Kind

Answer = Callable[[], bool]
WorkFunction = Callable[[], object] | None
"""The function that an operation runs. None for a copy, which the port makes itself, and on paper."""


class Work(NamedTuple):
    """What an operation does, and whether it does it."""

    function: WorkFunction = None
    """Function that the operation runs.
    None: a copy, from each span in ``reads`` to the span at the same index in ``writes``."""
    moved: int | None = None
    """Bytes that count as moved. None: those that are written, if it is a copy."""
    is_due: Answer | None = None
    """Question asked when the operation's turn comes.
    If it is not due, it is over at once, and waits for nothing but its lane."""
    is_wanted: Answer | None = None
    """Question for a copy, asked when everything that comes before it is over.
    If the copy is not wanted, nothing is done."""


COPY = Work()
NOTHING: Mapping[str, Any] = MappingProxyType({})

H = TypeVar("H", bound=OnLane)


class Port(Protocol[H]):
    """Takes operations in the order of submission."""

    def submit(
        self,
        lane: Lane,
        kind: Kind,
        unit: Ledger[H],
        *,
        reads: Sequence[ByteSpan],
        writes: Sequence[ByteSpan],
        after: After[H],
        work: Work = COPY,
    ) -> H:
        """Queue an operation at the end of a lane.

        Args:
            lane: Lane that runs it.
            kind: Its kind, with which its name begins.
            unit: Unit whose bytes it works on.
            reads: Bytes that it reads.
            writes: Bytes that it writes.
            after: Operations that must be over first.
            work: What it does.
        """

    def compute(
        self,
        kind: Kind,
        unit: Ledger[H],
        *,
        reads: Sequence[ByteSpan] = (),
        writes: Sequence[ByteSpan] = (),
        after: After[H],
    ) -> H:
        """Let compute wait for ``after``. What compute is given next reads and writes these bytes."""

    def mark(self, what: str, unit: Ledger[H], *, wrote: Sequence[ByteSpan] = ()) -> H:
        """Return an operation that is over when compute has done all that it was given so far.

        Args:
            what: What has then happened, for its name.
            unit: The unit that it concerns.
            wrote: Bytes that compute has then written.
        """

    def wait(self, label: str, dependency: Dependency[H], *, frees: Sequence[ByteSpan] = ()) -> None:
        """Block the host until these operations are over. Args: frees: Memory that the host then gives away."""

    def freed(self, of: Home[H] | Slot[H], lane: Lane, after: After[H] = NOTHING) -> H | None:
        """Note that nothing reads these bytes until they are written again.

        Returns the operation that the next writer must wait for, if there is one.
        """
