"""All that a plan depends on: a model, a machine, budgets and a batch. Any of them can be changed to ask again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.timing.profile import Profile, rates_for
from outcore.planner.timing.rank_layout import ALONE, Ranks
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The inputs of a plan."""

    model: ModelSpec
    hardware: Hardware
    """The hardware of a node."""
    limits: Limits
    """The limits of a rank."""
    profile_of: Callable[[int], Profile]
    """Samples of a micro-batch -> what it computes and saves."""
    batch_size: int
    """Samples of a micro-batch."""
    seq_len: int | None
    """Tokens of a sample; None: it has none."""
    activation_share: float
    """The fraction of the device to leave to activations of unknown size; 0 if its budget does not include them."""
    micro_batches: int = 1
    clipping: bool = True
    keeps_what_fits: bool = True
    """See ``PlanQuestion``."""
    ways: tuple[ActivationPolicy | None, ...] = (None,)
    """What may become of activations: see ``PlanQuestion``."""
    may_be_plain: bool = True
    """See ``PlanQuestion``."""
    in_bf16: bool = False
    """Whether the loop computes in bf16 whatever the dtype of the weights, as under autocast."""
    ranks: Ranks = ALONE
    """The ranks that train together. Batch size and micro-batches are per rank."""

    @property
    def tokens(self) -> int:
        """Tokens of a step of all ranks; samples where there are no tokens."""
        return self.batch_size * (self.seq_len or 1) * self.micro_batches * self.ranks.size

    @property
    def profile(self) -> Profile:
        """The profile of a micro-batch."""
        return self.profile_of(self.batch_size)

    def job(self) -> PlanQuestion:
        """Return the job for a search."""
        profile = self.profile
        return PlanQuestion(
            model=self.model,
            limits=self.limits,
            rates=rates_for(self.hardware, self.model, profile.work, in_bf16=self.in_bf16, ranks=self.ranks),
            micro_batches=self.micro_batches,
            is_promised=not self.clipping,
            clipping=self.clipping,
            activation_share=self.activation_share,
            footprint=profile.footprint,
            keeps_what_fits=self.keeps_what_fits,
            may_be_plain=self.may_be_plain,
            ways=self.ways,
        )

    def with_limits(self, **limits: int) -> Setting:
        """Return the setting with other limits."""
        return replace(self, limits=replace(self.limits, **limits))
