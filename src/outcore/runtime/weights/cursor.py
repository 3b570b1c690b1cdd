"""Where a run is in the visits that it is expected to make: those of the last step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from outcore.planning.paper.weight_cache import Held, Move, Moves
from outcore.spec.schedule import Visit

MAX_VISITS = 2**16
"""Of a step are remembered; in a longer one the rest is fetched on demand."""

Decide = Callable[[Sequence[Visit], Held], Moves]


class Cursor:
    """Follows a step along the one before, and says which moves are due.

    Where the run leaves the expected order, the cursor skips to the next place where it fits, or stays. Moves whose use
    was skipped are not made. An unexpected visit is fetched on demand. The next step is expected as this one was.
    """

    def __init__(self, decide: Decide, expected: Sequence[Visit], held: Held) -> None:
        """Args: decide: The moves for visits, given what slots hold. expected: Of the first step."""
        self._decide = decide
        self.expected, self.seen = tuple(expected), list[Visit]()
        self._decided: tuple[tuple[Visit, ...], Held] | None = None
        self._moves: tuple[Move, ...] = ()
        self._begin(held)

    def restart(self, held: Held) -> None:
        """A step begins. What was seen is expected again; nothing seen is no step."""
        self.expected, self.seen = tuple(self.seen) or self.expected, []
        self._begin(held)

    def reset(self, held: Held) -> None:
        """What was seen is cut short and no step: begin again."""
        self.seen = []
        self._begin(held)

    def _begin(self, held: Held) -> None:
        if self._decided != (self.expected, held):
            self._decided, self._moves = (self.expected, held), self._decide(self.expected, held).moves
        self._waiting = deque(self._moves)
        self._next = 0

    def follow(self, visit: Visit, *, may_skip: bool = True) -> None:
        """A visit takes place.

        Args:
            visit: Any.
            may_skip: Whether expected visits before it, if there are any, are not expected any more.
        """
        if len(self.seen) < MAX_VISITS:
            self.seen.append(visit)
        stop = len(self.expected) if may_skip else self._next + 1
        found = next((i for i in range(self._next, min(stop, len(self.expected))) if self.expected[i] == visit), None)
        if found is not None:
            self._next = found + 1

    def due(self) -> Iterator[Move]:
        """Moves that can be made now, in order, each once, without those that come too late."""
        now = max(self._next - 1, 0)
        while self._waiting and self._waiting[0].due <= now:
            move = self._waiting.popleft()
            if move.use >= now:
                yield move

    def next_use(self, unit: int) -> int:
        """The next expected visit of a unit; beyond the end if there is none in this step."""
        coming = (i for i in range(self._next, len(self.expected)) if self.expected[i].unit == unit)
        return next(coming, len(self.expected))


class Round(Cursor):
    """Follows visits that no step divides: a round ends where one of its visits comes again, as in evaluation."""

    def follow_round(self, visit: Visit, held: Callable[[], Held]) -> None:
        """A visit takes place; begin anew if it was in this round."""
        if self.seen and visit == self.seen[-1]:  # a unit that is used twice in a row: nothing moves
            return
        if visit in self.seen:
            del self.seen[: self.seen.index(visit)]
            self.restart(held())
        self.follow(visit)
