"""What ranks must have in common: compared before any bytes move, and named where it differs."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from outcore.core.errors import ConfigError, OutcoreError
from outcore.core.ranks import OtherRankError
from outcore.ranks.world import World
from outcore.spec.budget import Limits


def agree(world: World, facts: Mapping[str, str], *, call: str = "prepare") -> None:
    """Compare facts with rank 0's. A collective.

    Args:
        world: The ranks.
        facts: By what they are called; the order counts, too.
        call: For errors.

    Raises:
        ConfigError: They differ; names the rank and the first that does. Raised on all ranks.
    """
    mine = [(name, hashlib.sha256(value.encode()).hexdigest()) for name, value in facts.items()]
    said = world.all_of(mine)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            known = dict(said[0])
            name = next((name for name, digest in theirs if known.get(name) != digest), "the order of units")
            raise ConfigError(
                f"{call}: expected the same model, optimizer and arguments on all ranks, but {name} of rank {rank} "
                "differs from rank 0's; build them from the same settings on every rank"
            )


@contextmanager
def agreed(world: World | None, call: str) -> Iterator[None]:
    """All ranks leave the block, or all raise: nobody waits for one that has failed. A collective behind the block.

    Args:
        world: The ranks; None: there is one.
        call: For errors.

    Raises:
        OtherRankError: Another rank raised.
    """
    if world is None:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        said = world.all_of(None if error is None else str(error))
    except OtherRankError as lost:  # the others were on their way to something else
        raise (error or lost) from lost
    refuse_failed(said, call, error)


@contextmanager
def read_by_all(items: Iterable[object]) -> Iterator[None]:
    """Behind the block, what it left of them is read. Where it fails, the other ranks still give their parts.

    Args:
        items: To read each of them is a collective.
    """
    try:
        yield
    except Exception:
        with suppress(OutcoreError):  # the first error is the one to tell
            deque(items, maxlen=0)
        raise
    deque(items, maxlen=0)


def refuse_failed(said: Sequence[str | None], call: str, mine: Exception | None) -> None:
    """Raise if a rank has failed. Args: said: By rank, what went wrong. call: For errors. mine: This rank's error."""
    if mine is not None:
        raise mine
    failed = next(((rank, text) for rank, text in enumerate(said) if text is not None), None)
    if failed is not None:
        raise OtherRankError(f"{call}: expected all ranks to go on, but rank {failed[0]} said: {failed[1]}")


def least_limits(world: World, mine: Limits) -> Limits:
    """Limits that every rank has. A collective."""
    said = world.all_of((mine.device_bytes, mine.host_bytes, mine.disk_bytes))
    disks = [disk for _, _, disk in said if disk is not None]
    return Limits(
        device_bytes=min(device for device, _, _ in said),
        host_bytes=min(host for _, host, _ in said),
        disk_bytes=min(disks) if len(disks) == len(said) else None,
    )


def core_sharers(world: World) -> tuple[int, int]:
    """Ranks of this machine, this one among them, that may run on cores of its own: its place, and how many they are.

    Launchers may bind ranks to cores near their GPUs (``torchrun --numa-binding``, Slurm). A collective.
    """
    mine = sorted(os.sched_getaffinity(0))
    first = world.rank // world.local_size * world.local_size
    near = [not set(mine).isdisjoint(cpus) for cpus in world.all_of(mine)[first : first + world.local_size]]
    return sum(near[: world.rank - first]), sum(near)
