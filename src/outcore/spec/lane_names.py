"""Lanes: the queues that operations run on. Only names and routes are here; ``device.lanes`` serves them."""

from __future__ import annotations

import enum


class Lane(enum.Enum):
    """Queues for operations. Compute (the caller's thread or stream) and the host are not among them."""

    H2D = "h2d"
    D2H = "d2h"
    # Host to device, separate from fetches: a write-back waits for an update and would block the fetches behind it.
    WRITE_BACK = "write_back"
    WEIGHTS_READ = "weights_read"
    STATES_READ = "states_read"
    DISK_WRITE = "disk_write"
    # Separate from DISK_WRITE: the next forward waits for weights there, and backward for the slots of gradients.
    STATES_WRITE = "states_write"
    UPDATE = "update"
    # Updates on the device with states from host memory: separate from fetches, which must not wait behind them.
    STATES_H2D = "states_h2d"
    DEVICE_UPDATE = "device_update"
    STATES_D2H = "states_d2h"
    # Between ranks: REDUCE takes gradients to the rank that updates with them, GATHER takes new weights to the ranks
    # with the same runs, LINK takes runs of cut weights to the ranks that compute with them. Every rank submits the
    # same operations in the same order, so these queues hold nothing else.
    REDUCE = "reduce"
    GATHER = "gather"
    LINK = "link"
    # To a checkpoint's files: separate from the disk tier, because the next forward may wait for writes there.
    SAVE = "save"

    @property
    def route(self) -> str:
        """The tiers between which it works, for error messages."""
        return _ROUTES.get(self, "on the host")


_ROUTES = {
    Lane.H2D: "host to device",
    Lane.D2H: "device to host",
    Lane.WRITE_BACK: "host to device",
    Lane.WEIGHTS_READ: "disk to host",
    Lane.STATES_READ: "disk to host",
    Lane.DISK_WRITE: "host to disk",
    Lane.STATES_WRITE: "host to disk",
    Lane.STATES_H2D: "host to device",
    Lane.DEVICE_UPDATE: "on the device",
    Lane.STATES_D2H: "device to host",
    Lane.REDUCE: "between ranks",
    Lane.GATHER: "between ranks",
    Lane.LINK: "between ranks",
    Lane.SAVE: "to a checkpoint",
}

RANK_LANES = (Lane.REDUCE, Lane.GATHER, Lane.LINK)
"""Lanes on which all ranks meet."""

GIVING_WAY = frozenset({Lane.STATES_READ, Lane.STATES_WRITE})
"""Lanes that give way while another one reads from disk, or writes to it. They serve updates, and sums of gradients on
disk. Visits wait for weights and activations, and slots for gradients."""

COPY_LANES = frozenset(
    {Lane.H2D, Lane.D2H, Lane.WRITE_BACK, Lane.STATES_H2D, Lane.DEVICE_UPDATE, Lane.STATES_D2H, *RANK_LANES}
)
"""Lanes whose operations are device work: on CUDA each has a stream of its own."""
