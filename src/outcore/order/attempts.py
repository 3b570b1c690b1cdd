"""The rule that decides which updates inside backward are made, in a run and in played time.

[Note: as many as there is time for] Backward may give gradients faster than updates take them. If all attempts were
made in order, the units that forward needs first would be updated last, and forward would wait for everything. So an
attempt is *overtaken*, and not made, if the gradients of the next one are home too when its turn comes. ``step()``
waits for the end of backward, gives up the attempts whose turn has not come, and updates all these units in the order
of their next use. No rate is measured.

[Note: left out] Updates in ``step()`` run beside forward, and forward waits for one of them at a time. When the last of
these updates is over, their lane is idle until backward gives its first gradient. So the last one should belong to one
of the last units. But backward reaches these first, when no attempt is overtaken yet; slots may even be filled for some
of them before there is any gradient. So attempts are left out on purpose, as many as earlier steps could not make,
spread evenly from the second one on. Their number is corrected at the end of backward. If fewer than two attempts are
then lost or still under way, there was time for one more. If more than two are, there were too many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

_BEHIND = 2
"""Intended number of attempts lost or still under way at the end of backward; with fewer, lanes may have been idle."""


class Attempt:
    """An update inside backward that may be made. See [Note: as many as there is time for]."""

    def __init__(self, has_gradients: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Args: has_gradients: Are its gradients home? is_over: Is the update over? Asked only if it is made."""
        self.has_gradients, self.is_over = has_gradients, is_over
        self.next: Attempt | None = None
        """The attempt that was started after it."""
        self._is_made: bool | None = None
        """Whether it is made; None until its turn or ``step()`` comes."""
        self._deciding = threading.Lock()

    def is_due(self) -> bool:
        """Return whether it is made. Its operations ask this when their turn comes, and the first of them decides."""
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
    """The attempts of one training loop, step by step. See [Note: left out]."""

    def __init__(self) -> None:
        self._last: Attempt | None = None
        self._num = 0
        """Number of units that asked for an attempt in this step."""
        self._num_before = 0
        """The same in the step before."""
        self._num_left_out = 0

    def wants_next(self) -> bool:
        """Return whether to start an attempt for the next unit. To be called once for each unit."""
        place, self._num = self._num, self._num + 1
        left_out, total = self._num_left_out, self._num_before
        return all(place != 1 + i * total // left_out for i in range(left_out))

    def add(self, attempt: Attempt) -> None:
        """Note that an attempt was started."""
        if self._last is not None:
            self._last.next = attempt
        self._last = attempt

    def settle(self, started: Iterable[Attempt]) -> None:
        """End backward: give up the attempts whose turn has not come. Args: started: All attempts of this step."""
        num_behind = sum([not (attempt.settle() and attempt.is_over()) for attempt in started])
        if self._num:
            more = max((num_behind - 1) // 2, 1) if num_behind > _BEHIND else -(num_behind < _BEHIND)
            self._num_left_out = max(self._num_left_out + more, 0)
            self._num_before, self._num = self._num, 0

    def reset(self) -> None:
        """Forget the attempts of a step that was cut short."""
        self._num, self._last = 0, None
