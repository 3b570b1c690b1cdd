"""What a plan is asked for: a model, a machine, budgets and a batch. Each can be changed, and asked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outcore.planning.search.search import Job
from outcore.planning.timing.profile import UnitWork, activation_bytes, rates_for
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec

ACTIVATION_SHARE = 0.3
"""Of an accelerator's budget, left to activations as in a run; where they take more, as much as that."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a plan depends on."""

    model: ModelSpec
    hardware: Hardware
    limits: Limits
    work: Mapping[str, UnitWork]
    """Of each unit over one micro-batch."""
    batch_size: int
    """Sequences of a micro-batch."""
    seq_len: int
    micro_batches: int = 1
    clipping: bool = True

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len * self.micro_batches

    @property
    def activation_bytes(self) -> int:
        """Device bytes left to activations: a share, or as much as they take if that is more."""
        if not self.hardware.device.runs_ahead:
            return 0
        return max(int(ACTIVATION_SHARE * self.limits.device_bytes), int(activation_bytes(self.work)))

    def job(self) -> Job:
        """What a search takes."""
        share = ACTIVATION_SHARE if self.hardware.device.runs_ahead else 0.0
        return Job(
            model=self.model,
            limits=self.limits,
            rates=rates_for(self.hardware, self.model, self.work),
            micro_batches=self.micro_batches,
            is_promised=not self.clipping,
            clipping=self.clipping,
            activation_share=share,
            activation_reserve_bytes=max(0, self.activation_bytes - int(share * self.limits.device_bytes)),
        )

    def with_batch(self, batch_size: int) -> Setting:
        """Other micro-batches."""
        factor = batch_size / self.batch_size
        work = {name: each.times(factor) for name, each in self.work.items()}
        return replace(self, work=work, batch_size=batch_size)

    def with_limits(self, **limits: int) -> Setting:
        """Other budgets."""
        return replace(self, limits=replace(self.limits, **limits))
