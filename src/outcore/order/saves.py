"""Saving: homes are copied to a checkpoint behind what writes them; what writes them next waits for its own copy only.

[Note: saving beside training] Between two updates a home does not change, a whole forward and backward long. So no
second copy is needed: bytes go from their home to the file, in blocks. Weights on the device are also the user's to
edit. So their copy comes behind all that compute was given before, and ``runtime.weights`` lets nobody edit them
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.order.ledger import H, Home, Ledger, Span
from outcore.order.port import Deed, Port, Work
from outcore.spec.lanes import Lane


def save_homes(port: Port[H], homes: Sequence[tuple[Ledger[H], Home[H]]], spans: Sequence[Span], deed: Deed) -> None:
    """Submit a deed that saves something made of bytes of some homes.

    Args:
        port: Takes it.
        homes: With the units that they are of.
        spans: Their bytes.
        deed: Copies them.
    """
    after: dict[str, list[H | None]] = {}
    for unit, home in homes:
        after.setdefault(f"{home.kind} written", []).append(home.ready)
        if home.kind == "weights" and home.tier == "device" and "weights edited" not in after:
            after["weights edited"] = [port.mark("weights to save", unit)]
    moved = sum(span.nbytes for span in spans)
    saved = port.submit(
        Lane.SAVE,
        "save",
        homes[0][0],
        reads=[span for span in spans if span.nbytes],
        writes=[],
        after=after,
        work=Work(deed, moved=moved),
    )
    for _, home in homes:
        home.read_by(saved)
