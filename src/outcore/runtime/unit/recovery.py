"""What is done behind a forward or a backward that an exception cut short: Ctrl-C, out of memory, a user's own.

[Note: cut short] Such an exception can come between any two statements: a slot was taken and nobody knows by whom, an
operation was submitted and its handle is lost, a call has begun and will not end. What undoes such things one by one
can be interrupted too. So whoever notices only says so. The next thing that is asked of the engine first waits for
everything that is under way. Then it puts calls, slots and passes into the one state that they have when nothing runs.
Homes are left alone: forward and backward change no weights and no states there, and gradients that may not be whole
are known to be lost.
"""

from __future__ import annotations

from collections.abc import Callable

from outcore.device.device import Device
from outcore.device.lanes import SKIPPED
from outcore.spec.lanes import RANK_LANES, Lane


class Recovery:
    """Whether something was cut short, and what makes the bookkeeping whole. See [Note: cut short]."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_due = False
        self.signs: list[Callable[[], None]] = []
        """Asked when there is time: they set ``is_due`` if they find something that was cut short unseen."""
        self.parts: list[Callable[[], None]] = []
        """Each puts its own bookkeeping into the state in which nothing runs, and nothing is in flight by then."""

    def notice(self) -> None:
        """Find out whether anything was cut short."""
        for notice in self.signs:
            notice()

    def look(self) -> None:
        """Run if anything was cut short."""
        self.notice()
        if self.is_due:
            self.run()

    def run(self) -> None:
        """Interrupted itself, it is run again as a whole."""
        for lane in set(Lane) - set(
            RANK_LANES
        ):  # an operation that was interrupted while it was submitted has no other that follows it
            self.device.submit(lane, "catch up", _nothing)
        self.device.synchronize()
        self.device.refuse_after_failure()  # never forgotten: handles of operations that failed are thrown away here
        for part in self.parts:
            part()
        self.is_due = False


def _nothing() -> object:
    return SKIPPED
