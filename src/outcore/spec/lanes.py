"""Lanes: the queues that operations run on. Names and routes; what serves them is ``device.lanes``."""

from __future__ import annotations

import enum


class Lane(enum.Enum):
    """The queues that take operations. Compute (the caller's thread or stream) and the host are not among them."""

    H2D = "h2d"
    D2H = "d2h"
    # Host to device too, apart from fetches: a write-back waits for an update, and would block the fetches behind it.
    WRITE_BACK = "write_back"
    WEIGHTS_READ = "weights_read"
    STATES_READ = "states_read"
    DISK_WRITE = "disk_write"
    # Apart from weights, which the next forward waits for, and from gradients, for whose slots backward does.
    STATES_WRITE = "states_write"
    UPDATE = "update"
    # Updates on the device of states from host memory: apart from fetches, which must not wait behind them.
    STATES_H2D = "states_h2d"
    DEVICE_UPDATE = "device_update"
    STATES_D2H = "states_d2h"
    # Between ranks: gradients to whoever updates with them, new weights to whoever has the same part of them, and the
    # parts of weights that are cut to all who compute with them. Every rank submits the same operations in the same
    # order, so each has nothing else in its queue.
    REDUCE = "reduce"
    GATHER = "gather"
    LINK = "link"
    # To a checkpoint's files: apart from the disk tier, whose writes the next forward may wait for.
    SAVE = "save"

    @property
    def route(self) -> str:
        """Between which tiers it works, for errors."""
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

COPY_LANES = frozenset(
    {Lane.H2D, Lane.D2H, Lane.WRITE_BACK, Lane.STATES_H2D, Lane.DEVICE_UPDATE, Lane.STATES_D2H, *RANK_LANES}
)
"""Lanes whose operations are device work: on CUDA they have a stream of their own."""
