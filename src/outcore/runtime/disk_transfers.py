"""Transfers between disk and host memory as operations of the disk's lanes."""

from __future__ import annotations

from collections.abc import Callable

from outcore.memory.arena import Buffer
from outcore.memory.disk import Extent
from outcore.runtime.device import Device
from outcore.runtime.homes import Homes
from outcore.runtime.lanes import SKIPPED, After, Handle
from outcore.runtime.traffic import Traffic
from outcore.spec.lanes import Lane

Answer = Callable[[], bool]


class DiskTransfers:
    """Reads and writes whole buffers, and counts their bytes."""

    def __init__(self, homes: Homes, device: Device, traffic: Traffic) -> None:
        """Nothing is opened: the store belongs to ``homes``."""
        self._homes, self._device, self._traffic = homes, device, traffic

    def read(
        self, lane: Lane, name: str, extent: Extent, buffer: Buffer, after: After, is_due: Answer | None = None
    ) -> Handle:
        """Fill a buffer in host memory from disk. See ``Device.submit`` for ``is_due``."""
        store = self._homes.store()
        self._traffic.add(lane, extent.nbytes)
        return self._device.submit(
            lane,
            name,
            lambda: store.read(extent, buffer.bytes),
            reads=[extent.region],
            writes=[buffer.region],
            after=after,
            is_due=is_due,
        )

    def write(
        self,
        name: str,
        buffer: Buffer,
        extent: Extent,
        after: After,
        is_due: Answer | None = None,
        is_wanted: Answer | None = None,
    ) -> Handle:
        """Write a buffer in host memory to disk.

        Args:
            name: Of the operation.
            buffer: What to write.
            extent: Where; as long as the buffer.
            after: See ``Device.submit``.
            is_due: See ``Device.submit``.
            is_wanted: Asked when all of ``after`` has happened; if not, nothing is written.
        """
        store = self._homes.store()

        def work() -> object:
            if is_wanted is not None and not is_wanted():
                return SKIPPED
            store.write(extent, buffer.bytes)
            return None

        self._traffic.add(Lane.DISK_WRITE, buffer.nbytes)
        return self._device.submit(
            Lane.DISK_WRITE, name, work, reads=[buffer.region], writes=[extent.region], after=after, is_due=is_due
        )
