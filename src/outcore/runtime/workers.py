"""Worker threads of the CPU update: k threads with one ATen thread and one scratch each."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import Self, final

import torch

from outcore.core.errors import UnsupportedError
from outcore.memory.limits import usable_cores
from outcore.optim.blocks import Piece, split, update_blocks
from outcore.runtime.threads import start_single_threaded

SCRATCH_BYTES = 2 * 2**20  # 512 Ki fp32 elements: half to all of a core's L2 today

_Share = tuple[list[Piece], "SimpleQueue[BaseException | None]"]  # what to update, and where to say how it ended


@final
class UpdateWorkers:
    """Threads that together update pieces of parameters in host memory.

    Kernels release the GIL, so plain threads suffice. Owns its threads and ``SCRATCH_BYTES`` of memory per worker until
    ``close``. A forked child has no threads: there ``run`` raises and ``close`` does nothing.
    """

    def __init__(self, num_workers: int | None = None) -> None:
        """Start the threads.

        Args:
            num_workers: Default: the cores that this process may use.
        """
        self.num_workers = num_workers or usable_cores()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[_Share | None]] = [SimpleQueue() for _ in range(self.num_workers)]
        self._threads = start_single_threaded(
            {f"outcore-update-{i}": partial(_serve, queue) for i, queue in enumerate(self._queues)}
        )

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update all pieces and wait for them. See ``update_blocks``.

        Raises:
            UnsupportedError: Called in a forked child or after ``close``.
        """
        if os.getpid() != self._pid:
            raise UnsupportedError("update: expected a call in the process that made the workers, but this is its fork")
        with self._lock:
            if not self._threads:
                raise UnsupportedError("update: expected open workers, but they were closed; update before close()")
            ends: SimpleQueue[BaseException | None] = SimpleQueue()
            for queue, share in zip(self._queues, split(pieces, self.num_workers), strict=True):
                queue.put((share, ends))
            errors = [error for error in [ends.get() for _ in self._queues] if error is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads and wait for them; may be called again."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            threads, self._threads = self._threads, ()
            for queue in self._queues:
                queue.put(None)
            for thread in threads:
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(queue: SimpleQueue[_Share | None]) -> None:
    """Body of a worker."""
    scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)  # first touched here, so on this core's memory
    while (item := queue.get()) is not None:
        share, ends = item
        try:
            update_blocks(share, scratch)
        except BaseException as error:  # the worker survives whatever a kernel raises; `run` re-raises it
            ends.put(error)
        else:
            ends.put(None)
        del item, share, ends  # an idle worker must not keep the last update's tensors alive
