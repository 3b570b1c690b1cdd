"""The port through which the order of a step is submitted: to lanes in a run, to a list on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from outcore.order.ledger import After, Dependency, Home, Ledger, OnLane, Slot, Span
from outcore.spec.lanes import Lane
from outcore.spec.schedule import Kind

Answer = Callable[[], bool]
Deed = Callable[[], object] | None
"""What an operation does; None for a copy, which the port makes, and on paper."""


class Work(NamedTuple):
    """What an operation does, and whether."""

    deed: Deed = None
    """None: each span that is written gets the bytes of the one at the same place in those that are read."""
    moved: int | None = None
    """Bytes that count as moved; None: those that are written, if it is a copy."""
    is_due: Answer | None = None
    """Asked when its turn comes. If not, it is over at once and waits for nothing but its lane."""
    is_wanted: Answer | None = None
    """Of a copy: asked when all that comes first has happened; if not, nothing is done."""


COPY = Work()
NOTHING: Mapping[str, Any] = MappingProxyType({})

H = TypeVar("H", bound=OnLane)


class Port(Protocol[H]):
    """Takes operations, in order."""

    def submit(
        self,
        lane: Lane,
        kind: Kind,
        unit: Ledger[H],
        *,
        reads: Sequence[Span],
        writes: Sequence[Span],
        after: After[H],
        work: Work = COPY,
    ) -> H:
        """Queue an operation at the end of a lane.

        Args:
            lane: Who runs it.
            kind: What it is, for its name.
            unit: Whose bytes it works on.
            reads: What it reads.
            writes: What it writes.
            after: What must have happened first.
            work: What it does.
        """

    def compute(
        self, kind: Kind, unit: Ledger[H], *, reads: Sequence[Span] = (), writes: Sequence[Span] = (), after: After[H]
    ) -> H:
        """Order compute behind ``after``; what follows there reads and writes these bytes."""

    def mark(self, what: str, unit: Ledger[H], *, wrote: Sequence[Span] = ()) -> H:
        """Behind everything that compute was given so far. Args: what: Happened, of the unit. wrote: Bytes, by it."""

    def wait(self, label: str, dependency: Dependency[H], *, frees: Sequence[Span] = ()) -> None:
        """The host blocks until these are over. Args: frees: Memory that it gives to others then."""

    def freed(self, of: Home[H] | Slot[H], lane: Lane, after: After[H] = NOTHING) -> H | None:
        """Nobody reads its bytes until they are written again. What must be over before that, if anything."""
