"""What a plan is asked for: a model, a machine, budgets and a batch. Each can be changed, and asked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.planning.homes.sending import Away
from outcore.planning.search.job import Job
from outcore.planning.timing.profile import Profile, rates_for
from outcore.planning.timing.ranks import ALONE, Ranks
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a plan depends on."""

    model: ModelSpec
    hardware: Hardware
    """Of a node."""
    limits: Limits
    """Of a rank."""
    profile_of: Callable[[int], Profile]
    """What a micro-batch of so many sequences computes and saves."""
    batch_size: int
    """Sequences of a micro-batch."""
    seq_len: int
    activation_share: float
    """Of the device, to leave to activations where nobody knows what they take; 0: they are not in its budget."""
    micro_batches: int = 1
    clipping: bool = True
    ways: tuple[Away | None, ...] = (None,)
    """What may become of activations: see ``Job``."""
    ranks: Ranks = ALONE
    """That train together. Batches are those of each."""

    @property
    def tokens(self) -> int:
        """Of a step of all ranks."""
        return self.batch_size * self.seq_len * self.micro_batches * self.ranks.size

    @property
    def profile(self) -> Profile:
        """Of a micro-batch."""
        return self.profile_of(self.batch_size)

    def job(self) -> Job:
        """What a search takes."""
        profile = self.profile
        return Job(
            model=self.model,
            limits=self.limits,
            rates=rates_for(self.hardware, self.model, profile.work, ranks=self.ranks),
            micro_batches=self.micro_batches,
            is_promised=not self.clipping,
            clipping=self.clipping,
            activation_share=self.activation_share,
            footprint=profile.footprint,
            ways=self.ways,
        )

    def with_limits(self, **limits: int) -> Setting:
        """Other budgets."""
        return replace(self, limits=replace(self.limits, **limits))
