"""Updates inside backward: their operations, and the rule that decides which are made, in a run and in played time.

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
from typing import Generic, Protocol

from outcore.order.ledger import ByteSpan, H, Ledger
from outcore.order.port import Port, Work, WorkFunction
from outcore.order.slots import Pools, Supply
from outcore.spec.lane_names import Lane

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

    def clear(self) -> None:
        """Forget the attempts of a step that was cut short."""
        self._num, self._last = 0, None


class EarlyWork(Protocol):
    """The work of an update inside backward. On paper it does nothing."""

    def out_of_place(
        self, grads: ByteSpan, new: tuple[ByteSpan | None, ByteSpan], old: tuple[ByteSpan | None, ByteSpan | None]
    ) -> WorkFunction:
        """Make new states and weights from old ones."""

    def is_due(self) -> bool:
        """Return whether there is time for it. Asked when its turn comes."""

    def is_wanted(self) -> bool:
        """Return whether it may still be used: False once ``step()`` has asked for something else."""


class OutOfPlaceUpdates(Generic[H]):
    """Submits updates inside backward, into second homes. See [Note: early updates]."""

    def __init__(self, port: Port[H], pools: Pools[H], supply: Supply[H]) -> None:
        self._port, self._pools, self._supply = port, pools, supply

    def attempt(self, unit: Ledger[H], work: EarlyWork) -> None:
        """Submit an update out of place, into the second homes."""
        is_due = work.is_due
        grads, old = self._supply.gradients(unit, is_due), self._supply.states(unit, is_due)
        after = {**grads.after, **({} if old is None else old.after)}
        old_states, new_states = None, None
        if old is not None:  # states from disk come as a copy in a slot, which may be changed in place
            old_states, new_states = (old.span, unit.next_states.span()) if old.taken is None else (None, old.span)
        old_weights = None
        # A save may still read the second homes: they were the first homes a step ago.
        after |= {"next weights read": unit.next_weights.readers}
        if unit.starts_from_weights and unit.weights.tier == "host":
            old_weights = unit.weights.span()
            after |= unit.weights.before_read()
        elif unit.starts_from_weights:  # read into the second home, and changed into the new weights there
            free = {"next weights written": unit.next_weights.ready, "next weights read": unit.next_weights.readers}
            after |= self._supply.old_weights(unit, unit.next_weights.span(), free, is_due)
        reads = [grads.span, *(span for span in (old_weights, old_states) if span is not None)]
        if new_states is not None and old is not None and old.taken is None:
            after |= {"next states read": unit.next_states.readers}
        new_weights = unit.next_weights.span()
        function = work.out_of_place(grads.span, (new_states, new_weights), (old_states, old_weights))
        updated = self._port.submit(
            Lane.UPDATE,
            "update early",
            unit,
            reads=reads,
            writes=[new_weights, *([] if new_states is None else [new_states])],
            after=after,
            work=Work(function, is_due=is_due),
        )
        self._supply.give_back_gradients(unit, grads, updated)
        unit.states.read_by(updated)
        if old_weights is not None:
            unit.weights.read_by(updated)
        unit.next_weights.perhaps_written_by(updated)
        if old is not None:
            self._supply.write_states(unit, old, unit.next_states, updated, is_due, work.is_wanted)

    def forget_attempt(self, unit: Ledger[H]) -> None:
        """Forget copies in slots of what an early update made, since it is not wanted."""
        self._pools.invalidate(unit.next_states)
