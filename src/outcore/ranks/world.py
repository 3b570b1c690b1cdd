"""The ranks of one prepared model: process groups of torch, and the few collectives that run over them.

Models that other libraries replicate or shard are refused, and process groups whose ranks do not train together.
Otherwise every rank would train a model of its own: gradients would never meet, since neither ``torchrun`` nor a
process group changes what a plain loop computes.

[Note: groups] Every lane between ranks has groups of its own, since collectives of one group must come in the same
order on all ranks, and lanes run side by side. Bytes in host memory go over gloo, bytes on a GPU over NCCL. Agreements
from the caller's thread have a group of their own, too. On a GPU, a lane's stream is ordered after what the lane waits
for, but its thread is not. So before ranks meet over host memory, the thread waits for the stream.
"""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed, nn

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.ranks import TIMEOUT, OtherRankError, launched
from outcore.device.device import Device
from outcore.device.opening import backends
from outcore.ranks.groups import Groups, LaneGroups, gather_single
from outcore.ranks.meeting import Meeting, timeout_s
from outcore.spec.lane_names import Lane
from outcore.torch_private import as_it_is

T = TypeVar("T")


class World:
    """This process among those that train one model. Owns its groups until ``close``."""

    def __init__(self) -> None:
        """Make the group for agreements. A collective."""
        self.rank, self.size, self.local_size = distributed.get_rank(), num_ranks(), num_local_ranks()
        self.num_steps = 0
        """Steps that were begun."""
        self._groups, self._is_kept = Groups(datetime.timedelta(seconds=timeout_s())), False
        self._meeting = Meeting(self.rank, self.size, self._groups)
        self.note = self._meeting.notes.note
        """Writes down what this rank begins, for errors of ranks that wait for it in vain."""
        self.note("prepare")
        self._meeting.begin()
        self._cuts: dict[tuple[int, bool], LaneGroups] = {}
        """Groups by number of ranks that share weights: of these ranks (True), or those with the same part (False)."""
        self.last_step = ""
        """Settings of the last step. Weights that are put together must have been updated alike."""
        self._know_sockets()
        self.local_size = max(self.all_of(self.local_size))  # all must take the same way, also if nodes differ

    @property
    def failure(self) -> OtherRankError | None:
        """Why ranks have lost one another; None if they have not."""
        return self._meeting.failure

    def join_lanes(self, device: Device) -> None:
        """Make the groups of lanes. A collective. Args: device: This rank's; its lanes hang up when they close."""
        self.all_of(None)  # no rank begins before all are here
        with self._meeting.doing("make groups of lanes"):
            self._reduce = LaneGroups(self._groups.new, device.group_backend)
            self._save = self._groups.new("gloo")
            self._cuts[1, False] = LaneGroups(self._groups.new, device.group_backend)
        self._settle = device.finish_copies
        self._know_sockets()
        device.hangs_up_with(self._groups.hang_up)

    def _know_sockets(self) -> None:
        self._groups.keep({address for theirs in self.all_of(self._groups.addresses) for address in theirs})

    @contextmanager
    def kept(self, call: str) -> Iterator[None]:
        """Keep groups for the block. A rank that fails tells the others where they meet next, and closes its groups.

        Args: call: Named in errors.
        """
        self._is_kept = True
        try:
            yield
            self._is_kept = False
        except BaseException as error:
            self._is_kept = False
            if isinstance(error, Exception):
                self._meeting.tell(f"{call}: expected all ranks to go on, but rank {self.rank} said: {error}")
            else:
                self._groups.hang_up()
            self.close()
            raise

    def open_groups(self, num_sharers: int) -> None:
        """Make groups of ranks that share weights, and of ranks with the same part of them. A collective."""
        self.all_of(None)  # no rank begins before all are here
        within = [range(first, first + num_sharers) for first in range(0, self.size, num_sharers)]
        across = [range(first, self.size, num_sharers) for first in range(num_sharers)]
        mine = partial(_mine, self._groups.new, self._reduce.backend, self.rank)
        with self._meeting.doing("make groups of ranks that share weights"):
            self._cuts[num_sharers, True] = mine(within)
            if num_sharers < self.size:
                self._cuts[num_sharers, False] = mine(across)
        self._know_sockets()

    def close(self) -> None:
        """Destroy the groups, unless ``kept`` keeps them. Nothing may be under way. Idempotent."""
        if self._is_kept:
            return
        self.note("outcore.close") if self._meeting.failure is None else self._groups.hang_up()
        self._groups.close()
        self._cuts.clear()
        self._meeting.control = None
        for last in ("_reduce", "_save"):  # the last reference to a group frees its threads and sockets
            vars(self).pop(last, None)

    # From the caller's thread.

    def begin_step(self) -> None:
        """Count a step of the optimizer."""
        self.note("optimizer.step")
        self.num_steps += 1

    def all_of(self, value: T) -> list[T]:
        """The values of all ranks, in rank order. Blocks until all ranks have given one."""
        what, meeting = "say what they have", self._meeting
        with meeting.doing(what):
            return [pickle.loads(said) for said in meeting.meet(what, meeting.control, pickle.dumps(value))]

    def from_first(self, value: T) -> T:
        """Rank 0's value, on all ranks. A collective."""
        return self.all_of(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def say(self, what: str) -> None:
        """Wait until all ranks have come here. Args: what: What all of them do, for errors."""
        with self._meeting.doing(what, self._meeting.control):
            pass

    def copy_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in host memory, with its elements in memory in the same order as there. A collective."""
        here = tensor.detach().to("cpu", copy=True)
        if here.numel():
            with self._meeting.doing(
                "receive a tensor of rank 0", self._meeting.control, f"{here.dtype} {here.numel()}"
            ):
                self._meeting.wait_for(
                    distributed.broadcast(_bytes_of(here), src=0, group=self._meeting.control, async_op=True)
                )
        return here

    def gather_parts(self, mine: torch.Tensor, numels: list[int], what: str) -> torch.Tensor:
        """The parts of all ranks, in rank order, as one tensor (1D) in host memory. A collective.

        Args:
            mine: This rank's part.
            numels: Number of elements of each part.
            what: What all ranks do, for errors, such as ``give their part of ...``.
        """
        most = max(numels)
        room = torch.zeros(most, dtype=mine.dtype, device="cpu")
        room[: mine.numel()] = mine
        found = torch.empty(most * self.size, dtype=mine.dtype, device="cpu")
        with self._meeting.doing(what, self._meeting.control, f"{mine.dtype} {numels}"):
            if most:
                self._meeting.gather_bytes(_bytes_of(found), _bytes_of(room), self._meeting.control)
        return torch.cat([part[:numel] for part, numel in zip(found.split(most or 1), numels, strict=False)])

    # On lanes.

    def exchange(self, bits: bytes, bucket: torch.Tensor, received: torch.Tensor, unit: str) -> list[bytes]:
        """Send each rank its run of a bucket; receive one from each. Returns the bits of all ranks.

        Args:
            bits: This rank's bits; as many on all ranks.
            bucket: 1D uint8, a run for every rank.
            received: 1D uint8, as large as the bucket.
            unit: Label of the unit, for errors.
        """
        mine = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        found = torch.empty(len(bits) * self.size, dtype=torch.uint8, device="cpu")
        with self._meeting.doing(f"exchange gradients of unit '{unit}' on lane {Lane.REDUCE.value}"):
            gather_single(found, mine, group=self._reduce.host)
            self._reduce.exchange(received, bucket)
        return [part.numpy().tobytes() for part in found.split(len(bits))]

    def all_have_saved(self, value: T) -> list[T]:
        """Do the same as ``all_of``, on the save lane."""
        what = f"end their part of a checkpoint on lane {Lane.SAVE.value}"
        with self._meeting.doing(what):
            return [pickle.loads(said) for said in self._meeting.meet(what, self._save, pickle.dumps(value))]

    @property
    def facts(self) -> str:
        """How the present weights were made. If ranks differ in it, one has gone another way."""
        return f"{self.num_steps} {self.last_step}"

    def gather(self, facts: str, unit: str, new: torch.Tensor, num_sharers: int) -> None:
        """Fill in the runs that other ranks with the same part of the weights have updated.

        Args:
            facts: The ``facts`` at the time when this was submitted.
            unit: Label of the unit.
            new: 1D uint8; this rank's run is filled in already.
            num_sharers: Number of ranks that share the weights, each in memory of its own.
        """
        if new.is_cpu:
            self._settle()
        place, run = self.rank // num_sharers, new.numel() * num_sharers // self.size
        with self._meeting.doing(
            f"gather weights of unit '{unit}' on lane {Lane.GATHER.value}", self._cuts[1, False].host, facts
        ):
            self._cuts[num_sharers, False].gather(new, new[place * run : (place + 1) * run])

    def fill_copy(self, facts: str, unit: str, copy: torch.Tensor, num_sharers: int) -> None:
        """Wait until all ranks have written their run of the shared copy; fetch the runs that other machines wrote.

        Args: as for ``gather``. copy: The copy of the trained weights (1D uint8).
        """
        self._settle()
        run, mine = copy.numel() // self.size, range(self.rank % num_sharers, self.size, num_sharers)
        runs = [copy[rank * run : (rank + 1) * run] for rank in mine]
        with self._meeting.doing(
            f"gather weights of unit '{unit}' on lane {Lane.GATHER.value}", self._cuts[1, False].host, facts
        ):
            if len(runs) > 1:
                self._cuts[num_sharers, False].gather_runs(runs, runs[self.rank // num_sharers])
        if len(runs) > 1:
            self.meet(facts, f"have all weights of unit '{unit}'")

    def meet(self, facts: str, what: str) -> None:
        """Wait on the lane until all ranks have come here. Args: as for ``gather``. what: What all do, for errors."""
        self._settle()
        with self._meeting.doing(f"{what} on lane {Lane.GATHER.value}", self._cuts[1, False].host, facts):
            pass

    def all_gather(
        self, facts: str, unit: str, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], num_sharers: int
    ) -> None:
        """Put weights together that ranks share.

        Args:
            facts: The ``facts`` at the time when this was submitted.
            unit: Label of the unit.
            pieces: Pieces of a slot, each with this rank's run of it, or with all of it (1D uint8).
            num_sharers: Number of ranks that share the weights.
        """
        links = self._cuts[num_sharers, True]
        with self._meeting.doing(f"all-gather weights of unit '{unit}' on lane {Lane.LINK.value}", links.host, facts):
            for whole, run in pieces:
                links.gather(whole, run)


def _mine(new: Callable[..., Any], backend: str, rank: int, groups: Sequence[Sequence[int]]) -> LaneGroups:
    """Make all groups, as all ranks must. Returns the one that this rank is in."""
    made = [LaneGroups(partial(new, ranks=ranks), backend) for ranks in groups]
    return next(links for links, ranks in zip(made, groups, strict=True) if rank in ranks)


def join_world(torch_device: torch.device | str | None) -> bool:
    """Whether several processes train together. Makes torch's default group if a launcher started them.

    Args:
        torch_device: The device that ``prepare`` was asked for.

    Raises:
        ConfigError: The launcher does not say where the ranks meet.
        OtherRankError: Not all ranks came there in time.
    """
    if not distributed.is_available():
        return False
    if not distributed.is_initialized():
        if launched() is None:
            return False
        names, timeout = backends(torch_device), datetime.timedelta(seconds=timeout_s())
        try:
            distributed.init_process_group(names, timeout=timeout)
        except ValueError as error:
            raise ConfigError(
                "prepare: expected MASTER_ADDR and MASTER_PORT in the environment beside WORLD_SIZE and RANK, as "
                f"torchrun sets them, or a process group that is there already, but: {error}; start with torchrun, or "
                "without WORLD_SIZE"
            ) from error
        except RuntimeError as error:
            raise OtherRankError(
                f"rank {os.environ.get('RANK')}: expected to meet {os.environ['WORLD_SIZE']} ranks at "
                f"{os.environ['MASTER_ADDR']} within {timeout_s():g} s ({TIMEOUT}), but: {error}; look at what the "
                "others say, and start all again"
            ) from error
    return num_ranks() > 1


def num_ranks() -> int:
    """Number of ranks that train together; 1 if this process trains alone."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def num_local_ranks() -> int:
    """Number of ranks on this node, if the launcher says it; otherwise of all ranks."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) and num_ranks() > 1 else num_ranks()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory (1D uint8)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


_FIRST = "prepare after init_process_group, or under torchrun, and all ranks train together"
_BARE = "prepare the bare model on every rank: outcore shares the work among them itself"
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


_measured: list[None] = []
"""One entry for each running ``measuring`` block."""


@contextmanager
def measuring() -> Iterator[None]:
    """Allow one rank to run a model of its own inside the block. It measures its machine with it; the others wait."""
    _measured.append(None)
    try:
        yield
    finally:
        _measured.pop()


@as_it_is
def refuse_process_group(who: str, num_ranks: int = 1) -> None:
    """Refuse a process group of several ranks if only one rank trains the model.

    Takes less than a microsecond if there is no process group.

    Args:
        who: Name of what refuses, for the error.
        num_ranks: Number of ranks that train the model together.

    Raises:
        UnsupportedError: There is such a group.
    """
    if num_ranks == 1 and not _measured and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            raise UnsupportedError(
                f"{who}: expected one process on one device, but torch.distributed has "
                f"{distributed.get_world_size()} processes; {_FIRST}"
            )


def refuse_wrapped(who: str, model: nn.Module) -> None:
    """Refuse a model that another library replicates or shards.

    Args:
        who: Name of what refuses, for the error.
        model: The model; all its modules and parameters are looked at.

    Raises:
        UnsupportedError: A module is wrapped in DDP, FSDP or DataParallel, or a parameter is sharded.
    """
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in _torch_classes(module) if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            _refuse_wrapper(who, f"'{name}'" if name else "the model", wrapper)
    for name, param in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in _torch_classes(param)):
            _refuse_wrapper(who, f"'{name}'", "DTensor")


class RefuseReplicas:
    """An object that makes DDP and DataParallel fail when they ask a prepared model for it before replicating it."""

    def __call__(self, *_: object) -> NoReturn:
        """Refuse DataParallel, which calls this to copy the module."""
        _refuse_wrapper("DataParallel", "the prepared model", "DataParallel")

    def __iter__(self) -> Iterator[str]:
        """Refuse DDP, which asks here which parameters to leave alone."""
        _refuse_wrapper("DistributedDataParallel", "the prepared model", "DistributedDataParallel")


def _torch_classes(value: object) -> Iterator[type]:
    return (kind for kind in type(value).__mro__ if kind.__module__.startswith("torch."))


def _refuse_wrapper(who: str, what: str, wrapper: str) -> NoReturn:
    raise UnsupportedError(f"{who}: expected a model on one device, but {what} is wrapped in {wrapper}; {_BARE}")
