"""What ranks must have in common: compared before any bytes move, with errors that name what differs."""

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
        facts: Facts by name. Their order counts, too.
        call: Named in errors.

    Raises:
        ConfigError: Facts differ. The error names the rank and the first of them, and is raised on all ranks.
    """
    mine = [(name, hashlib.sha256(value.encode()).hexdigest()) for name, value in facts.items()]
    said = world.all_of(mine)
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            known, other = dict(said[0]), dict(theirs)
            name = next((name for name in known | other if known.get(name) != other.get(name)), "the order of units")
            raise ConfigError(
                f"{call}: expected the same model, optimizer and arguments on all ranks, but {name} of rank {rank} "
                "differs from rank 0's; build them from the same settings on every rank"
            )


@contextmanager
def agreed(world: World | None, call: str) -> Iterator[None]:
    """Let all ranks leave the block, or all raise, so that none waits for one that failed. A collective at its end.

    Args:
        world: The ranks; None if there is one.
        call: Named in errors.

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
    """Read all items that the block leaves unread, also if it fails, so that collectives of other ranks can end.

    Args:
        items: Items of which each is read by a collective.
    """
    try:
        yield
    except Exception:
        with suppress(OutcoreError):  # the first error is the one to report
            deque(items, maxlen=0)
        raise
    deque(items, maxlen=0)


def refuse_failed(said: Sequence[str | None], call: str, mine: Exception | None) -> None:
    """Raise if a rank failed. Args: said: What went wrong, by rank. call: Named in errors. mine: This rank's error."""
    if mine is not None:
        raise mine
    failed = next(((rank, text) for rank, text in enumerate(said) if text is not None), None)
    if failed is not None:
        raise OtherRankError(f"{call}: expected all ranks to go on, but rank {failed[0]} said: {failed[1]}")


def least_limits(world: World, mine: Limits) -> Limits:
    """The least limits of all ranks. A collective."""
    said = world.all_of((mine.device_bytes, mine.host_bytes, mine.disk_bytes))
    disks = [disk for _, _, disk in said if disk is not None]
    return Limits(
        device_bytes=min(device for device, _, _ in said),
        host_bytes=min(host for _, host, _ in said),
        disk_bytes=min(disks) if len(disks) == len(said) else None,
    )


def core_sharers(world: World) -> tuple[int, int]:
    """This rank's place among the ranks of its machine whose cores overlap with its own, and the number of these ranks.

    Launchers may bind ranks to cores near their GPUs (``torchrun --numa-binding``, Slurm). A collective.
    """
    mine = sorted(os.sched_getaffinity(0))
    first = world.rank // world.local_size * world.local_size
    near = [not set(mine).isdisjoint(cpus) for cpus in world.all_of(mine)[first : first + world.local_size]]
    return sum(near[: world.rank - first]), sum(near)
