"""What steps of a plan would take, and a plan that takes less than the usual one, where the machine is known.

[Note: worth it] A prediction is off by some percent. The usual plan is left only for one that is predicted to be faster
by more than that.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from outcore.core.errors import ConfigError, DiskError, MemoryBudgetError
from outcore.device.device import Device
from outcore.planning.homes.early import with_early_updates
from outcore.planning.homes.pools import LEAST, pools_for
from outcore.planning.paper.schedule import Circumstances, usual_visits
from outcore.planning.search.search import Job, search
from outcore.planning.timing.counted import counted_work
from outcore.planning.timing.known_hardware import known_hardware
from outcore.planning.timing.profile import rates_for
from outcore.planning.timing.rates import Rates
from outcore.planning.timing.simulate import Simulation, simulate
from outcore.planning.units.activations import footprint_of
from outcore.planning.units.footprint import Saved
from outcore.planning.units.partition import Partition
from outcore.probe.kept import Machine
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.plan import Plan

NamedHardware = Hardware | str | Path
"""A machine, a file that describes one, or names of parts that many have."""
NO_TIMES = "none"
"""In place of a machine: plans are made without times, and nothing is measured."""
WORTH = 0.03
"""See [Note: worth it]."""


class Loop(NamedTuple):
    """What the loop does with every step, as far as it is known."""

    micro_batches: int = 1
    clips: bool = True
    is_promised: bool = False
    """The number of micro-batches is: without clipping, updates may run inside backward."""
    makes_logits: bool = True
    """Of the whole micro-batch at once; else the loss is worked out in tiles."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A model with a micro-batch of known size, on a known machine."""

    cut: Partition
    sample: Mapping[str, Any]
    device: Device
    rates: Rates
    loop: Loop

    @classmethod
    def of(
        cls, cut: Partition, sample: Mapping[str, Any], device: Device, hardware: Hardware, loop: Loop
    ) -> Self | None:
        """Count what the model computes.

        Returns:
            None, with a warning, if the model cannot be followed on shapes alone.
        """
        try:
            work = counted_work(cut, sample, device.torch_device)
        except ConfigError as error:
            warnings.warn(f"the plan was made without predicted times: {error}", stacklevel=2)
            return None
        rates = rates_for(hardware, cut.spec, work)
        return cls(cut=cut, sample=sample, device=device, rates=rates, loop=loop)

    def simulate(self, plan: Plan) -> Simulation:
        """Steps of a plan, with the activations that there is room to keep."""
        return self._simulate(self._with_kept(plan))

    def better_than(self, usual: Plan, limits: Limits, workspace_bytes: int) -> Plan:
        """A plan that is predicted to be faster, or the usual one. See [Note: worth it].

        Args:
            usual: For the same limits.
            limits: The most that a plan may take on each tier.
            workspace_bytes: To leave of the device to activations and workspace; 0: the usual share.
        """
        spec, loop = self.cut.spec, self.loop
        if not any(unit.trainable for unit in spec.units) or usual.rests_on_device:
            return usual
        may_be_early = loop.is_promised and not loop.clips
        if may_be_early:
            usual = with_early_updates(spec, dataclasses.replace(usual, accumulation_steps=loop.micro_batches), limits)
        job = Job(
            model=spec,
            limits=limits,
            rates=self.rates,
            micro_batches=loop.micro_batches,
            is_promised=may_be_early,
            clipping=not may_be_early,
            activation_reserve_bytes=workspace_bytes,
            activation_share=0.0 if workspace_bytes else self.device.activation_share,
        )
        found = search(job)
        if found.simulation.step_s >= (1 - WORTH) * self._simulate(usual).step_s:
            return usual
        return dataclasses.replace(found.plan, accumulation_steps=usual.accumulation_steps)

    def _simulate(self, plan: Plan) -> Simulation:
        visits = usual_visits(self.cut.spec, self.loop.micro_batches)
        return simulate(self.cut.spec, plan, self.rates, visits, Circumstances(clips=self.loop.clips))

    @functools.cached_property
    def _saved(self) -> Mapping[str, Saved]:
        return footprint_of(self.cut, self.sample, self.device.torch_device).saved

    def _with_kept(self, plan: Plan) -> Plan:
        """Units as a run recomputes them: those that come first in forward take the room."""
        if plan.plain:  # runs as others do for which slots are there
            plan = dataclasses.replace(plan, plain=False, pools=pools_for(self.cut.spec, plan.units, LEAST))
        left = plan.kept_bytes
        saved = self._saved if left else {}
        units = []
        for unit in plan.units:
            nbytes = saved[unit.name].keep if unit.name in saved else left + 1
            fits = unit.policy == "recompute" and nbytes <= left
            left -= nbytes if fits else 0
            units.append(dataclasses.replace(unit, policy="keep") if fits else unit)
        return dataclasses.replace(plan, units=tuple(units))


def hardware_for(
    named: NamedHardware | None, device: Device, paths: Sequence[str], *, may_measure: bool
) -> Hardware | None:
    """The machine that was named, or this one: as it was measured before, or else measured quickly, which is said.

    Args:
        named: What the user says; None: what ``OUTCORE_HARDWARE`` in the environment says.
        device: That will compute.
        paths: Folders of the disk tier.
        may_measure: Now, where it was not before.

    Returns:
        None, with a warning, if this machine cannot be measured; None if it may not, or if none is wanted.

    Raises:
        ConfigError: What was named is no machine, or one without a disk where there is a disk tier.
    """
    named = os.environ.get("OUTCORE_HARDWARE") or None if named is None else named
    if named == NO_TIMES:
        return None
    if named is not None:
        found = named if isinstance(named, Hardware) else named_hardware(named)
        if paths and found.disk is None:
            raise ConfigError(
                f"hardware: expected a machine with a disk, since there is a disk tier, but '{found.name}' has none; "
                "measure it with outcore probe --disk-dir, or leave the disk out of the budget"
            )
        return found
    machine = Machine(device.torch_device, tuple(map(Path, paths)))
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


def named_hardware(named: str | Path) -> Hardware:
    """A machine by its file or by the names of its parts.

    Raises:
        ConfigError: No machine.
    """
    is_file = isinstance(named, Path) or named.endswith(".json") or Path(named).is_file()
    return Hardware.load(named) if is_file else known_hardware(str(named))
