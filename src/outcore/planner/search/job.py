"""What a search is to plan for, and what each way with activations leaves to everything else."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from outcore.planner.forward.footprint import Footprint, SavedBytes, as_run
from outcore.planner.homes.activation_policies import ActivationPolicy, Activations
from outcore.planner.homes.check import can_be_plain
from outcore.planner.timing.rates import Rates
from outcore.spec.budget import Limits
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Policy, Tier


class Within(NamedTuple):
    """What one way with activations leaves to everything else."""

    limits: Limits
    """The job's limits."""
    activations: Activations

    @property
    def left(self) -> Limits:
        """The limits without what activations take that leave the device."""
        return self.activations.left(self.limits)

    @property
    def room(self) -> dict[Tier, int]:
        """Bytes for everything else. Below 0: activations that leave the device take more than there is."""
        left = {tier: most - self.activations.taken[tier] for tier, most in self.limits.by_tier.items()}
        return left | {"device": self.activations.room.beside(left["device"])}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, how, and within which limits."""

    model: ModelSpec
    limits: Limits
    rates: Rates
    micro_batches: int = 1
    is_promised: bool = False
    """Whether the number of micro-batches is promised, so that updates inside backward are possible."""
    clipping: bool = True
    policy: Policy = "recompute"
    activation_share: float = 0.0
    """The fraction of the device to leave to activations of unknown size; 0 if its budget does not include them."""
    footprint: Footprint | None = None
    """Footprint of a micro-batch; None if it is not known."""
    keeps_what_fits: bool = True
    """Whether calls keep what they save while there is room."""
    may_be_plain: bool = False
    """Whether a run makes a plan plain if it can be: [Note: plain plans] in ``homes.check``."""
    ways: tuple[ActivationPolicy | None, ...] = (None,)
    """What may become of activations (None: they stay, and are recomputed). The first is that of the rule's plan."""

    @functools.cached_property
    def saved(self) -> Mapping[str, SavedBytes]:
        """What a call of each unit saves; empty if that is not known, or not kept while there is room."""
        return {} if self.footprint is None or not self.keeps_what_fits else self.footprint.saved

    @functools.cached_property
    def _known(self) -> dict[ActivationPolicy | None, Within]:
        return {}

    def within(self, away: ActivationPolicy | None) -> Within:
        """Return what a way with activations leaves to everything else."""
        if away not in self._known:
            self._known[away] = self._left(away)
        return self._known[away]

    def _left(self, away: ActivationPolicy | None) -> Within:
        footprint, names = self.footprint, (unit.name for unit in self.model.units)
        sending = None if away is None or footprint is None else away.of(footprint)
        return Within(self.limits, Activations.of(names, footprint, self.activation_share, sending))

    def as_run(self, plan: Plan, away: ActivationPolicy | None) -> Plan:
        """Add the activations that leave, and those that there is room to keep. Args: plan: A plan without either."""
        within, saved = self.within(away), self.saved
        sending, room = within.activations.sending, within.activations.room
        run = plan if sending is None else sending.applied(plan)
        left = self.limits.device_bytes - within.activations.taken["device"] - room.nbytes - plan.tier_bytes["device"]
        if self.may_be_plain and can_be_plain(self.model, run):
            saved = {} if self.footprint is None else self.footprint.saved
            # Slots for what moves or changes its form are left out: see ``with_room``.
            left += sum(p.total_bytes for p in plan.pools if p.tier == "device" and p.kind != "temporary")
            run = replace(run, plain=True, accumulation_steps=None)
        return as_run(run, saved, max(left, 0) // self.model.micro_batches_in_unit)
