"""The ranks of one prepared model: process groups of torch, and the few collectives that run over them.

[Note: groups] Every lane between ranks has groups of its own, since collectives of one group must come in the same
order on all ranks, and lanes run side by side. Bytes in host memory go over gloo, bytes on a GPU over NCCL. What ranks
agree on, from the caller's thread, has a group of its own, too. On a GPU a lane's stream is behind what the lane waits
for, and its thread is not: before ranks meet over host memory, the thread waits for the stream.

[Note: tags] A collective only sees bytes: where one rank reads a gradient and another a norm, each would get what the
other sent. So a tag comes first that says what a rank is about to do, and with what; all compare it. A rank that has
failed in what all do together says so by a tag of its own, wherever the others are.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import distributed

from outcore.core.errors import ConfigError, OutcoreError
from outcore.core.ranks import TIMEOUT, OtherRankError, launched
from outcore.device.device import Device
from outcore.device.opening import backends
from outcore.ranks.groups import Groups, Links, Notes, gather_single
from outcore.spec.lanes import Lane

T = TypeVar("T")

_NAME_BYTES, _DIGEST_BYTES = 120, 8
"""Of a tag."""
_FAILED = "fail"
_SHORT_S, _LONG_S, _GRACE_S = 2e-5, 1e-3, 1.0


class World:
    """This process among those that train one model. Owns its groups until ``close``."""

    def __init__(self) -> None:
        """Make the group on which ranks agree: a collective."""
        self.rank, self.size, self.local_size = distributed.get_rank(), num_ranks(), num_local_ranks()
        self.failure: OtherRankError | None = None
        """Ranks have lost one another."""
        self.num_steps = 0
        """That were begun."""
        self._notes = Notes(self.rank, self.size)
        self.note = self._notes.note
        """Of what this rank begins. Others that wait for it in vain say it."""
        self._groups, self._is_kept = Groups(datetime.timedelta(seconds=timeout_s())), False
        self.note("prepare")
        with self._doing("call prepare"):
            self._control = self._groups.new("gloo")
        self._cuts: dict[tuple[int, bool], Links] = {}
        """By how many ranks have weights together: this rank's (True), or those with the same part of them."""
        self.last_step = ""
        """What the last step was made with. Weights that are put together must have been updated alike."""
        self._know_sockets()

    def join_lanes(self, device: Device) -> None:
        """Make the groups of lanes: a collective. Args: device: Of this rank; its lanes hang up when they close."""
        self.all_of(None)  # nobody begins who would be alone
        with self._doing("make groups of lanes"):
            self._reduce = Links(self._groups.new, device.group_backend)
            self._save = self._groups.new("gloo")
            self._cuts[1, False] = Links(self._groups.new, device.group_backend)
        self._settle = device.finish_copies
        self._know_sockets()
        device.hangs_up_with(self._groups.hang_up)

    def _know_sockets(self) -> None:
        said = self.all_of(self._groups.addresses)
        self._groups.keep({address for theirs in said for address in theirs})

    @contextmanager
    def kept(self, call: str) -> Iterator[None]:
        """Who fails in the block tells the others, where they meet next; then the groups are given back.

        Args: call: For errors.
        """
        self._is_kept = True
        try:
            yield
            self._is_kept = False
        except BaseException as error:
            self._is_kept = False
            if isinstance(error, Exception):
                self._tell(f"{call}: expected all ranks to go on, but rank {self.rank} said: {error}")
            else:
                self._groups.hang_up()
            self.close()
            raise

    def open_groups(self, num_sharers: int) -> None:
        """Of ranks that share weights, and of those with the same part of them. A collective."""
        self.all_of(None)  # nobody begins who would be alone
        within = [range(first, first + num_sharers) for first in range(0, self.size, num_sharers)]
        across = [range(first, self.size, num_sharers) for first in range(num_sharers)]
        mine = partial(_mine, self._groups.new, self._reduce.backend, self.rank)
        with self._doing("make groups of ranks that share weights"):
            self._cuts[num_sharers, True] = mine(within)
            if num_sharers < self.size:
                self._cuts[num_sharers, False] = mine(across)
        self._know_sockets()

    def close(self) -> None:
        """Give the groups back, unless ``kept`` does. Nothing may be under way. Idempotent."""
        if self._is_kept:
            return
        self.note("outcore.close") if self.failure is None else self._groups.hang_up()
        self._groups.close()
        self._cuts.clear()
        for last in ("_control", "_reduce", "_save"):  # with it go the threads and sockets of a group
            vars(self).pop(last, None)

    # From the caller's thread.

    def begin_step(self) -> None:
        """Count a step of the optimizer."""
        self.note("optimizer.step")
        self.num_steps += 1

    def all_of(self, value: T) -> list[T]:
        """What every rank says, in rank order. Blocks until all have said it."""
        with self._doing("say what they have"):
            return [pickle.loads(said) for said in self._meet("say what they have", self._control, pickle.dumps(value))]

    def from_first(self, value: T) -> T:
        """What rank 0 says."""
        return self.all_of(value if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def say(self, what: str) -> None:
        """All ranks have come here. Args: what: They do, for errors."""
        with self._doing(what, self._control):
            pass

    def copy_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, in host memory, in the order in which it lies in memory there."""
        here = tensor.detach().to("cpu", copy=True)
        if here.numel():
            with self._doing("receive a tensor of rank 0", self._control, f"{here.dtype} {here.numel()}"):
                self._wait_for(distributed.broadcast(_bytes_of(here), src=0, group=self._control, async_op=True))
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
                self._gather_bytes(_bytes_of(found), _bytes_of(room), self._control)
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
            gather_single(found, mine, group=self._reduce.host)
            self._reduce.exchange(received, bucket)
        return [part.numpy().tobytes() for part in found.split(len(bits))]

    def all_have_saved(self, value: T) -> list[T]:
        """``all_of``, on the lane that saves."""
        what = f"end their part of a checkpoint on lane {Lane.SAVE.value}"
        with self._doing(what):
            return [pickle.loads(said) for said in self._meet(what, self._save, pickle.dumps(value))]

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
        if new.is_cpu:
            self._settle()
        place, run = self.rank // num_sharers, new.numel() * num_sharers // self.size
        with self._doing(
            f"gather weights of unit '{unit}' on lane {Lane.GATHER.value}", self._cuts[1, False].host, facts
        ):
            self._cuts[num_sharers, False].gather(new, new[place * run : (place + 1) * run])

    def fill_copy(self, facts: str, unit: str, copy: torch.Tensor, num_sharers: int) -> None:
        """Wait until all have written their run of the copy that they share; bring those that other machines wrote.

        Args: as for ``gather``. copy: Of the trained weights (1D uint8).
        """
        self._settle()
        run, mine = copy.numel() // self.size, range(self.rank % num_sharers, self.size, num_sharers)
        runs = [copy[rank * run : (rank + 1) * run] for rank in mine]
        with self._doing(
            f"gather weights of unit '{unit}' on lane {Lane.GATHER.value}", self._cuts[1, False].host, facts
        ):
            if len(runs) > 1:
                self._cuts[num_sharers, False].gather_runs(runs, runs[self.rank // num_sharers])
        if len(runs) > 1:
            self.meet(facts, f"have all weights of unit '{unit}'")

    def meet(self, facts: str, what: str) -> None:
        """All ranks have come here. Args: as for ``gather``. what: All do, for errors."""
        self._settle()
        with self._doing(f"{what} on lane {Lane.GATHER.value}", self._cuts[1, False].host, facts):
            pass

    def all_gather(
        self, facts: str, unit: str, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], num_sharers: int
    ) -> None:
        """Put weights together that ranks share.

        Args:
            facts: As they were when this was submitted.
            unit: Its label.
            pieces: Of a slot, and this rank's run of it (1D uint8), or all of it.
            num_sharers: So many ranks share them.
        """
        links = self._cuts[num_sharers, True]
        with self._doing(f"all-gather weights of unit '{unit}' on lane {Lane.LINK.value}", links.host, facts):
            for whole, run in pieces:
                links.gather(whole, run)

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
                self._meet(what, group, facts=facts)
            yield
        except OutcoreError:
            raise
        except RuntimeError as error:
            lost = OtherRankError(
                f"rank {self.rank}: expected all ranks to {what}, but one has ended, or did not come within "
                f"{timeout_s():g} s ({TIMEOUT}). Last seen: {self._notes.last_seen()}. Look at what these ranks say, "
                f"end all, and go on from what was saved. ({type(error).__name__}: {error})"
            )
            raise self._lose(lost) from error

    def _meet(self, what: str, group: Any, said: bytes = b"", *, facts: str = "") -> list[bytes]:
        """What all ranks say, who are about to do the same. See [Note: tags]."""
        name = what.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        tag = name + hashlib.sha256(f"{what}\0{facts}".encode()).digest()[:_DIGEST_BYTES]
        tags = self._all_bytes(tag + len(said).to_bytes(8, "little"), group)
        sizes = [int.from_bytes(theirs[-8:], "little") for theirs in tags]
        has_failed = [theirs[:_NAME_BYTES].rstrip(b"\0") == _FAILED.encode() for theirs in tags]
        different = next((place for place, theirs in enumerate(tags) if theirs[:-8] != tag), None)
        if different is not None and not any(has_failed):
            other = distributed.get_process_group_ranks(group)[different]
            raise self._lose(_different(self.rank, what, other, tags[different]))
        if not max(sizes):
            return [b""] * len(tags)
        rooms = self._all_bytes(said.ljust(max(sizes), b"\0"), group)
        texts = [room[:size] for room, size in zip(rooms, sizes, strict=True)]
        if any(has_failed):
            raise self._lose(OtherRankError(texts[has_failed.index(True)].decode()))
        return texts

    def _lose(self, error: OtherRankError) -> OtherRankError:
        """Ranks have lost one another. Returns why: the first error, from which others follow.

        What waits on other lanes, here and on the other ranks, ends soon; not at once, so that all see what is wrong.
        """
        if self.failure is None:
            self.failure = error
            ending = threading.Timer(_GRACE_S, self._groups.hang_up)
            ending.daemon = True
            with suppress(RuntimeError):  # the interpreter ends, and sockets with it
                ending.start()
        return self.failure

    def _tell(self, text: str) -> None:
        """This rank has failed: the others hear of it where they meet next. They may have failed, too."""
        if self.failure is None:
            with suppress(OutcoreError), self._doing("say how they failed"):
                self._meet(_FAILED, self._control, text.encode())

    def _all_bytes(self, mine: bytes, group: Any) -> list[bytes]:
        """As many of each rank of a group."""
        found = torch.empty(len(mine) * distributed.get_world_size(group), dtype=torch.uint8, device="cpu")
        self._gather_bytes(found, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group)
        return [part.numpy().tobytes() for part in found.split(len(mine))]

    def _gather_bytes(self, found: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        if group is self._control:
            self._wait_for(gather_single(found, mine, group=group, async_op=True))
        else:  # on a lane, whose thread may block
            gather_single(found, mine, group=group)

    def _wait_for(self, work: Any) -> None:
        """A Ctrl-C ends it, and so does what lanes notice meanwhile. See [Note: hanging up]."""
        pause_s = _SHORT_S
        try:
            while not work.is_completed() and self.failure is None:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONG_S)
        except BaseException:
            self.failure = OtherRankError(f"rank {self.rank}: expected all ranks to meet, but this one was interrupted")
            self._groups.hang_up()
            raise
        if self.failure is not None:  # noticed on a lane
            raise self.failure
        work.wait()


def _mine(new: Callable[..., Any], backend: str, rank: int, groups: Sequence[Sequence[int]]) -> Links:
    """All ranks make all groups. Returns: the one that this rank is in."""
    made = [Links(partial(new, ranks=ranks), backend) for ranks in groups]
    return next(links for links, ranks in zip(made, groups, strict=True) if rank in ranks)


def _different(rank: int, what: str, other: int, tag: bytes) -> OtherRankError:
    """Args: rank: This one, which is about to do what. tag: Of the other rank."""
    theirs = tag[:_NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    differ = (
        "settings of param groups, the gradients that are held, what they were multiplied by, or sizes of "
        f"rank {other} differ from its own"
    )
    is_other = theirs.encode() != what.encode()[:_NAME_BYTES]
    return OtherRankError(
        f"rank {rank}: expected all ranks to {what} with the same settings, but "
        f"{f'rank {other} was about to {theirs}' if is_other else differ}; all ranks must make the same calls in the "
        "same order: end all, and go on from what was saved"
    )


def join_world(torch_device: torch.device | str | None) -> bool:
    """Whether several processes train together; torch's default group is made if a launcher started them.

    Args:
        torch_device: What ``prepare`` was asked for.

    Raises:
        ConfigError: A launcher that does not say where the ranks meet.
        OtherRankError: Not all came there.
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
        try:
            distributed.init_process_group(backends(torch_device), timeout=datetime.timedelta(seconds=timeout_s()))
        except RuntimeError as error:
            raise OtherRankError(
                f"rank {os.environ.get('RANK')}: expected to meet {os.environ['WORLD_SIZE']} ranks at "
                f"{os.environ['MASTER_ADDR']} within {timeout_s():g} s ({TIMEOUT}), but: {error}; look at what the "
                "others say, and start all again"
            ) from error
    return num_ranks() > 1


def num_ranks() -> int:
    """That train together. 1: this process trains alone."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def num_local_ranks() -> int:
    """Of them on this node, as far as the launcher says it; else all."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) and num_ranks() > 1 else num_ranks()


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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory (1D uint8)."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
