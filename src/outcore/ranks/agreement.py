"""What ranks must have in common: compared before any bytes move, and named where it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from outcore.core.errors import ConfigError
from outcore.ranks.world import World
from outcore.spec.budget import Limits


def agree(world: World, facts: Mapping[str, str]) -> None:
    """Compare facts with rank 0's. A collective.

    Args:
        world: The ranks.
        facts: By what they are called; the order counts, too.

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
                f"prepare: expected the same model, optimizer and arguments on all ranks, but {name} of rank {rank} "
                "differs from rank 0's; build them from the same settings on every rank"
            )


def least_limits(world: World, mine: Limits) -> Limits:
    """Limits that every rank has. A collective."""
    said = world.all_of((mine.device_bytes, mine.host_bytes, mine.disk_bytes))
    disks = [disk for _, _, disk in said if disk is not None]
    return Limits(
        device_bytes=min(device for device, _, _ in said),
        host_bytes=min(host for _, host, _ in said),
        disk_bytes=min(disks) if len(disks) == len(said) else None,
    )
