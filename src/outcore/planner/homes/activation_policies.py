"""What activations take: on the device, or as units save them elsewhere, and what is left to everything else."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.planner.forward.footprint import STAY, Footprint
from outcore.planner.homes.share import spread
from outcore.spec.budget import Limits
from outcore.spec.plan import POLICIES, AwayTier, Plan, Policy, Pool, Tier, UnitPlan

WORKSPACE_SHARE = 1.03
"""Factor on the bytes that shapes tell: kernels take workspaces of their own."""


def workspace_bytes(footprint: Footprint, units: Iterable[UnitPlan]) -> int:
    """Return the device bytes that a plan is to leave to activations and workspace; 0 if not known.

    Args:
        footprint: The footprint of the largest micro-batch.
        units: The units of the plan.
    """
    return align_up(int(WORKSPACE_SHARE * footprint.peak_bytes(units)), PAGE_BYTES)


class ActivationPolicy(NamedTuple):
    """A way to treat activations: the policy of a share of the units, and the tier where their activations rest."""

    tier: Tier
    policy: Policy
    share: float = 1.0
    """The fraction of the units but the root, spread evenly. The other units are recomputed."""


@dataclass(frozen=True)
class Activations:
    """What activations take of the limits with one way to treat them, and plans with them."""

    nbytes: int = 0
    """Device memory that is left to activations and workspace beside homes and slots."""
    share: float = 0.0
    """The same as a share of the device's limit, where their size is not known."""
    way: ActivationPolicy | None = None
    """None: they stay on the device, and are recomputed."""
    footprint: Footprint | None = None
    """What units save; None: not known."""

    @classmethod
    def of(
        cls, names: Iterable[str], footprint: Footprint | None, share: float, way: ActivationPolicy | None = None
    ) -> Activations:
        """Return what activations take.

        Args:
            names: Names of all units, the root first.
            footprint: The footprint of the largest micro-batch; None if it is not known.
            share: The fraction of the device to leave to activations of unknown size; 0 if its budget does not include
                activations.
            way: As above.
        """
        alone = cls(way=None if footprint is None else way, footprint=footprint)
        if footprint is None or not share:
            return replace(alone, share=share)
        # Homes do not matter here; on the device they need the most beside the plan.
        undecided = (UnitPlan(name=name, weights="device", gradients="device", states="device") for name in names)
        known = workspace_bytes(footprint, map(alone.unit, undecided))
        return replace(alone, nbytes=known, share=0.0 if known else share)

    @cached_property
    def units(self) -> frozenset[str]:
        """The units of the policy's share."""
        names = [] if self.footprint is None or self.way is None else list(self.footprint.saved)
        return frozenset(names[i] for i in spread(range(len(names)), 1.0 if self.way is None else self.way.share))

    @cached_property
    def saved(self) -> Mapping[str, int]:
        """Unit -> bytes that leave the device."""
        if self.footprint is None or self.way is None or self.way.tier == "device":
            return {}
        saved = self.footprint.saved
        return {name: saved[name].of(self.way.policy) for name in saved if name in self.units}

    @cached_property
    def taken(self) -> Mapping[Tier, int]:
        """Tier -> bytes that activations take there if they leave the device: homes, and slots on the way."""
        total: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        if self.footprint is not None and self.way is not None:
            total[self.way.tier] += self.footprint.pieces * sum(self.saved.values())  # nothing on the device
        for pool in self._pools():
            total[pool.tier] += pool.total_bytes
        return total

    def applied(self, plan: Plan) -> Plan:
        """Return the plan with these activations. Args: plan: A plan that was made for what was left."""
        if self.way is None:
            return plan
        return replace(plan, units=tuple(map(self.unit, plan.units)), pools=(*plan.pools, *self._pools()))

    def unit(self, plan: UnitPlan) -> UnitPlan:
        """Return the plan of one unit. If it saves nothing that can leave, its activations stay."""
        if self.way is None:
            return plan
        if plan not in self._known:  # kept: asked for again and again, for hundreds of units
            nbytes = self.saved.get(plan.name, 0)
            tier: Tier = self.way.tier if nbytes else "device"
            policy: Policy = self.way.policy if plan.name in self.units else "recompute"
            policy = policy if plan.name else "keep"
            self._known[plan] = replace(plan, policy=policy, activations=tier, saved_bytes=nbytes)
        return self._known[plan]

    @cached_property
    def _known(self) -> dict[UnitPlan, UnitPlan]:
        return {}

    def _pools(self) -> Iterator[Pool]:
        slot_bytes = max(self.saved.values(), default=0)
        if not slot_bytes or self.footprint is None or self.way is None:
            return
        calls = self.footprint.pieces * sum(nbytes > 0 for nbytes in self.saved.values())
        for tier, count in {"device": 2, **({"host": 3} if self.way.tier == "disk" else {})}.items():
            num_slots = max(1, min(count, calls - STAY))  # the last ones never leave
            yield Pool(tier=cast("Tier", tier), kind="activations", slot_bytes=slot_bytes, num_slots=num_slots)

    def exceeds(self, limits: Limits) -> set[Tier]:
        """Return the tiers on which ``taken`` is already more than there is."""
        return {tier for tier, most in limits.by_tier.items() if self.taken[tier] > most}

    def left(self, limits: Limits) -> Limits:
        """Return what is left of limits for everything else: at least a byte of a tier that is allowed, or taken."""
        taken = self.taken
        left = {t: max(most - taken[t], min(most + taken[t], 1)) for t, most in limits.by_tier.items()}
        disk_bytes = None if limits.disk_bytes is None else left["disk"]
        return Limits(device_bytes=left["device"], host_bytes=left["host"], disk_bytes=disk_bytes)

    def room(self, limits: Limits) -> dict[Tier, int]:
        """Return bytes for everything else. Below 0: activations that leave take more than there is."""
        left = {tier: most - self.taken[tier] for tier, most in limits.by_tier.items()}
        return left | {"device": self.beside(left["device"])}

    def beside(self, device_bytes: int) -> int:
        """Return the bytes that a device with this limit has for the plan."""
        return device_bytes - self.nbytes - int(self.share * device_bytes)

    def limit_for(self, plan_bytes: int) -> int:
        """Return the least limit of the device that leaves so much for the plan."""
        if not self.share:
            return plan_bytes + self.nbytes
        near = int((plan_bytes + self.nbytes) / (1 - self.share))
        off = int(1 / (1 - self.share)) + 1  # rounding moves the limit by this at most
        return bisect.bisect_left(range(near + off), plan_bytes, lo=max(near - off, 0), key=self.beside)


def ways_to(tier: AwayTier, footprint: Footprint, *, may_select: bool = True) -> list[ActivationPolicy]:
    """Return ways to a tier, those that save most first; of two that save the same, the one without a selection.

    Args:
        tier: Where all activations are to rest.
        footprint: The footprint of the largest micro-batch.
        may_select: Whether units may save results that are expensive to compute.
    """
    ways = [ActivationPolicy(tier, policy) for policy in POLICIES if policy != "select" or may_select]
    found = [Activations(way=way, footprint=footprint) for way in ways]
    last = ways[-1:]
    return [one.way for one, next_one in itertools.pairwise(found) if one.way and one.saved != next_one.saved] + last
