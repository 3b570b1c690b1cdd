"""Saving: a home is copied to a checkpoint after its last writer, and its next writer waits for this copy only.

[Note: saving beside training] Between two updates, for a whole forward and backward, a home does not change. So no
second copy is needed: bytes go from their home to the file in blocks. Weights on the device may also be edited by the
user. So they are copied behind everything that compute was given before, and ``engine.streamed_weights`` prevents edits
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.order.ledger import ByteSpan, H, Home, Ledger
from outcore.order.port import Port, Work, WorkFunction
from outcore.spec.lane_names import Lane


def save_homes(
    port: Port[H], homes: Sequence[tuple[Ledger[H], Home[H]]], spans: Sequence[ByteSpan], function: WorkFunction
) -> None:
    """Submit an operation that saves something made of bytes of some homes.

    Args:
        port: Port that takes the operation.
        homes: The homes, each with its unit.
        spans: Bytes of these homes that are saved.
        function: Function that copies the bytes.
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
        work=Work(function, moved=moved),
    )
    for _, home in homes:
        home.read_by(saved)
