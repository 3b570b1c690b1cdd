"""Which updates inside backward are made: decided in a run and in played time by the same rule.

[Note: as many as there is time for] Backward may give gradients faster than updates take them. If all attempts were
made in order, the units that forward needs first would be updated last, and forward would wait for everything. So an
attempt whose turn comes when the gradients of the next one are home too is *overtaken*: it is not made. ``step()``
waits for the end of backward, gives up the attempts whose turn has not come, and updates all these units in the order
of their next use. No rate is measured.

[Note: left out] Updates in ``step()`` run beside forward, and forward waits for one of them at a time. When the last of
them is over, their lane has nothing to do until backward gives its first gradient. So the last one should belong to one
of the last units. But these come first in backward, when no attempt is overtaken yet: slots may even be filled for some
of them before there is any gradient. So as many attempts as steps before could not make are left out on purpose, spread
evenly from the second one on. At the end of backward it shows how many that is: with nothing lost and nothing under way
there was time for one more, with more than two there were too many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

_BEHIND = 2
"""Attempts that are lost or not yet over when backward is: with fewer, lanes may have had nothing to do."""


class Attempt:
    """An update inside backward that may be made. See [Note: as many as there is time for]."""

    def __init__(self, has_gradients: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Args: has_gradients: Whether its gradients are home. is_over: Whether it was made; asked once it is due."""
        self.has_gradients, self.is_over = has_gradients, is_over
        self.next: Attempt | None = None
        """The one that was started after it."""
        self._is_made: bool | None = None
        """None until its turn comes, or ``step()`` does."""
        self._deciding = threading.Lock()

    def is_due(self) -> bool:
        """Asked by its operations, of which the first one decides."""
        with self._deciding:
            if self._is_made is None:
                self._is_made = self.next is None or not self.next.has_gradients()
            return self._is_made

    def settle(self) -> bool:
        """Give it up if its turn has not come. Returns whether it was made, or is under way."""
        with self._deciding:
            self._is_made = bool(self._is_made)
            return self._is_made


class Attempts:
    """Those of one loop, step by step. See [Note: left out]."""

    def __init__(self) -> None:
        self._last: Attempt | None = None
        self._num = 0
        """Units that asked for one in this step."""
        self._num_before = 0
        """In the step before."""
        self._num_left_out = 0

    def wants_next(self) -> bool:
        """Whether the next unit is to be tried; asked once for each."""
        place, self._num = self._num, self._num + 1
        left_out, total = self._num_left_out, self._num_before
        return all(place != 1 + i * total // left_out for i in range(left_out))

    def add(self, attempt: Attempt) -> None:
        """One was started."""
        if self._last is not None:
            self._last.next = attempt
        self._last = attempt

    def settle(self, started: Iterable[Attempt]) -> None:
        """Backward is over: give up the attempts whose turn has not come. Args: started: In this step."""
        num_behind = sum([not (attempt.settle() and attempt.is_over()) for attempt in started])
        if self._num:
            more = max((num_behind - 1) // 2, 1) if num_behind > _BEHIND else -(num_behind < _BEHIND)
            self._num_left_out = max(self._num_left_out + more, 0)
            self._num_before, self._num = self._num, 0

    def reset(self) -> None:
        """A step was cut short."""
        self._num, self._last = 0, None
