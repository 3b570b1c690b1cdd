"""What activations take: on the device, or as units save them elsewhere, and what is left to everything else."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

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
        units: The units of the plan, or of ``undecided``.
    """
    return align_up(int(WORKSPACE_SHARE * footprint.peak_bytes(units)), PAGE_BYTES)


def undecided(names: Iterable[str], sending: SizedActivationPolicy | None) -> list[UnitPlan]:
    """Return units whose activations alone are decided, with homes that need the most of the device beside the plan.

    Args:
        names: Names of all units, the root first.
        sending: What becomes of activations; None if they stay, and are recomputed.
    """
    units = [UnitPlan(name=name, weights="device", gradients="device", states="device") for name in names]
    return units if sending is None else [sending.unit(unit) for unit in units]


class ActivationPolicy(NamedTuple):
    """A way to treat activations: the policy of a share of the units, and the tier where their activations rest."""

    tier: Tier
    policy: Policy
    share: float = 1.0

    def of(self, footprint: Footprint) -> SizedActivationPolicy:
        """Return the same for a micro-batch of known footprint."""
        return SizedActivationPolicy(self.tier, self.policy, footprint, self.share)


@dataclass(frozen=True)
class SizedActivationPolicy:
    """What a share of the units saves, and where that rests. The other units are recomputed."""

    tier: Tier
    policy: Policy
    footprint: Footprint
    share: float = 1.0
    """The fraction of the units but the root, spread evenly."""

    @property
    def away(self) -> ActivationPolicy:
        """The same without the footprint."""
        return ActivationPolicy(self.tier, self.policy, self.share)

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


def sendings(tier: AwayTier, footprint: Footprint, *, may_select: bool = True) -> list[SizedActivationPolicy]:
    """Return ways to a tier, those that save most first; of two that save the same, the one without a selection.

    Args:
        tier: Where all activations are to rest.
        footprint: The footprint of the largest micro-batch.
        may_select: Whether units may save results that are dear to compute.
    """
    found = [SizedActivationPolicy(tier, policy, footprint) for policy in POLICIES if policy != "select" or may_select]
    return [one for one, next_one in itertools.pairwise(found) if one.saved != next_one.saved] + found[-1:]


class DeviceRoom(NamedTuple):
    """Device memory that is left to activations and workspace: a number of bytes, and a share of the device's limit."""

    nbytes: int = 0
    share: float = 0.0

    def beside(self, device_bytes: int) -> int:
        """Return the bytes that a device with this limit has for the plan."""
        return device_bytes - self.nbytes - int(self.share * device_bytes)

    def limit_for(self, plan_bytes: int) -> int:
        """Return the least limit that leaves so much for the plan."""
        if not self.share:
            return plan_bytes + self.nbytes
        near = int((plan_bytes + self.nbytes) / (1 - self.share))
        off = int(1 / (1 - self.share)) + 1  # rounding moves the limit by this at most
        return bisect.bisect_left(range(near + off), plan_bytes, lo=max(near - off, 0), key=self.beside)


@dataclass(frozen=True)
class Activations:
    """What activations take of the limits, with one way to treat them."""

    room: DeviceRoom
    sending: SizedActivationPolicy | None = None
    """None: they stay on the device."""

    @classmethod
    def of(
        cls,
        names: Iterable[str],
        footprint: Footprint | None,
        share: float,
        sending: SizedActivationPolicy | None = None,
    ) -> Activations:
        """Return what activations take.

        Args:
            names: Names of all units, the root first.
            footprint: The footprint of the largest micro-batch; None if it is not known.
            share: The fraction of the device to leave to activations of unknown size; 0 if its budget does not include
                activations.
            sending: As above.
        """
        known = workspace_bytes(footprint, undecided(names, sending)) if footprint is not None and share else 0
        return cls(DeviceRoom(known, 0.0 if known else share), sending)

    @cached_property
    def taken(self) -> Mapping[Tier, int]:
        """Tier -> bytes that activations take there if they leave the device: homes, and slots on the way."""
        return {"device": 0, "host": 0, "disk": 0} if self.sending is None else self.sending.taken

    def exceeds(self, limits: Limits) -> set[Tier]:
        """Return the tiers on which ``taken`` is already more than there is."""
        return {tier for tier, most in limits.by_tier.items() if self.taken[tier] > most}

    def left(self, limits: Limits) -> Limits:
        """Return what is left of limits for everything else: at least a byte of a tier that is allowed, or taken."""
        taken = self.taken
        left = {t: max(most - taken[t], min(most + taken[t], 1)) for t, most in limits.by_tier.items()}
        disk_bytes = None if limits.disk_bytes is None else left["disk"]
        return Limits(device_bytes=left["device"], host_bytes=left["host"], disk_bytes=disk_bytes)
