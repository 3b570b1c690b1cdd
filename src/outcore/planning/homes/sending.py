"""Plans whose units save more than a plan that recomputes everything, or save it elsewhere than on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import PAGE_BYTES, align_up, format_bytes
from outcore.planning.forward.footprint import STAY, Footprint
from outcore.planning.homes.share import spread
from outcore.spec.budget import Limits
from outcore.spec.plan import Plan, Policy, Pool, Tier, UnitPlan

WORKSPACE_SHARE = 1.03
"""Factor on the bytes that shapes tell: kernels take workspaces of their own."""


def workspace_bytes(footprint: Footprint, units: Iterable[UnitPlan]) -> int:
    """Return the device bytes that a plan is to leave to activations and workspace; 0 if not known.

    Args:
        footprint: The footprint of the largest micro-batch.
        units: The units of the plan, or of ``undecided``.
    """
    return align_up(int(WORKSPACE_SHARE * footprint.peak_bytes(units)), PAGE_BYTES)


def undecided(names: Iterable[str], sending: Sending | None) -> list[UnitPlan]:
    """Return units whose activations alone are decided, with homes that need the most of the device beside the plan.

    Args:
        names: Names of all units, the root first.
        sending: What becomes of activations; None if they stay, and are recomputed.
    """
    units = [UnitPlan(name=name, weights="device", gradients="device", states="device") for name in names]
    return units if sending is None else [sending.unit(unit) for unit in units]


class Away(NamedTuple):
    """A way to treat activations: the policy of a share of the units, and the tier where their activations rest."""

    tier: Tier
    policy: Policy
    share: float = 1.0

    def of(self, footprint: Footprint) -> Sending:
        """Return the same for a micro-batch of known footprint."""
        return Sending(self.tier, self.policy, footprint, self.share)


@dataclass(frozen=True)
class Sending:
    """What a share of the units saves, and where that rests. The other units are recomputed."""

    tier: Tier
    policy: Policy
    footprint: Footprint
    share: float = 1.0
    """The fraction of the units but the root, spread evenly."""

    @property
    def away(self) -> Away:
        """The same without the footprint."""
        return Away(self.tier, self.policy, self.share)

    @cached_property
    def units(self) -> frozenset[str]:
        """The units of the share."""
        names = list(self.footprint.saved)
        return frozenset(names[i] for i in spread(range(len(names)), self.share))

    @cached_property
    def saved(self) -> Mapping[str, int]:
        """Unit -> bytes that leave the device."""
        if self.tier == "device":
            return {}
        return {name: saved.of(self.policy) for name, saved in self.footprint.saved.items() if name in self.units}

    @property
    def taken(self) -> dict[Tier, int]:
        """Tier -> bytes that activations take there: homes, and slots on the way."""
        total: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        total[self.tier] += self.footprint.pieces * sum(self.saved.values())  # nothing on the device
        for pool in self._pools():
            total[pool.tier] += pool.total_bytes
        return total

    def left(self, limits: Limits) -> Limits:
        """Return what is left of limits for everything else."""
        taken, disk = self.taken, limits.disk_bytes
        return Limits(
            device_bytes=max(0, limits.device_bytes - taken["device"]),
            host_bytes=max(0, limits.host_bytes - taken["host"]),
            disk_bytes=None if disk is None else max(0, disk - taken["disk"]),
        )

    def explained(self, error: PlanInfeasibleError) -> PlanInfeasibleError:
        """Return the error of a plan for the rest of the limits, with what activations take added to its numbers."""
        taken = self.taken
        said = ", ".join(f"{format_bytes(nbytes)} on {tier}" for tier, nbytes in taken.items() if nbytes)
        required = {tier: nbytes + taken[tier] for tier, nbytes in error.required_bytes.items()}  # type: ignore[index]
        raised = {tier: nbytes + taken[tier] for tier, nbytes in error.raise_one_to.items()}  # type: ignore[index]
        text = f"{error}\nActivations that rest on {self.tier} take {said} besides, which the numbers above leave out."
        return PlanInfeasibleError(text, required, raised)

    def applied(self, plan: Plan) -> Plan:
        """Return the plan with these activations. Args: plan: A plan that was made for what was left."""
        units, pools = tuple(map(self.unit, plan.units)), (*plan.pools, *self._pools())
        return replace(plan, units=units, pools=pools)

    def unit(self, plan: UnitPlan) -> UnitPlan:
        """Return the plan of one unit. If it saves nothing that can leave, its activations stay."""
        if plan not in self._known:  # kept: asked for again and again, for hundreds of units
            self._known[plan] = self._unit(plan)
        return self._known[plan]

    @cached_property
    def _known(self) -> dict[UnitPlan, UnitPlan]:
        return {}

    def _unit(self, plan: UnitPlan) -> UnitPlan:
        nbytes = self.saved.get(plan.name, 0)
        tier: Tier = self.tier if nbytes else "device"
        policy: Policy = self.policy if plan.name in self.units else "recompute"
        return replace(plan, policy=policy if plan.name else "keep", activations=tier, saved_bytes=nbytes)

    def _pools(self) -> Iterator[Pool]:
        slot_bytes = max(self.saved.values(), default=0)
        counts: Sequence[tuple[Tier, int]] = [("device", 2), *([("host", 3)] if self.tier == "disk" else [])]  # type: ignore[list-item]
        calls = self.footprint.pieces * sum(nbytes > 0 for nbytes in self.saved.values())
        for tier, count in counts if slot_bytes else ():
            num_slots = max(1, min(count, calls - STAY))  # the last ones never leave
            yield Pool(tier=tier, kind="activations", slot_bytes=slot_bytes, num_slots=num_slots)
