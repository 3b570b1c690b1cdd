"""What a run opens and closes as a whole: device, memory, files and threads.

[Note: last meetings] After the last step, ranks still exchange new weights, and weights that were fetched ahead for a
step that does not come. One rank closes while another still reads weights: it writes the model, say. So no rank may
drop its part of what all ranks have submitted: closing first lets these operations end. They are the same on all ranks
and none waits for a call that a rank has yet to make, so this takes no longer than the slowest rank takes to make the
calls that this one has made. Only a Ctrl-C, or ranks that have lost one another, cut it short.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from outcore.core.errors import LaneError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.engine_saves import EngineSaves
from outcore.engine.unit.live_port import LivePort, Traffic
from outcore.engine.unit.tiers import Tiers
from outcore.engine.updates.workers import UpdateWorkers
from outcore.order.ledger import ByteSpan, Ledger
from outcore.order.step import StepOrder
from outcore.ranks.agreement import core_sharers
from outcore.ranks.world import World
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


class Opened:
    """Owns device, memory, files and threads until ``close``. An error while opening closes what is open."""

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        device: Device,
        paths: Sequence[Path],
        world: World | None = None,
        *,
        has_updates: bool,
    ) -> None:
        """Allocate memory and start threads.

        Args:
            model: Units in the plan's order.
            plan: Checked against the model.
            device: Taken over: closed with the rest, also if this raises.
            paths: Folders of the disk tier.
            world: The ranks that train together; taken over, too.
            has_updates: Whether units may be updated. Updates on the host need threads.
        """
        self.model, self.plan, self.device, self.world, self.traffic = model, plan, device, world, Traffic()
        self._closing = ExitStack()
        if world is not None:
            self._closing.callback(world.close)
        self._closing.callback(device.close)
        with self.closed_on_error():
            first = 0 if world is None else world.rank % world.local_size % max(len(paths), 1)
            # Ranks do the same things at the same time, so they begin with different drives.
            self.tiers = Tiers(model, plan, device, [*paths[first:], *paths[:first]], world)
            self._closing.callback(self.tiers.close)
            port = LivePort(device, self.traffic, self.tiers.store)
            self.order: StepOrder[Handle] = StepOrder(model, plan, port)
            if world is not None:
                self.order.weights.all_gather = _all_gathers(world, self.order.ledgers)
            self.saves = EngineSaves(device, port, self.tiers)
            self._closing.callback(self.saves.abandon)
            self.tiers.hand_out(self.order)
            on_host = has_updates and any(u.plan.is_updated_on_host and u.spec.trainable for u in self.order.ledgers)
            whole = has_updates and any(p.is_whole for unit in model.units for p in unit.trainable)
            on_host |= whole and device.computes_on_host  # there staged updates need the same threads
            sharers = (0, 1) if world is None else core_sharers(world)
            self.workers = UpdateWorkers.beside(device, sharers=sharers, has_whole=whole) if on_host else None
            if self.workers is not None:
                self._closing.callback(self.workers.close)
            self._closing.callback(self._stop)
            if world is not None:
                self._closing.callback(self._meet_last, world)

    def close(self) -> None:
        """Stop what runs and give everything back. Idempotent."""
        self._closing.close()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _meet_last(self, world: World) -> None:
        """Let operations end that other ranks may wait for. See [Note: last meetings]."""
        was_lost, cause = world.failure is not None, sys.exc_info()[1] or getattr(sys, "last_value", None)
        if was_lost or isinstance(cause, KeyboardInterrupt) or os.getpid() != self.device.pid:
            return
        with suppress(LaneError):  # a stall; what follows reports it
            self.device.meet_others()
        if world.failure is not None:
            warnings.warn(str(world.failure), RuntimeWarning, stacklevel=2)

    def _stop(self) -> None:
        """Stop all work: nothing may be in flight to or from memory and files that are given back."""
        if self.workers is not None:
            self.workers.stop()
        if self.tiers.disk is not None:
            self.tiers.disk.stop()
        try:
            self.device.stop()
        except LaneError as error:  # only a warning: what made the program close matters more
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def _all_gathers(world: World, ledgers: Sequence[Ledger[Handle]]) -> Callable[..., Callable[[], None]]:
    """Return what makes the function that fills a slot with cut weights, see [Note: cut fetches]. A collective."""
    cuts = [ledger.cut for ledger in ledgers if ledger.cut.num_sharers > 1]
    for num_sharers in sorted({cut.num_sharers for cut in cuts if cut.is_cut or cut.num_copies > 1}):
        world.open_groups(num_sharers)

    def all_gather(unit: Ledger[Handle], home: ByteSpan, slot: ByteSpan) -> Callable[[], None]:
        whole, pieces = slot.memory.bytes, []
        for (start, stop), run in zip(unit.cut.together(), unit.cut.runs(), strict=True):
            first, origin = (run.home, home.memory.bytes) if home.of.tier == "device" else (run.layout, whole)
            pieces.append((whole[start:stop], origin[first : first + run.nbytes]))
        return partial(world.all_gather, world.facts, unit.name, pieces, unit.cut.num_sharers)

    return all_gather
