"""Saving: homes are copied to a checkpoint behind what writes them; what writes them next waits for its own copy only.

[Note: saving beside training] Between two updates a home does not change, a whole forward and backward long. So no
second copy is needed. What lives on the device goes through two slots in host memory, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from outcore.order.ledger import H, Home, Ledger, Slot, Span
from outcore.order.port import Deed, Port, Work
from outcore.spec.lanes import Lane

Copy = Callable[[int, int, "Slot[H] | None"], Deed]
"""Start, stop, slot -> what copies these bytes of a home to where they are saved; from the home, or from the slot."""


class SaveOrder(Generic[H]):
    """What a save submits."""

    def __init__(self, port: Port[H], slots: Sequence[Slot[H]]) -> None:
        """Args: slots: In host memory; needed for what lives on the device."""
        self._port, self._slots = port, slots

    def home(self, unit: Ledger[H], home: Home[H], span: tuple[int, int], copy: Copy[H]) -> None:
        """Save the bytes [start, stop) of a home."""
        if home.tier == "device":
            self._through_slots(unit, home, span, copy)
            return
        saved = self._port.submit(
            Lane.SAVE,
            "save",
            unit,
            reads=[home.span(*span)],
            writes=[],
            after=home.before_read(),
            work=Work(copy(*span, None), moved=span[1] - span[0]),
        )
        home.read_by(saved)

    def homes(self, homes: Sequence[tuple[Ledger[H], Home[H]]], spans: Sequence[Span], deed: Deed) -> None:
        """Save something that is made of bytes of several homes, none of them on the device."""
        after = {"homes written": [home.ready for _, home in homes]}
        moved = sum(span.nbytes for span in spans)
        saved = self._port.submit(
            Lane.SAVE, "save", homes[0][0], reads=spans, writes=[], after=after, work=Work(deed, moved=moved)
        )
        for _, home in homes:
            home.read_by(saved)

    def _through_slots(self, unit: Ledger[H], home: Home[H], span: tuple[int, int], copy: Copy[H]) -> None:
        piece = self._slots[0].nbytes
        for i, start in enumerate(range(*span, piece)):
            slot, stop = self._slots[i % len(self._slots)], min(start + piece, span[1])
            part = slot.span(stop - start)
            copied = self._port.submit(
                Lane.STATES_D2H,
                "copy to save",
                unit,
                reads=[home.span(start, stop)],
                writes=[part],
                after={"save slot free": slot.free_after, **home.before_read()},
            )
            home.read_by(copied)
            saved = self._port.submit(
                Lane.SAVE,
                "save",
                unit,
                reads=[part],
                writes=[],
                after={"copied to save": copied},
                work=Work(copy(start, stop, slot), moved=part.nbytes),
            )
            slot.free_after = [saved]
