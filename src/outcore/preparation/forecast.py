"""Predicts steps of a plan on a known machine, and finds plans that are faster than the usual one.

[Note: worth it] Predictions are off by some percent. So another plan replaces the usual one only if the fastest one is
predicted to be faster by more than a threshold (``WORTH``), or if the plan that was found writes less to the drive.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from outcore.core.errors import ConfigError, DiskError, MemoryBudgetError
from outcore.planner.forward.footprint import Footprint, as_run
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.homes.pools import LEAST, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.evaluations import Simulated
from outcore.planner.search.job import Job
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import search
from outcore.planner.search.wear import WORTH, takes_more
from outcore.planner.timing.known_hardware import NO_TIMES, named_hardware
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import Simulation, simulate, steps_until_settled
from outcore.probe.measured_machines import Machine
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.schedule import usual_visits

NamedHardware = Hardware | str | Path
"""A machine, a file that describes one, or the names of common parts."""


class Loop(NamedTuple):
    """What the loop does in every step, as far as known."""

    micro_batches: int = 1
    clips: bool = True
    is_promised: bool = False
    """Whether the number of micro-batches is promised. If so, and without clipping, updates may run inside backward."""
    makes_logits: bool = True
    """Whether the logits of the whole micro-batch exist at once. If not, the loss is computed in tiles."""


class DeviceFacts(Protocol):
    """Facts about a device on which plans depend besides rates. The device may be here or elsewhere."""

    @property
    def torch_device(self) -> torch.device:
        """Device with whose kernels shapes are followed."""

    @property
    def has_host_memory(self) -> bool:
        """Whether the device uses the host's memory."""

    @property
    def activation_share(self) -> float:
        """Part of its budget to leave to activations of unknown size; 0 if the budget does not include them."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A model with a micro-batch of known size, on a known machine."""

    model: ModelSpec
    rates: Rates
    loop: Loop
    footprint: Footprint | None
    activation_share: float
    """See ``DeviceFacts``."""
    may_be_plain: bool = False
    """See ``Job``."""
    keeps_what_fits: bool = True
    """Whether calls keep their activations while there is room, where the plan has them recomputed."""
    simulated: Simulated = field(init=False, repr=False, compare=False, default_factory=Simulated)
    """Simulations so far."""

    @property
    def _may_be_early(self) -> bool:
        return self.loop.is_promised and not self.loop.clips

    def job(self, limits: Limits, ways: tuple[ActivationPolicy | None, ...] = (None,)) -> Job:
        """Return the job of a search. Args: ways: What may become of activations; None: they are recomputed."""
        early = self._may_be_early
        return Job(
            model=self.model,
            limits=limits,
            rates=self.rates,
            micro_batches=self.loop.micro_batches,
            is_promised=early,
            clipping=not early,
            activation_share=self.activation_share,
            footprint=self.footprint,
            keeps_what_fits=self.keeps_what_fits,
            may_be_plain=self.may_be_plain,
            ways=ways,
        )

    def simulate(self, plan: Plan) -> Simulation:
        """Predict steps of a plan, with as many kept activations as there is room for."""
        keeps = plan.plain or self.keeps_what_fits
        if plan.plain:  # played like other plans, which need slots
            plan = dataclasses.replace(plan, pools=pools_for(self.model, plan.units, LEAST))
        saved = {} if self.footprint is None or not keeps else self.footprint.saved
        visits = usual_visits(self.model, self.loop.micro_batches)
        run = as_run(plan, saved, plan.kept_bytes // self.model.micro_batches_in_unit)
        circumstances, warm_up = Circumstances(clips=self.loop.clips), steps_until_settled(run)
        return simulate(self.model, run, self.rates, visits, circumstances, warm_up=warm_up)

    def better_than(self, usual: Plan, job: Job) -> tuple[Plan, Candidate | None]:
        """Return a plan that is predicted to be faster, with its candidate; or the usual one. See [Note: worth it].

        Args:
            usual: The usual plan within the limits of the job.
            job: A job of this forecast.
        """
        if not any(unit.trainable for unit in self.model.units):
            return usual, None
        other = usual
        if self._may_be_early and not usual.rests_on_device:
            promised = dataclasses.replace(usual, accumulation_steps=job.micro_batches)
            other = with_early_updates(self.model, promised, job.within(job.ways[0]).left)
        found = search(job, self.simulated)
        now = found.looks.simulation(other, job.ways[0])
        if found.fastest_s >= (1 - WORTH) * now.step_s and not takes_more(now, found.simulation):
            return other, None
        promises = self._may_be_early and not found.plan.rests_on_device
        steps = job.micro_batches if promises else usual.accumulation_steps
        return dataclasses.replace(found.plan, accumulation_steps=steps), found.candidate


def token_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch of token IDs. Args: rows: Number of sequences. length: Tokens of each."""
    ids = torch.zeros(rows, length, dtype=torch.long, device="cpu")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def hardware_for(
    named: NamedHardware | None, device: DeviceFacts, paths: Sequence[str] | None, *, may_measure: bool
) -> Hardware | None:
    """Return the named machine, or this one: from a kept measurement, else measured quickly, with a warning.

    Args:
        named: The user's choice; None: that of ``OUTCORE_HARDWARE`` in the environment.
        device: The device that will compute.
        paths: Folders of the disk tier; None: the latest measurement with any drives, else one without.
        may_measure: Measure this machine now if there is no kept measurement.

    Returns:
        The machine. None, with a warning, if this machine cannot be measured; None if it may not be, or if times are
        not wanted.

    Raises:
        ConfigError: The name is no machine, or the machine has no disk although there is a disk tier.
    """
    found = asked_hardware(named)
    if found == NO_TIMES:
        return None
    if isinstance(found, Hardware):
        if paths and found.disk is None:
            raise ConfigError(
                f"hardware: expected a machine with a disk, since there is a disk tier, but '{found.name}' has none; "
                "measure it with outcore probe --disk-dir, or leave the disk out of the budget"
            )
        return found
    machine = Machine(device.torch_device, tuple(map(Path, paths or ())))
    with_a_disk = machine.kept_with_a_disk() if paths is None else None
    if with_a_disk is not None:
        return with_a_disk.hardware
    return _at_hand(machine, may_measure=may_measure)


def asked_hardware(named: NamedHardware | None) -> Hardware | str | None:
    """Return the machine that is named here or in the environment, NO_TIMES, or None for this one. Nothing is measured.

    Raises:
        ConfigError: The name is no machine.
    """
    named = os.environ.get("OUTCORE_HARDWARE") or None if named is None else named
    if named is None or isinstance(named, Hardware) or named == NO_TIMES:
        return named
    if not isinstance(named, str | Path):
        raise ConfigError(
            f"hardware: expected a JSON file, names of parts, 'none', or None for this machine, but got {named!r}"
        )
    return named_hardware(named)


def _at_hand(machine: Machine, *, may_measure: bool) -> Hardware | None:
    if not may_measure:
        kept = machine.kept()
        return None if kept is None else kept.hardware
    try:
        return machine.at_hand()
    except (DiskError, MemoryBudgetError) as error:
        warnings.warn(
            f"the plan was made without predicted times, since this machine cannot be measured: {error}", stacklevel=2
        )
        return None
