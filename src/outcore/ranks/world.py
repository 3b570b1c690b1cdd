"""The ranks of one prepared model: process groups of torch, and the few collectives that run over them.

[Note: groups] Every lane between ranks has groups of its own, since collectives of one group must come in the same
order on all ranks, and lanes run side by side. Bytes in host memory go over gloo, bytes on a GPU over NCCL. What ranks
agree on, from the caller's thread, has a group of its own, too.

[Note: tags] A collective only sees bytes: where one rank reads a gradient and another a norm, each would get what the
other sent. So a tag comes first that says what a rank is about to do, and with what; all compare it.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed

from outcore.core.errors import ConfigError, OutcoreError
from outcore.core.ranks import TIMEOUT, launched
from outcore.device.device import Device
from outcore.device.opening import backends
from outcore.spec.lanes import Lane

T = TypeVar("T")

_gather_single: Callable[..., object] = (
    getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
)  # before torch 2.13
_SAID_BYTES, _DIGEST_BYTES = 120, 8
"""Of a tag."""


class World:
    """This process among those that train one model."""

    def __init__(self, device: Device) -> None:
        """Make the groups: a collective. Args: device: Of this rank."""
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.local_size = _local_size(self.size)
        self._timeout = datetime.timedelta(seconds=timeout_s())
        self.failure: OutcoreError | None = None
        """Ranks have lost one another."""
        self.num_steps = 0
        """That were begun."""
        self._groups: list[Any] = []
        # No public name gives the store; a torch without this one only makes errors say less.
        found = getattr(distributed.distributed_c10d, "_get_default_store", None)
        self._store = None if found is None else found()
        self._control = self._new_group("gloo")
        self._reduce = _Links(self._new_group, device.group_backend)
        self._save = self._new_group("gloo")
        self._gather = _Links(self._new_group, device.group_backend)
        self._sharers: dict[int, _Links] = {}
        """By the number of ranks that have weights together: those of this rank."""
        self._alike = {1: self._gather}
        """Those that have the same part of them."""
        self.last_step = ""
        """What the last step was made with. Weights that are put together must have been updated alike."""

    def _new_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        chosen = None if ranks is None else list(ranks)
        self._groups.append(distributed.new_group(chosen, backend=backend, timeout=self._timeout))
        return self._groups[-1]

    def open_groups(self, num_sharers: int) -> None:
        """Of ranks that share weights, and of those with the same part of them. A collective."""
        within = [range(first, first + num_sharers) for first in range(0, self.size, num_sharers)]
        across = [range(place, self.size, num_sharers) for place in range(num_sharers)]
        self._sharers[num_sharers] = self._mine(within)
        if num_sharers < self.size:
            self._alike[num_sharers] = self._mine(across)

    def _mine(self, groups: Sequence[Sequence[int]]) -> _Links:
        """All ranks make all groups."""
        made = [_Links(partial(self._new_group, ranks=ranks), self._reduce.backend) for ranks in groups]
        return next(links for links, ranks in zip(made, groups, strict=True) if self.rank in ranks)

    def close(self) -> None:
        """Give the groups back. Nothing may be under way. Idempotent."""
        if self.failure is None:
            self.note("outcore.close")
        groups, self._groups = self._groups, []
        for group in groups if distributed.is_initialized() else ():
            distributed.destroy_process_group(group)

    # From the caller's thread.

    def begin_step(self) -> None:
        """Count a step of the optimizer."""
        self.note("optimizer.step")
        self.num_steps += 1

    def all_of(self, value: T) -> list[T]:
        """What every rank says, in rank order. Blocks until all have said it."""
        found: list[Any] = [None] * self.size
        with self._doing("say what they have", self._control):
            distributed.all_gather_object(found, value, group=self._control)
        return found

    def from_first(self, value: T) -> T:
        """What rank 0 says."""
        said: list[Any] = [value if self.rank == 0 else None]
        with self._doing("hear rank 0", self._control):
            distributed.broadcast_object_list(said, src=0, group=self._control)
        return said[0]

    def say(self, what: str) -> None:
        """All ranks have come here. Args: what: They do, for errors."""
        with self._doing(what, self._control):
            pass

    def copy_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in host memory, in the order in which it lies in memory there."""
        here = tensor.detach().to("cpu", copy=True)
        if here.numel():
            with self._doing("receive a tensor of rank 0", self._control, f"{here.dtype} {here.numel()}"):
                distributed.broadcast(_bytes_of(here), src=0, group=self._control)
        return here

    def gather_parts(self, mine: torch.Tensor, numels: list[int], what: str) -> torch.Tensor:
        """Parts of all ranks, in rank order, as one tensor (1D) in host memory.

        Args:
            mine: Of this rank.
            numels: Of each part.
            what: All ranks do, for errors: ``give their part of ...``.
        """
        most = max(numels)
        room = torch.zeros(most, dtype=mine.dtype, device="cpu")
        room[: mine.numel()] = mine
        found = torch.empty(most * self.size, dtype=mine.dtype, device="cpu")
        with self._doing(what, self._control, f"{mine.dtype} {numels}"):
            if most:
                _gather_single(_bytes_of(found), _bytes_of(room), group=self._control)
        return torch.cat([part[:numel] for part, numel in zip(found.split(most or 1), numels, strict=False)])

    # On lanes.

    def exchange(self, bits: bytes, bucket: torch.Tensor, received: torch.Tensor, unit: str) -> list[bytes]:
        """Send each rank its run of a bucket; receive one from each. Returns the bits of all ranks.

        Args:
            bits: As many on all ranks.
            bucket: 1D uint8, a run for every rank.
            received: As large.
            unit: For errors.
        """
        mine = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        found = torch.empty(len(bits) * self.size, dtype=torch.uint8, device="cpu")
        with self._doing(f"exchange gradients of unit '{unit}' on lane {Lane.REDUCE.value}"):
            _gather_single(found, mine, group=self._reduce.host)
            distributed.all_to_all_single(received, bucket, group=self._reduce.of(bucket))
        return [part.numpy().tobytes() for part in found.split(len(bits))]

    def all_have_saved(self, value: T) -> list[T]:
        """``all_of``, on the lane that saves."""
        found: list[Any] = [None] * self.size
        with self._doing(f"end their part of a checkpoint on lane {Lane.SAVE.value}", self._save):
            distributed.all_gather_object(found, value, group=self._save)
        return found

    @property
    def facts(self) -> str:
        """What made the weights that there are now: the same on all ranks, or one has gone another way."""
        return f"{self.num_steps} {self.last_step}"

    def gather(self, facts: str, unit: str, new: torch.Tensor, num_sharers: int) -> None:
        """Fill in the runs of the other ranks that have the same ones.

        Args:
            facts: As they were when this was submitted.
            unit: Its label.
            new: 1D uint8; this rank's run is there.
            num_sharers: So many ranks share the weights, each in memory of its own.
        """
        place, run = self.rank // num_sharers, new.numel() * num_sharers // self.size
        with self._doing(f"gather weights of unit '{unit}' on lane {Lane.GATHER.value}", self._gather.host, facts):
            _gather_single(new, new[place * run : (place + 1) * run], group=self._alike[num_sharers].of(new))

    def fill_copy(self, facts: str, unit: str, copy: torch.Tensor, num_sharers: int) -> None:
        """Wait until all have written their run of the copy that they share; bring those that other machines wrote.

        Args: as for ``gather``. copy: Of the trained weights (1D uint8).
        """
        run, mine = copy.numel() // self.size, range(self.rank % num_sharers, self.size, num_sharers)
        runs = [copy[rank * run : (rank + 1) * run] for rank in mine]
        with self._doing(f"gather weights of unit '{unit}' on lane {Lane.GATHER.value}", self._gather.host, facts):
            if len(runs) > 1:
                distributed.all_gather(runs, runs[self.rank // num_sharers], group=self._alike[num_sharers].host)
        if len(runs) > 1:
            self.meet(facts, f"have all weights of unit '{unit}'")

    def meet(self, facts: str, what: str) -> None:
        """All ranks have come here. Args: as for ``gather``. what: All do, for errors."""
        with self._doing(f"{what} on lane {Lane.GATHER.value}", self._gather.host, facts):
            pass

    def all_gather(
        self, facts: str, unit: str, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], num_sharers: int
    ) -> None:
        """Put weights together that ranks share.

        Args:
            facts: As they were when this was submitted.
            unit: Its label.
            pieces: Of a slot, and this rank's run of it (1D uint8).
            num_sharers: So many ranks share them.
        """
        links = self._sharers[num_sharers]
        with self._doing(f"all-gather weights of unit '{unit}' on lane {Lane.LINK.value}", links.host, facts):
            for whole, run in pieces:
                _gather_single(whole, run, group=links.of(whole))

    # For errors.

    @contextmanager
    def _doing(self, what: str, group: Any = None, facts: str = "") -> Iterator[None]:
        """All ranks do the same; errors of torch's groups come in words of ours.

        Args:
            what: For errors, behind *expected all ranks to*.
            group: Of the tag; None: what is sent has one of its own. See [Note: tags].
            facts: What must be the same besides.
        """
        if self.failure is not None:  # nobody waits a second time
            raise self.failure
        try:
            if group is not None:
                self._compare(what, group, facts)
            yield
        except OutcoreError:
            raise
        except RuntimeError as error:
            self.failure = OutcoreError(
                f"rank {self.rank}: expected all ranks to {what}, but one has ended, or did not come within "
                f"{timeout_s():g} s ({TIMEOUT}). Last seen: {self.last_seen()}. Look at what these ranks say, end "
                f"all, and go on from what was saved. ({type(error).__name__}: {error})"
            )
            raise self.failure from error

    def _compare(self, what: str, group: Any, facts: str) -> None:
        said = what.encode()[:_SAID_BYTES].ljust(_SAID_BYTES, b"\0")
        tag = said + hashlib.sha256(f"{what}\0{facts}".encode()).digest()[:_DIGEST_BYTES]
        ranks = distributed.get_process_group_ranks(group)
        found = torch.empty(len(tag) * len(ranks), dtype=torch.uint8, device="cpu")
        _gather_single(found, torch.frombuffer(bytearray(tag), dtype=torch.uint8), group=group)
        for rank, theirs in zip(ranks, (part.numpy().tobytes() for part in found.split(len(tag))), strict=True):
            if theirs != tag:
                other = theirs[:_SAID_BYTES].rstrip(b"\0").decode(errors="replace")
                differ = (
                    "settings of param groups, the gradients that are held, what they were multiplied by, or sizes of "
                    f"rank {rank} differ from its own"
                )
                is_other = theirs[:_SAID_BYTES] != said
                self.failure = OutcoreError(
                    f"rank {self.rank}: expected all ranks to {what} with the same settings, but "
                    f"{f'rank {rank} was about to {other}' if is_other else differ}; all ranks must make the same "
                    "calls in the same order: end all, and go on from what was saved"
                )
                raise self.failure

    def note(self, where: str) -> None:
        """What this rank begins. Others that wait for it in vain say it."""
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(f"outcore/{self.rank}", where)

    def last_seen(self) -> str:
        """What the other ranks began last."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        return ", ".join(f"rank {rank} {self._noted(rank)}" for rank in others)

    def _noted(self, rank: int) -> str:
        if self._store is None:
            return "unknown"
        try:
            key = f"outcore/{rank}"
            return f"in {self._store.get(key).decode()}" if self._store.check([key]) else "in prepare"
        except RuntimeError:  # the store has ended with the rank that had it
            return "unknown"


class _Links:
    """The groups of one lane."""

    def __init__(self, new_group: Callable[[str], Any], backend: str) -> None:
        """Args: backend: Moves bytes of the device."""
        self.backend = backend
        self.host = new_group("gloo")
        self._device = self.host if backend == "gloo" else new_group(backend)

    def of(self, tensor: torch.Tensor) -> Any:
        """The group that moves it."""
        return self.host if tensor.is_cpu else self._device


def join_world(torch_device: torch.device | str | None) -> bool:
    """Whether several processes train together; torch's default group is made if a launcher started them.

    Args:
        torch_device: What ``prepare`` was asked for.

    Raises:
        ConfigError: A launcher that does not say where the ranks meet.
    """
    if not distributed.is_available():
        return False
    if not distributed.is_initialized():
        if launched() is None:
            return False
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                "prepare: expected MASTER_ADDR and MASTER_PORT in the environment beside WORLD_SIZE, as torchrun sets "
                "them, or a process group that is there already, but there is neither; start with torchrun, or without "
                "WORLD_SIZE"
            )
        distributed.init_process_group(backends(torch_device))
    return distributed.get_world_size() > 1


def timeout_s() -> float:
    """How long a rank waits for the others.

    Raises:
        ConfigError: The environment says no number.
    """
    text = os.environ.get(TIMEOUT, "1800")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0 or not math.isfinite(value):
        raise ConfigError(f"{TIMEOUT}: expected a number of seconds, but got {text!r}")
    return value


def _local_size(size: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else size


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory (1D uint8)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
