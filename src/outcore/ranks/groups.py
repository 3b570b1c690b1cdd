"""Process groups of one prepared model, and the sockets under them.

[Note: hanging up] A wait for another rank inside of gloo cannot be cancelled: it ends when the other rank comes, is
gone, or is late. So a rank that must end now shuts the sockets of its groups down. Then gloo takes the other ranks
for gone here, and this rank for gone there, so all waits end at once. Gloo does not tell which sockets are its own.
They are those that were opened with a group, and whose other end was opened with the same group on another rank.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import distributed

from outcore.torch_private import store_of_ranks

gather_single: Callable[..., object] = (
    getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
)
"""torch's all-gather into one tensor, which has another name before torch 2.13."""
_Address = tuple[str, int]


class _Socket(NamedTuple):
    """One end of a connection."""

    number: int
    """Number of the open file."""
    identity: str
    """What the number refers to: it may be reused for another file."""
    here: _Address
    there: _Address


class Groups:
    """Owns process groups until ``close``."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        """Make no group yet."""
        self._timeout = timeout
        self._of_host: list[Any] = []
        self._of_device: list[Any] = []
        self._sockets: list[_Socket] = []

    def new(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """Make a group: a collective of all ranks. Args: ranks: Ranks in the group; None means all."""
        before = {found.identity for found in _connected()}
        chosen = None if ranks is None else list(ranks)
        group = distributed.new_group(chosen, backend=backend, timeout=self._timeout)
        if backend == "gloo":
            self._of_host.append(group)
            self._sockets += [found for found in _connected() if found.identity not in before]
        else:
            self._of_device.append(group)
        return group

    @property
    def addresses(self) -> list[_Address]:
        """This side's addresses of the sockets that were opened with groups."""
        return [found.here for found in self._sockets]

    def keep(self, others: Collection[_Address]) -> None:
        """Forget sockets that other code opened meanwhile. Args: others: The ``addresses`` of all ranks."""
        self._sockets = [found for found in self._sockets if found.there in others]

    def hang_up(self) -> None:
        """End all waits for other ranks. See [Note: hanging up]. Idempotent."""
        sockets, self._sockets = self._sockets, []
        for found in sockets:
            with suppress(OSError):
                if os.readlink(_file(found.number)) == found.identity:
                    with socket.socket(fileno=os.dup(found.number)) as end:
                        end.shutdown(socket.SHUT_RDWR)
        for group in self._of_device:
            with suppress(RuntimeError, AttributeError):
                group.abort()

    def close(self) -> None:
        """Destroy the groups. Nothing may be under way. Idempotent."""
        groups = [*self._of_host, *self._of_device]
        self._of_host, self._of_device, self._sockets = [], [], []
        for group in groups if distributed.is_initialized() else ():
            distributed.destroy_process_group(group)


class LaneGroups:
    """The groups of one lane."""

    def __init__(self, new_group: Callable[[str], Any], backend: str) -> None:
        """Args: backend: Moves bytes on the device. If it is gloo, they are copied through host memory."""
        self.backend = backend
        self.host = new_group("gloo")
        self._device = None if backend == "gloo" else new_group(backend)

    def exchange(self, received: torch.Tensor, bucket: torch.Tensor) -> None:
        """Send each rank its run of ``bucket``, and receive one from each."""
        target, source = self._reachable(received, bucket)
        distributed.all_to_all_single(target, source, group=self._of(source))
        if target is not received:
            received.copy_(target)

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather the runs of all ranks. Nothing is sent if this rank's run is the whole."""
        if mine.numel() == whole.numel():
            if mine.data_ptr() != whole.data_ptr():
                whole.copy_(mine)
            return
        target, source = self._reachable(whole, mine)
        if target.is_cpu:
            self.gather_runs(target.chunk(distributed.get_world_size(self.host)), source)
        else:
            gather_single(target, source, group=self._device)
        if target is not whole:
            whole.copy_(target)

    def gather_runs(self, runs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Gather runs in host memory, each in its place. Gloo's all-gather would first make a tensor of all runs."""
        here, works = distributed.get_rank(), list[Any]()
        for rank, run in zip(distributed.get_process_group_ranks(self.host), runs, strict=True):
            if rank != here:
                works += [distributed.irecv(run, rank, self.host), distributed.isend(mine, rank, self.host)]
            elif run.data_ptr() != mine.data_ptr():
                run.copy_(mine)
        for work in works:
            work.wait()

    def _reachable(self, target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._device is not None or (target.is_cpu and source.is_cpu):
            return target, source
        return torch.empty_like(target, device="cpu"), source.cpu()

    def _of(self, tensor: torch.Tensor) -> Any:
        return self.host if tensor.is_cpu else self._device


class Notes:
    """What each rank began last, kept in torch's store for the errors of ranks that wait for it in vain."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._store = store_of_ranks()

    def note(self, where: str) -> None:
        """Write down what this rank begins."""
        with suppress(RuntimeError):
            self._store.set(f"outcore/{self._rank}", where)

    def last_seen(self) -> str:
        """Say what the other ranks began last."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return ", ".join(f"rank {rank} {self._noted(rank)}" for rank in others)

    def _noted(self, rank: int) -> str:
        try:
            key = f"outcore/{rank}"
            return f"in {self._store.get(key).decode()}" if self._store.check([key]) else "not in prepare yet"
        except RuntimeError:  # the store has ended with the rank that had it
            return "unknown"


def _file(number: int | str) -> str:
    return f"/proc/self/fd/{number}"


def _connected() -> list[_Socket]:
    """TCP sockets of this process that are connected; an empty list if the system does not list them."""
    found = []
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # not a socket, closed meanwhile, or without another end
                identity = os.readlink(_file(number))
                if identity.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(number))) as end:
                        if end.family in (socket.AF_INET, socket.AF_INET6):
                            here, there = end.getsockname()[:2], end.getpeername()[:2]
                            found.append(_Socket(int(number), identity, here, there))
    return found
