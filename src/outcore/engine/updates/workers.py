"""Worker threads of the CPU update: k threads with one ATen thread and one scratch each, or teams.

[Note: teams] While an accelerator computes, fused updates are done by a team per NUMA node: one Python thread with as
many ATen threads as the node has cores for updates. Kernels leave Python's lock alone, but a thread needs it between
two kernels. 15 single threads on 16 cores delayed one another, and the thread that launches the accelerator's kernels.
On an H200 a step of 105M parameters took 0.156 to 0.175 s with them. With one thread of 15 ATen threads in their place
it took 0.107 s: its updates 0.058 s instead of 0.113 to 0.117 s, and launching a forward beside them 0.018 s instead of
0.094 to 0.100 s. Three machines later that day took 0.106 to 0.117 s with teams. Where the host computes, the training
loop has ATen threads of its own. There a team of two made steps on two cores 1.01 to 1.20 times as long.

ATen cuts fused kernels between threads at whole vectors, and other operations anywhere. The last elements of a part are
computed one by one, which rounds differently for some functions. A team does only casts and products beside the fused
kernels, and those round every element alike. Rules and formats are left to single threads.

[Note: whole parameters] A rule that needs whole parameters sums over them, and the number of ATen threads changes the
bits of sums. So these parameters are updated one after another, by a thread with as many ATen threads as the training
loop's.

[Note: block sizes] Small blocks stay in nearer caches. With large blocks a worker needs Python's lock less often. A
worker that finds the lock taken sleeps, and waking it takes longer than a short call of torch, so that workers end up
taking turns. Which effect is stronger depends on caches, on the number of workers and on how many calls a block takes.
The size never changes a bit of the result.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import final

import torch

from outcore.core.closing import Closing
from outcore.core.errors import UnsupportedError
from outcore.device.device import Device
from outcore.device.threads import start_threads
from outcore.memory.machine import Topology, read_topology
from outcore.optim.blocks import update_blocks
from outcore.optim.formats import forget_noise
from outcore.optim.piece import Piece, split
from outcore.optim.rules import RuleHyper
from outcore.optim.sums import Work

LEAST_SHARE_NUMEL = 2**15  # takes as long to update as it takes to wake a thread
CLOSE_TIMEOUT_S = 2.0
USUAL_BYTES = 2 * 2**20
"""Usual size, 512 Ki fp32 elements: a block stays in a core's share of the last-level cache."""
LEAST_BYTES, MOST_BYTES = USUAL_BYTES // 4, 4 * USUAL_BYTES
ALL_BYTES = 128 * 2**20
"""Most bytes of all workers together, if that is more than ``USUAL_BYTES`` for each."""
TRIALS = 4
GAIN = 0.9
"""Largest part of the time that another size may take to be chosen; below 1 because measurements vary."""
TOLD_NUMEL = 2**21
"""Least number of elements per worker of an update whose time is taken into account."""

_Share = tuple[Work, int, "SimpleQueue[BaseException | None]"]  # work, bytes of scratch per thread, the outcome's queue


@final
class BlockSizes:
    """Finds the fastest size for each kind of update, from the usual size by halving and doubling."""

    def __init__(self, num_workers: int) -> None:
        """Args: num_workers: Number of workers that work side by side."""
        self._num_workers = num_workers
        self._most = min(MOST_BYTES, max(USUAL_BYTES, ALL_BYTES // num_workers))
        self._seen: dict[Hashable, dict[int, list[float]]] = {}

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """Kinds of updates that were large enough to be measured."""
        return tuple(self._seen)

    def take(self, kind: Hashable) -> int:
        """Return the size to take now, in bytes: one that is still to be tried, else the fastest."""
        seen, size = self._seen.get(kind, {}), USUAL_BYTES
        while True:
            near = [other for other in (size // 2, size * 2) if LEAST_BYTES <= other <= self._most]
            for each in (size, *near):
                if len(seen.get(each, ())) < TRIALS:
                    return each
            fastest = min(near, key=lambda other: min(seen[other]))
            if min(seen[fastest]) > GAIN * min(seen[size]):
                return size
            size = fastest

    def took(self, kind: Hashable, size: int, numel: int, seconds: float) -> None:
        """Learn how long an update of so many elements took."""
        if numel >= self._num_workers * TOLD_NUMEL:
            self._seen.setdefault(kind, {}).setdefault(size, []).append(seconds / numel)


def kind_of(pieces: Sequence[Piece]) -> Hashable:
    """Return what decides how many calls a block takes: rules, and formats of states."""
    return frozenset(
        (
            piece.hyper.rule if isinstance(piece.hyper, RuleHyper) else type(piece.hyper),
            None if piece.codes is None else tuple(piece.codes.formats.values()),
        )
        for piece in pieces
    )


@final
class UpdateWorkers(Closing):
    """Threads that together update pieces of parameters in host memory.

    Kernels release the GIL, so plain threads suffice. Until ``close`` it owns its threads, and memory for each worker,
    and each thread of a team: ``USUAL_BYTES``, or as much as [Note: block sizes] finds. A forked child has no threads:
    there ``run`` raises and ``close`` does nothing.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        spare_cores: int = 0,
        sharers: tuple[int, int] = (0, 1),
        has_whole: bool = False,
        in_teams: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            num_workers: Number of workers, not bound to CPUs. Default: one per core, see ``worker_cpus``.
            spare_cores: Cores to leave to other threads.
            sharers: See ``worker_cpus``.
            has_whole: Whether some parameters are updated as a whole. See [Note: whole parameters].
            in_teams: Whether teams update. See [Note: teams].
        """
        cpus: list[frozenset[int] | None] = [None] * (num_workers or 0)
        if not num_workers:
            cpus = worker_cpus(read_topology(), spare_cores=spare_cores, sharers=sharers)
        self.num_workers = len(cpus)
        self.sizes = BlockSizes(self.num_workers)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[_Share | None]] = [SimpleQueue() for _ in cpus]
        self._is_stopped = threading.Event()
        bodies = [partial(_serve, queue, allowed) for queue, allowed in zip(self._queues, cpus, strict=True)]
        self._threads = start_threads({f"outcore-update-{i}": body for i, body in enumerate(bodies)})
        self._teams: list[SimpleQueue[_Share | None]] = []
        teams = Counter(cpus if in_teams else ())
        self._team_sizes = [*teams.values()]
        for i, (allowed, size) in enumerate(teams.items()):
            self._teams.append(SimpleQueue())
            team = partial(_serve, self._teams[-1], allowed, num_threads=size)
            self._threads += start_threads({f"outcore-update-team-{i}": team}, aten_threads=size)
        self._whole: SimpleQueue[_Share | None] = SimpleQueue()
        if has_whole:
            self._threads += start_threads(
                {"outcore-update-whole": partial(_serve, self._whole, None)}, aten_threads=torch.get_num_threads()
            )
        queues = [*self._queues, *self._teams, self._whole]
        self._end = weakref.finalize(self, _end, queues, self._is_stopped, self._pid)

    @classmethod
    def beside(cls, device: Device, *, sharers: tuple[int, int] = (0, 1), has_whole: bool = False) -> UpdateWorkers:
        """Start the threads that suit a device: on an accelerator one core is left to the thread that gives it work."""
        on_host = device.computes_on_host
        return cls(spare_cores=0 if on_host else 1, sharers=sharers, has_whole=has_whole, in_teams=not on_host)

    def run(self, pieces: Sequence[Piece]) -> None:
        """Update all pieces and wait for them. See ``update_blocks``.

        Raises:
            UnsupportedError: It was called in a forked child or after ``close``.
            StoppedError: ``stop`` was called first.
        """
        whole = [piece for piece in pieces if piece.is_whole]
        parts = [piece for piece in pieces if not piece.is_whole]
        teamed = [piece for piece in parts if piece.is_fused] if self._teams else []
        alone = [piece for piece in parts if not piece.is_fused] if self._teams else parts
        if teamed:
            self._share_out(teamed, self._teams, self._team_sizes)
        if alone or not teamed:
            self._share_out(alone, self._queues, [1] * self.num_workers)
        if whole:
            self._deal([partial(_update, whole, self._is_stopped.is_set)], [self._whole])

    def _share_out(
        self, parts: Sequence[Piece], queues: Sequence[SimpleQueue[_Share | None]], sizes: Sequence[int]
    ) -> None:
        """Deal parts out in proportion to the threads of each queue. Args: sizes: Numbers of threads."""
        numel, stopped = sum(piece.target.numel() for piece in parts), self._is_stopped.is_set
        kind = queues is self._teams, kind_of(parts)
        num_shares = max(1, min(len(queues), numel // LEAST_SHARE_NUMEL)) if parts else 0
        shares = split(parts, sizes[:num_shares])
        nbytes, start_s = self.sizes.take(kind), time.perf_counter()
        self._deal([partial(_update, share, stopped) for share in shares], queues, nbytes)
        self.sizes.took(kind, nbytes, numel, time.perf_counter() - start_s)

    def run_all(self, works: Sequence[Work]) -> None:
        """Deal works out to the workers and wait for them. Each work gets the scratch of its worker.

        Raises:
            UnsupportedError: It was called in a forked child or after ``close``.
        """
        self._deal(works, self._queues)

    def _deal(
        self, works: Sequence[Work], queues: Sequence[SimpleQueue[_Share | None]], nbytes: int = USUAL_BYTES
    ) -> None:
        if os.getpid() != self._pid:
            raise UnsupportedError("update: expected a call in the process that made the workers, but this is its fork")
        with self._lock:
            if not self._threads:
                raise UnsupportedError("update: expected open workers, but they were closed; update before close()")
            ends: SimpleQueue[BaseException | None] = SimpleQueue()
            for queue, work in zip(itertools.cycle(queues), works, strict=False):
                queue.put((work, nbytes, ends))
            errors = [error for error in [ends.get() for _ in works] if error is not None]
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """Let a running update end after the blocks that it has begun. Does not wait for it."""
        self._is_stopped.set()

    def close(self) -> None:
        """Stop, end the threads, and wait for them for a short time. Idempotent."""
        if os.getpid() != self._pid:
            return
        self.stop()
        is_idle = self._lock.acquire(timeout=CLOSE_TIMEOUT_S)  # False: a worker hangs, and its update holds the lock
        threads, self._threads = self._threads, ()
        self._end()
        forget_noise()
        for thread in threads if is_idle else ():
            thread.join()
        if is_idle:
            self._lock.release()


def worker_cpus(
    topology: Topology, *, spare_cores: int, sharers: tuple[int, int] = (0, 1)
) -> list[frozenset[int] | None]:
    """Return the CPUs that each update worker is bound to; None for a worker that may run anywhere.

    There is one worker per core that this process may keep busy. With several NUMA nodes each worker is bound to one of
    them, in proportion to their cores, so that all memory controllers work and a worker's scratch stays near. Within a
    node the system may move it. Workers do not look for parts of an update in near memory: the pages of an arena are
    dealt out to the nodes in turn, so no part is near as a whole.

    Args:
        topology: Topology of this machine.
        spare_cores: Cores to leave to other threads.
        sharers: Index of this process among those that share the cores, and their number. The first processes have the
            cores of the first nodes.
    """
    place, num_sharers = sharers
    num_workers = max(1, topology.num_cores // num_sharers - spare_cores)
    if len(topology.nodes) == 1:
        return [None] * num_workers
    counts = dict.fromkeys(topology.nodes, 0)
    for _ in range(num_workers * num_sharers):
        counts[min(counts, key=lambda node: (counts[node] + 1) / node.num_cores)] += 1
    places = [node.cpus for node, count in counts.items() for _ in range(count)]
    return list(places[place * num_workers : (place + 1) * num_workers])


def _end(queues: Sequence[SimpleQueue[_Share | None]], is_stopped: threading.Event, pid: int) -> None:
    if os.getpid() == pid:
        is_stopped.set()
        for queue in queues:
            queue.put(None)


def _update(share: Sequence[Piece], is_stopped: Callable[[], bool], scratch: torch.Tensor) -> None:
    update_blocks(share, scratch, is_stopped)


def _serve(queue: SimpleQueue[_Share | None], cpus: frozenset[int] | None, num_threads: int = 1) -> None:
    """Run a worker, or a team of ``num_threads``: the body of its thread."""
    if cpus is not None:
        with suppress(OSError):  # a container may forbid it, or take a core away; then the worker runs anywhere
            os.sched_setaffinity(0, cpus)  # of this thread, and of ATen threads that it starts later
    scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
    while (item := queue.get()) is not None:
        work, nbytes, ends = item
        nbytes *= num_threads
        try:
            if scratch.numel() < nbytes:
                scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # first touched by those who use it
            work(scratch[:nbytes])
        except BaseException as error:  # the worker survives whatever a kernel raises; `run` re-raises it
            ends.put(error)
        else:
            ends.put(None)
        del item, work, ends  # an idle worker must not keep the last update's tensors alive
