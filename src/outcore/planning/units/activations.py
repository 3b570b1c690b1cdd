"""What forwards save, from shapes alone, and a plan under which it leaves the device.

Kernels differ between devices: attention on the CPU saves the scores, on a GPU it does not. So the shapes are followed
on fake tensors of the device that will compute. Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes
from outcore.planning.units.partition import Partition
from outcore.planning.units.shapes import on_shapes
from outcore.spec.budget import Limits
from outcore.spec.plan import AwayTier, Plan, Pool, Tier

SMALL_BYTES = 4096
"""Storages up to this size stay on the device."""
ALIGN_BYTES = 512
"""Storages begin at multiples of this, as allocators let them: kernels are chosen by how their arguments lie."""


def saved_bytes(cut: Partition, sample: Mapping[str, Any], device: torch.device) -> dict[str, int]:
    """Bytes that one call of each unit saves and that can leave the device.

    Args:
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward, as large as they will come. Only shapes and dtypes count.
        device: That will compute.

    Returns:
        Name of the unit -> bytes, in multiples of 4 KiB. Under autocast casts come on top of it.

    Raises:
        ConfigError: The model cannot be run with these arguments, or not without values.

    Time: a forward in Python, 1 to 3 s for a large model. Memory: none.
    """
    seen = {unit.name: _Unit() for unit in cut.spec.units[1:]}
    with on_shapes(cut, sample, device) as (own, forward), ExitStack() as hooks:
        staying = {_storage(t) for t in own.values()}
        for unit, module in zip(seen.values(), cut.modules[1:], strict=True):
            hooks.callback(module.register_forward_pre_hook(unit.begin(staying), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(unit.end, always_call=True).remove)
        forward()
    return {name: align_up(unit.nbytes, PAGE_BYTES) for name, unit in seen.items()}


def _storage(tensor: torch.Tensor) -> int:
    """Tells storages apart while they live; fake ones have no address."""
    return tensor.untyped_storage()._cdata


class _Unit:
    """Counts what autograd saves in calls of a unit, each storage once."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Of the largest call."""
        self._running: list[tuple[_Call, Any]] = []

    def begin(self, staying: set[int]) -> Any:
        """Hook before forward. Args: staying: Storages that stay in any case."""

        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            call = _Call({*staying, *(_storage(t) for t in given if not t.requires_grad)})
            hooks = torch.autograd.graph.saved_tensors_hooks(call.count, _never)
            hooks.__enter__()
            self._running.append((call, hooks))

        return hook

    def end(self, *_: Any) -> None:
        """Hook behind forward."""
        call, hooks = self._running.pop()
        hooks.__exit__(None, None, None)
        self.nbytes = max(self.nbytes, call.nbytes)


class _Call:
    """What one call saves."""

    def __init__(self, staying: set[int]) -> None:
        self.nbytes = 0
        self._staying = staying
        self._kept: list[torch.Tensor] = []  # so that no storage comes twice under one name

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hook that packs."""
        place, nbytes = _storage(tensor), tensor.untyped_storage().nbytes()
        if place not in self._staying and nbytes > SMALL_BYTES:
            self._staying.add(place)
            self._kept.append(tensor.detach())
            self.nbytes = align_up(self.nbytes + nbytes, ALIGN_BYTES)
        return tensor


def _never(tensor: torch.Tensor) -> torch.Tensor:
    """No backward comes."""
    return tensor


@dataclass(frozen=True)
class Sending:
    """Activations of all units that leave the device for one tier."""

    tier: AwayTier
    saved: Mapping[str, int]
    """Unit -> bytes."""

    @property
    def taken(self) -> dict[Tier, int]:
        """Tier -> bytes that this takes: homes, and slots on the way."""
        total: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        total[self.tier] += sum(self.saved.values())
        for pool in self._pools():
            total[pool.tier] += pool.total_bytes
        return total

    def left(self, limits: Limits) -> Limits:
        """What is left of limits for everything else."""
        taken, disk = self.taken, limits.disk_bytes
        return Limits(
            device_bytes=max(0, limits.device_bytes - taken["device"]),
            host_bytes=max(0, limits.host_bytes - taken["host"]),
            disk_bytes=None if disk is None else max(0, disk - taken["disk"]),
        )

    def explained(self, error: PlanInfeasibleError) -> PlanInfeasibleError:
        """The error of a plan for what was left, with what this takes on top of it."""
        taken = self.taken
        said = ", ".join(f"{format_bytes(nbytes)} on {tier}" for tier, nbytes in taken.items() if nbytes)
        required = {tier: nbytes + taken[tier] for tier, nbytes in error.required_bytes.items()}  # type: ignore[index]
        raised = {tier: nbytes + taken[tier] for tier, nbytes in error.raise_one_to.items()}  # type: ignore[index]
        text = f"{error}\nActivations that rest on {self.tier} take {said} besides, which the numbers above leave out."
        return PlanInfeasibleError(text, required, raised)

    def applied(self, plan: Plan) -> Plan:
        """The plan in which they leave. Args: plan: Made for what was left."""
        units = [
            replace(unit, policy="keep", activations=self.tier, saved_bytes=self.saved[unit.name])
            if self.saved.get(unit.name)
            else unit
            for unit in plan.units
        ]
        return replace(plan, units=tuple(units), pools=(*plan.pools, *self._pools()))

    def _pools(self) -> Iterator[Pool]:
        slot_bytes = max(self.saved.values(), default=0)
        counts: Sequence[tuple[Tier, int]] = [("device", 2), *([("host", 3)] if self.tier == "disk" else [])]  # type: ignore[list-item]
        for tier, count in counts if slot_bytes else ():
            num_slots = min(count, sum(nbytes > 0 for nbytes in self.saved.values()))
            yield Pool(tier=tier, kind="activations", slot_bytes=slot_bytes, num_slots=num_slots)
