"""Recovery from a forward or backward that an exception cut short: Ctrl-C, out of memory, or one of the user's.

[Note: cut short] Such an exception can come between any two statements: a slot was taken and its holder is unknown, an
operation was submitted and its handle is lost, a call has begun and will not end. Code that undoes such things one by
one could be interrupted, too. So code that notices an interruption only sets a flag. The next request to the engine
first waits for everything that is under way. Then it puts calls, slots and passes into the state that they have when
nothing runs. Homes are left alone: forward and backward change no weights and no states there, and gradients that may
be incomplete are known to be lost.
"""

from __future__ import annotations

from collections.abc import Callable

from outcore.core.errors import OutcoreError
from outcore.device.device import Device
from outcore.device.lanes import SKIPPED
from outcore.spec.lane_names import RANK_LANES, Lane


class Recovery:
    """Knows whether a run is open, and what was cut short; repairs the bookkeeping. See [Note: cut short]."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_closed = False
        self.refusal: OutcoreError | None = None
        """Why the run may not go on; None while it may."""
        self.is_due = False
        self.signs: list[Callable[[], None]] = []
        """Functions that set ``is_due`` if they find something that was cut short unnoticed."""
        self.parts: list[Callable[[], None]] = []
        """Functions that put a part's own bookkeeping into its idle state.
        When they are called nothing is in flight."""

    def refuse_if_closed(self) -> None:
        """Raise if the model was closed, or can only be closed. Else clear up behind what was cut short."""
        if self.is_closed:
            raise OutcoreError(
                "expected a prepared model, but it was closed; prepare it again, or load what was saved before close()"
            )
        if self.refusal is not None:
            raise self.refusal
        self.look()

    def notice(self) -> None:
        """Ask all ``signs`` whether anything was cut short."""
        for notice in self.signs:
            notice()

    def look(self) -> None:
        """Repair the bookkeeping if anything was cut short."""
        self.notice()
        if self.is_due:
            self.run()

    def run(self) -> None:
        """Repair the bookkeeping. If this is interrupted, it is run again as a whole."""
        for lane in set(Lane) - set(
            RANK_LANES
        ):  # an operation whose submission was interrupted may have no other operation behind it
            self.device.submit(lane, "catch up", _nothing)
        self.device.synchronize()
        self.device.refuse_after_failure()  # here, since the handles of failed operations are thrown away below
        for part in self.parts:
            part()
        self.is_due = False


def _nothing() -> object:
    return SKIPPED
