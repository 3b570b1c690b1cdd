"""Gradients at rest: the memory in which they are stored, and what the gradients of all units share.

See [Note: a gradient's way].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.unit.live_port import Tiers
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import torch_dtype
from outcore.memory.arena import TEMPORARY, Buffer, Region
from outcore.optim.sums import RunAll
from outcore.order.ledger import After
from outcore.order.slots import Pools
from outcore.ranks.world import World


class GradientHomes:
    """The stored gradients of all units."""

    def __init__(
        self,
        tiers: Tiers,
        pools: Pools[Handle],
        device: Device,
        run_all: RunAll,
        world: World | None,
        *,
        clipping: bool,
    ) -> None:
        """Nothing is allocated: homes and slots exist.

        Args:
            tiers: Has the bytes on disk.
            pools: Slots that may hold copies of what is on disk.
            device: The one that computes.
            run_all: Runs sums in host memory.
            world: All ranks, if there are several: each has what it updates.
            clipping: False promises that no norms are asked for.
        """
        self._tiers, self._pools = tiers, pools
        self.device, self.run_all, self.world, self.clipping = device, run_all, world, clipping
        self.norm_of_ranks: Callable[[Any], torch.Tensor] | None = None
        """Returns the norm of a handle's gradient with several ranks; a collective."""
        self.is_infinite: bool | None = None
        """What ``GradScaler`` found in the gradients of the last pass, if the host knows."""
        self.last_factor: tuple[torch.Tensor, int, dict[torch.dtype, torch.Tensor]] | None = None

    def snapshot(self, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy a factor. Clipping multiplies all gradients by the same one, so one copy of each dtype serves all.

        A factor in host memory is compared by value, too: an edit through ``data`` does not count as a version.
        """
        if factor.is_inference():  # it counts no versions
            return factor.to(dtype, copy=True).reshape(())
        known, own = self.last_factor, factor.dtype
        if known is None or known[0] is not factor or known[1] != factor._version or _differs(factor, known[2][own]):
            copies = {own: factor.detach().clone().reshape(())}
            known = self.last_factor = (factor, factor._version, copies)
        if dtype not in known[2]:
            known[2][dtype] = known[2][own].to(dtype)
        return known[2][dtype]

    def read_one(self, unit: Unit, index: int, *, is_native: bool) -> torch.Tensor:
        """Read one gradient as it is stored, straight from disk. Memory: host, that gradient."""
        part = (unit.spec.bucket_parts if is_native else unit.spec.update_parts)[index]
        home = unit.ledger.gradients
        extent = home.span(part.offset, part.offset + part.nbytes).memory
        self._wait(home.before_read())
        self.device.host_access(f"look at a gradient of {unit.label}", reads=[extent.region])
        found = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
        if part.nbytes:
            self._tiers.store().read(extent, found)
        return found.view(torch_dtype(part.dtype))

    @contextmanager
    def at_hand(self, unit: Unit, *, is_write: bool) -> Iterator[Buffer]:
        """Yield the gradients' home, or a copy that is written back. Host and compute come after its last writer."""
        home = unit.ledger.gradients
        after = home.before_write() if is_write else home.before_read()
        regions: list[Region] = [] if home.memory is None else [home.memory.region]
        access: dict[str, Any] = {"writes": regions} if is_write else {"reads": regions}
        if home.tier == "device":
            self.device.compute(f"look at gradients of {unit.label}", after=after, **access)
            yield home.memory
            home.ready = self.device.mark(f"looked at gradients of {unit.label}")
            return
        self._wait(after)
        self.device.host_access(f"look at gradients of {unit.label}", **access)
        if home.tier == "host":
            yield home.memory
            return
        copy = Buffer(torch.empty(home.nbytes, dtype=torch.uint8, device="cpu"), Region(TEMPORARY, 0, home.nbytes))
        self._tiers.store().read(home.memory, copy.bytes)
        yield copy
        if is_write:
            self._tiers.store().write(home.memory, copy.bytes)
            self._pools.invalidate(home)

    def _wait(self, after: After[Handle]) -> None:
        for label, dependency in after.items():
            self.device.wait(label, dependency)


def _differs(factor: torch.Tensor, copy: torch.Tensor) -> bool:
    return factor.is_cpu and not torch.equal(copy, factor.detach().reshape(()))
