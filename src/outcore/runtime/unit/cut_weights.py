"""Weights that ranks have together: what puts them into a slot. See [Note: cut fetches]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from outcore.device.lanes import Handle
from outcore.order.ledger import Ledger, Span
from outcore.ranks.world import World


def all_gathers(world: World, ledgers: Sequence[Ledger[Handle]]) -> Callable[..., Callable[[], None]]:
    """For ``order.weights.WeightOrder``. A collective. Args: ledgers: Of all units."""
    cuts = [ledger.cut for ledger in ledgers if ledger.cut.num_sharers > 1]
    for num_sharers in sorted({cut.num_sharers for cut in cuts if cut.is_cut or cut.num_copies > 1}):
        world.open_groups(num_sharers)

    def all_gather(unit: Ledger[Handle], home: Span, slot: Span) -> Callable[[], None]:
        whole, pieces = slot.memory.bytes, []
        for (start, stop), run in zip(unit.cut.together(), unit.cut.runs(), strict=True):
            first, origin = (run.home, home.memory.bytes) if home.of.tier == "device" else (run.layout, whole)
            pieces.append((whole[start:stop], origin[first : first + run.nbytes]))
        return partial(world.all_gather, world.facts, unit.name, pieces, unit.cut.num_sharers)

    return all_gather
