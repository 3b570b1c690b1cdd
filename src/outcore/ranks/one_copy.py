"""Memory that the ranks of a machine share."""

from __future__ import annotations

from outcore.memory.shared import SharedMemory
from outcore.ranks.agreement import agreed
from outcore.ranks.world import World


def shared_memory(world: World, nbytes: int, num_sharers: int) -> SharedMemory:
    """Make one piece of memory for every ``num_sharers`` consecutive ranks. A collective.

    Args:
        world: The ranks.
        nbytes: Size of a piece.
        num_sharers: Ranks that share a piece, all on one machine.

    Raises:
        MemoryBudgetError: The machine does not have so many bytes.
        OutcoreError: Ranks do not see the same memory, or another rank raised.
    """
    mine: SharedMemory | None = None
    try:
        with agreed(world, "prepare"):
            if world.rank % num_sharers == 0:
                mine = SharedMemory.make(nbytes)
        said = world.all_of("" if mine is None else mine.address)
        with agreed(world, "prepare"):
            found = mine or SharedMemory.join(said[world.rank // num_sharers * num_sharers], nbytes)
            mine = found
    except BaseException:
        if mine is not None:
            mine.close()
        raise
    found.settle()
    return found
