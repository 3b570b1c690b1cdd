"""What a planner is asked: a model, a machine, limits, a batch, and what the loop does in a step.

Any of them can be replaced to ask again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from outcore.planner.forward.footprint import Footprint, SavedBytes, as_run
from outcore.planner.homes.activation_policies import ActivationPolicy, Activations
from outcore.planner.homes.check import can_be_plain
from outcore.planner.homes.pools import LEAST, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.profile import Profile, rates_for
from outcore.planner.timing.rank_layout import ALONE, Ranks
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import Simulation, simulate, steps_until_settled
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Tier
from outcore.spec.schedule import usual_visits

UNLIMITED = Limits(device_bytes=2**62, host_bytes=2**62, disk_bytes=2**62)
"""The limits of a question whose plan is given."""


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """What is trained, how, and within which limits. See ``search.Found`` for the answer."""

    model: ModelSpec
    machine: Hardware | Rates | None = None
    """The hardware of a node, or rates that are known already; None: times are not known."""
    limits: Limits = UNLIMITED
    """The limits of a rank."""
    profile_of: Callable[[int], Profile] = field(default=lambda _: Profile({}, None), compare=False)
    """Samples of a micro-batch -> what it computes and saves."""
    batch_size: int = 1
    """Samples of a micro-batch."""
    seq_len: int | None = None
    """Tokens of a sample; None: it has none."""
    micro_batches: int = 1
    clipping: bool = True
    """False promises the number of micro-batches as well, so that updates inside backward are possible."""
    activation_share: float = 0.0
    """The fraction of the device to leave to activations of unknown size; 0 if its budget does not include them."""
    keeps_what_fits: bool = True
    """Whether calls keep what they save while there is room, where the plan has them recomputed."""
    may_be_plain: bool = False
    """Whether a run makes a plan plain if it can be: [Note: plain plans] in ``homes.check``."""
    ways: tuple[ActivationPolicy | None, ...] = (None,)
    """What may become of activations (None: they stay, and are recomputed). The first is that of the rule's plan."""
    in_bf16: bool = False
    """Whether the loop computes in bf16 whatever the dtype of the weights, as under autocast."""
    ranks: Ranks = ALONE
    """The ranks that train together. Batch size and micro-batches are per rank."""

    @property
    def tokens(self) -> int:
        """Tokens of a step of all ranks; samples where there are no tokens."""
        return self.batch_size * (self.seq_len or 1) * self.micro_batches * self.ranks.size

    @property
    def promised_steps(self) -> int | None:
        """Micro-batches of a step if their number is promised, else None."""
        return None if self.clipping else self.micro_batches

    @functools.cached_property
    def rates(self) -> Rates:
        """How fast the machine is with the model. Raises: ConfigError: It does not compute in this precision."""
        if isinstance(self.machine, Rates):
            return self.machine
        if self.machine is None:
            raise AssertionError("rates are asked of a machine that is not known")
        work = self.profile_of(self.batch_size).work
        return rates_for(self.machine, self.model, work, in_bf16=self.in_bf16, ranks=self.ranks)

    @functools.cached_property
    def footprint(self) -> Footprint | None:
        """Footprint of a micro-batch; None if it is not known."""
        return self.profile_of(self.batch_size).footprint

    @functools.cached_property
    def saved(self) -> Mapping[str, SavedBytes]:
        """What a call of each unit saves; empty if that is not known, or not kept while there is room."""
        return {} if self.footprint is None or not self.keeps_what_fits else self.footprint.saved

    @functools.cached_property
    def activations(self) -> Callable[[ActivationPolicy | None], Activations]:
        """A way with activations -> what they take of the limits."""
        names, share = [unit.name for unit in self.model.units], self.activation_share
        return functools.cache(lambda way: Activations.of(names, self.footprint if share or way else None, share, way))

    def with_limits(self, **limits: int) -> PlanQuestion:
        """Return the question with other limits."""
        return replace(self, limits=replace(self.limits, **limits))

    def room(self, way: ActivationPolicy | None) -> dict[Tier, int]:
        """Return the bytes that a way with activations leaves to everything else: see ``Activations.room``."""
        return self.activations(way).room(self.limits)

    def as_run(self, plan: Plan, way: ActivationPolicy | None) -> Plan:
        """Add the activations that leave, and those that there is room to keep. Args: plan: A plan without either."""
        activations, saved = self.activations(way), self.saved
        run = activations.applied(plan)
        left = self.limits.device_bytes - activations.taken["device"] - activations.nbytes - plan.tier_bytes["device"]
        if self.may_be_plain and can_be_plain(self.model, run):
            saved = {} if self.footprint is None else self.footprint.saved
            # Slots for what moves or changes its form are left out: see ``with_room``.
            left += sum(p.total_bytes for p in plan.pools if p.tier == "device" and p.kind != "temporary")
            run = replace(run, plain=True, accumulation_steps=None)
        return as_run(run, saved, max(left, 0) // self.model.micro_batches_in_unit)

    def predict(self, plan: Plan) -> Simulation:
        """Predict steps of a plan that was chosen, with as many kept activations as it has room for."""
        keeps = plan.plain or self.keeps_what_fits
        if plan.plain:  # played like other plans, which need slots
            plan = replace(plan, pools=pools_for(self.model, plan.units, LEAST))
        saved = {} if self.footprint is None or not keeps else self.footprint.saved
        run = as_run(plan, saved, plan.kept_bytes // self.model.micro_batches_in_unit)
        visits, circumstances = usual_visits(self.model, self.micro_batches), Circumstances(clips=self.clipping)
        return simulate(self.model, run, self.rates, visits, circumstances, warm_up=steps_until_settled(run))
