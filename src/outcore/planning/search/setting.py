"""What a plan is asked for: a model, a machine, budgets and a batch. Each can be changed, and asked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.planning.homes.sending import Away, Sending, undecided, workspace_bytes
from outcore.planning.search.search import Job
from outcore.planning.timing.profile import Profile, rates_for
from outcore.planning.timing.rates import Rates
from outcore.planning.units.footprint import Footprint
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec


def job_for(
    model: ModelSpec,
    limits: Limits,
    rates: Rates,
    footprint: Footprint | None,
    sending: Sending | None = None,
    *,
    activation_share: float,
) -> Job:
    """What is to be searched, for one micro-batch.

    Args:
        model: Its units.
        limits: The most that a plan may take on each tier.
        rates: Of the machine, with this model.
        footprint: Of a micro-batch; None: not known.
        sending: Which activations leave the device; None: none.
        activation_share: Of the device, to leave to activations where nobody knows what they take.
    """
    workspace = 0
    if footprint is not None and activation_share:
        workspace = workspace_bytes(footprint, undecided((unit.name for unit in model.units), sending))
    return Job(
        model=model,
        limits=limits if sending is None else sending.left(limits),
        rates=rates,
        activation_reserve_bytes=workspace,
        activation_share=0.0 if workspace else activation_share,
        saved={} if footprint is None else footprint.saved,
        sending=sending,
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a plan depends on."""

    model: ModelSpec
    hardware: Hardware
    limits: Limits
    profile_of: Callable[[int], Profile]
    """What a micro-batch of so many sequences computes and saves."""
    batch_size: int
    """Sequences of a micro-batch."""
    seq_len: int
    activation_share: float
    """Of the device, to leave to activations where nobody knows what they take; 0: they are not in its budget."""
    micro_batches: int = 1
    clipping: bool = True
    away: Away | None = None
    """What becomes of activations; None: they stay, and are recomputed where there is no room."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len * self.micro_batches

    @property
    def profile(self) -> Profile:
        """Of a micro-batch."""
        return self.profile_of(self.batch_size)

    def job(self) -> Job:
        """What a search takes."""
        profile = self.profile
        sending = None
        if self.away is not None and profile.footprint is not None:
            sending = self.away.of(profile.footprint)
        rates, share = rates_for(self.hardware, self.model, profile.work), self.activation_share
        job = job_for(self.model, self.limits, rates, profile.footprint, sending, activation_share=share)
        return replace(job, micro_batches=self.micro_batches, is_promised=not self.clipping, clipping=self.clipping)

    def with_limits(self, **limits: int) -> Setting:
        """Other budgets."""
        return replace(self, limits=replace(self.limits, **limits))
