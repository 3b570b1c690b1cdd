"""Chooses the plan of a run from the user's arguments and what is free on this machine."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from outcore.core.errors import ConfigError
from outcore.device.device import Device
from outcore.memory.machine import disk_free_bytes, host_free_bytes
from outcore.model.casts import Autocast
from outcore.model.partition import Partition
from outcore.planner.forward.footprint import Footprint
from outcore.planner.forward.saved_bytes import footprint_of
from outcore.planner.homes.activation_policies import ActivationPolicy, Activations, ways_to, workspace_bytes
from outcore.planner.homes.check import check_plan, room_bytes, with_room
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.homes.placement import fitting, refusal
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import better_than
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.profile import Profile, UnitWork, rates_for
from outcore.planner.timing.rank_layout import ALONE, Ranks
from outcore.planner.timing.simulate import Simulation
from outcore.preparation.forecast import DeviceFacts, Loop, asked_hardware, hardware_for
from outcore.preparation.prepare_options import Options, tier_of_activations
from outcore.probe.kept_blocks import runs_here, with_times
from outcore.spec.budget import Budget, Limits
from outcore.spec.hardware import Hardware
from outcore.spec.plan import AwayTier, Plan, UnitPlan

_DEVICE_SHARE = 0.9  # of free memory, if there is no budget: the rest is for the driver and fragmentation
_HOST_SHARE = 0.8
_BESIDE_BYTES, _BESIDE_UNITS = 64 * 2**20, 4
"""Host memory that each of several ranks takes beside its budget, and that those shares would not cover: bytes for its
threads and libraries and, on the CPU, fresh gradients of a unit, as a multiple of its weights."""


def choose_plan(cut: Partition, options: Options, device: Device, timed: Timed) -> Plan:
    """Return the given plan if it can be followed, or search a plan within the budget.

    Args:
        cut: The model.
        options: The user's arguments.
        device: The device that will compute.
        timed: Predictions for the same model and options.

    Raises:
        ConfigError: An argument cannot be used, or the plan is for another model.
        PlanInfeasibleError: The budget does not suffice.
    """
    return plan_within(limits_of(options.budget, device), cut, options, device, timed)


def plan_within(limits: Limits, cut: Partition, options: Options, device: Device, timed: Timed) -> Plan:
    """``choose_plan`` within given limits."""
    if options.hardware is not None:
        asked_hardware(options.hardware)  # a wrong name is refused also where no times are needed
    if options.plan is None:
        return Planner(cut, options, device, limits, timed).placed().plan
    if options.activations is not None:
        raise ConfigError(
            "activations: expected it without plan=, which says where activations rest, but got both; leave one out"
        )
    promised, given = options.plan.accumulation_steps, options.accumulation_steps
    if given is not None and promised != given:
        raise ConfigError(
            f"prepare: expected the accumulation_steps that the plan was made for ({promised}), but got {given}; "
            "leave it out, or make the plan again"
        )
    check_plan(cut.spec, options.plan, limits)
    if options.compile is not False and any(unit.policy == "select" for unit in options.plan.units):
        raise ConfigError(
            "compile: expected a plan without the policy 'select', under which compiled code would round differently; "
            "leave compile out, or give these units the policy 'keep' or 'recompute'"
        )
    if options.plan.plain and not options.clipping:
        raise ConfigError(
            "prepare: expected clipping=True with a plan that leaves gradients to autograd (plain), but got False; "
            "set plain to false in the plan, or make the plan again"
        )
    room = min(options.plan.kept_bytes, room_bytes(cut.spec, options.plan, limits))
    return dataclasses.replace(options.plan, kept_bytes=room)


class Timed:
    """Predicts plans of a run in time. What the model computes and saves is worked out once, at the first use."""

    def __init__(
        self,
        cut: Partition,
        options: Options,
        device: DeviceFacts,
        *,
        profile: Profile | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Args: as for ``choose_plan``. profile: Of the sample; None: follow the model. ranks: All that train."""
        self._cut, self._options, self._device, self._profile = cut, options, device, profile
        self._ranks = ranks
        self._known: PlanQuestion | None = None

    def turn_to(self, cut: Partition) -> None:
        """Predict from now on for another way in which ranks share weights. Args: cut: The model with that sharing."""
        self._cut = cut
        self._known = None if self._known is None else dataclasses.replace(self._known, model=cut.spec)

    def predict(self, plan: Plan) -> Simulation | None:
        """Predict steps of a plan; None if the micro-batch or the machine is not known."""
        forecast = self.forecast(may_measure=not plan.rests_on_device)
        return None if forecast is None else forecast.predict(plan)

    def forecast(self, *, may_measure: bool = True) -> PlanQuestion | None:
        """Return what is asked, without limits; None if micro-batch or machine are not known.

        Args: may_measure: See ``hardware_for``.
        """
        if self._known is None:
            self._known = self._make(may_measure=may_measure)
        return self._known

    def _make(self, *, may_measure: bool) -> PlanQuestion | None:
        options, device, spec = self._options, self._device, self._cut.spec
        if options.sample is None:
            return None
        autocast = Autocast.now(device.torch_device)
        with autocast.off():  # since the machine may be measured now
            hardware = hardware_for(options.hardware, device, options.budget.paths, may_measure=may_measure)
        work = None if hardware is None else self._work(hardware)
        if hardware is None or work is None:
            return None
        steps = options.accumulation_steps
        loop = options.loop or Loop(steps or 1, clips=options.clipping, is_promised=steps is not None)
        return PlanQuestion(
            model=spec,
            rates=rates_for(hardware, spec, work, in_bf16=autocast.is_on, ranks=self._ranks),
            micro_batches=loop.micro_batches,
            is_promised=loop.is_promised,
            clipping=loop.clips,
            activation_share=device.activation_share,
            footprint=self.footprint,
            keeps_what_fits=self.keeps_what_fits,
            may_be_plain=options.clipping and steps is None,
        )

    @property
    def keeps_what_fits(self) -> bool:
        """Whether calls keep what fits in a plan that is not plain. False under autocast with its cache of casts.

        See docs/explanation/activations.md, Keep what fits.
        """
        return not (Autocast.now(self._device.torch_device).is_on and torch.is_autocast_cache_enabled())

    def _work(self, hardware: Hardware) -> Mapping[str, UnitWork] | None:
        """Return the work of units; None, with a warning, if the model cannot be followed on shapes alone."""
        if self._profile is not None:
            return self._profile.work
        sample, device, is_compiled = self._options.sample or {}, self._device, self._options.compile is not False
        try:
            work = counted_work(self._cut, sample, device.torch_device)
        except ConfigError as error:
            warnings.warn(f"the plan was made without predicted times: {error}", stacklevel=2)
            return None
        if is_compiled or not isinstance(device, Device) or not runs_here(self._cut, hardware, device.torch_device):
            return work
        return with_times(work, self._cut, sample, device, hardware)

    @functools.cached_property
    def footprint(self) -> Footprint | None:
        """Footprint of the sample. None if there is no sample, or if it cannot be followed (a warning if it matters).

        Raises:
            ConfigError: The model cannot be followed, and the user wants activations on another tier.
        """
        options, device = self._options, self._device
        if self._profile is not None or options.sample is None:
            return None if self._profile is None else self._profile.footprint
        makes_logits = options.loop is None or options.loop.makes_logits
        try:
            return footprint_of(self._cut, options.sample, device.torch_device, makes_logits=makes_logits)
        except ConfigError as error:
            if options.activations is not None:
                raise
            if device.activation_share:
                warnings.warn(
                    f"the plan leaves {device.activation_share:.0%} of the device to activations, since their size "
                    f"is not known: {error}",
                    stacklevel=2,
                )
            return None


class PlacedPlan(NamedTuple):
    """A plan, and how it came about."""

    plan: Plan
    bare: Plan
    """The plan without the activations that leave."""
    candidate: Candidate | None
    """Short description of the plan; None if it is the rule's."""
    way: ActivationPolicy | None
    """What units save and where that rests; None: activations stay, and are recomputed."""
    rule: ActivationPolicy | None
    """The same of the rule's plan."""


class Planner:
    """Finds the plan of one model within given limits."""

    def __init__(self, cut: Partition, options: Options, device: DeviceFacts, limits: Limits, timed: Timed) -> None:
        """Args: options: Options without a plan."""
        self._cut, self._options, self._device, self._limits, self._timed = cut, options, device, limits, timed
        self._tier = tier_of_activations(options)
        is_asked = self._tier is not None or device.activation_share > 0
        self._footprint = timed.footprint if is_asked else None

    def placed(self) -> PlacedPlan:
        """Find a plan. Activations rest where the user wants them, else where the predicted step is shortest."""
        usual = self.usual()
        away = [] if self._tier is not None else [*self._selected(), *self._anywhere()]
        return self._searched(usual, away)._replace(rule=usual.way)

    def usual(self) -> PlacedPlan:
        """Return the rule's plan, without a search for a faster one. Raises: PlanInfeasibleError: Nothing fits."""
        return self._first_fitting(self._ways(self._tier) if self._tier is not None else [None, *self._anywhere()])

    def _searched(self, usual: PlacedPlan, others: Sequence[ActivationPolicy]) -> PlacedPlan:
        """Return the fastest plan. Args: usual: The rule's plan. others: Other ways to treat activations."""
        if usual.bare.rests_on_device and (not others or self._keeps_all(usual)):
            return usual
        steps, forecast = self._options.early_steps, self._timed.forecast()
        if forecast is not None:
            stays = [None] if others else []
            is_early = forecast.may_be_early
            question = dataclasses.replace(
                forecast,
                limits=self._limits,
                ways=tuple(dict.fromkeys((usual.way, *stays, *others))),
                is_promised=is_early,
                clipping=not is_early,
            )
            found, candidate = better_than(usual.bare, question)
            return self._whole(found, candidate, usual.way if candidate is None else candidate.saves)
        if steps is None:  # every clipped step would lose its early updates; only a measured run can weigh that
            return usual
        left = self._activations(usual.way).left(self._limits)
        promised = dataclasses.replace(usual.bare, accumulation_steps=steps)
        return self._whole(with_early_updates(self._cut.spec, promised, left), None, usual.way)

    def _keeps_all(self, usual: PlacedPlan) -> bool:
        """Whether nothing is recomputed, or no footprint tells what is."""
        if self._footprint is None:
            return True
        keeps = usual.plan.plain or self._timed.keeps_what_fits
        return keeps and self._footprint.keep_bytes <= usual.plan.kept_bytes

    def _first_fitting(self, ways: Sequence[ActivationPolicy | None]) -> PlacedPlan:
        """Return the rule's plan with the first way for which there is room (None: activations stay)."""
        spec, steps = self._cut.spec, self._options.accumulation_steps
        for way in ways:
            activations = self._activations(way)
            bare = fitting(spec, self._limits, activations, accumulation_steps=steps)
            if bare is not None:
                return self._whole(bare, None, way)
        raise refusal(spec, self._limits, list(map(self._activations, ways)))

    def _activations(self, way: ActivationPolicy | None) -> Activations:
        names = (unit.name for unit in self._cut.spec.units)
        return Activations.of(names, self._footprint, self._device.activation_share, way)

    def _anywhere(self) -> Iterator[ActivationPolicy]:
        """Yield ways to host memory and disk. There are none from a device that uses host memory."""
        if not self._device.has_host_memory:
            yield from self._ways("host")
            yield from self._ways("disk") if self._limits.disk_bytes else ()

    def _selected(self) -> Iterator[ActivationPolicy]:
        """Yield ``select`` on a device with its own memory: results that are dear to compute stay beside arguments."""
        saved = {} if self._footprint is None else self._footprint.saved
        gains = any(unit.select > unit.recompute for unit in saved.values())
        if (
            self._footprint is not None
            and gains
            and self._options.compile is False
            and not self._device.has_host_memory
        ):
            yield ActivationPolicy("device", "select")

    def _ways(self, tier: AwayTier) -> list[ActivationPolicy]:
        footprint, may_select = self._footprint, self._options.compile is False
        return [] if footprint is None else ways_to(tier, footprint, may_select=may_select)

    def _whole(self, bare: Plan, candidate: Candidate | None, way: ActivationPolicy | None) -> PlacedPlan:
        """Add the activations that leave, and the room that is left to keep others."""
        spec, plan = self._cut.spec, self._activations(way).applied(bare)
        plan = dataclasses.replace(plan, workspace_bytes=self._workspace_bytes(plan.units))
        check_plan(spec, plan, self._limits)
        plan = with_room(spec, plan, self._limits, clipping=self._options.clipping)
        return PlacedPlan(plan, bare, candidate, way, way)

    def _workspace_bytes(self, units: Sequence[UnitPlan]) -> int:
        """Return device bytes to leave to activations and workspace; 0: not known, or not in the device's budget."""
        if self._footprint is None or not self._device.activation_share:
            return 0
        return workspace_bytes(self._footprint, units)


def limits_of(budget: Budget, device: Device, *, num_sharers: int = 1, unit_bytes: int = 0) -> Limits:
    """Return the most to take on each tier: the budget, or most of what is free now.

    Args:
        budget: The budget. Host and disk are for all processes on this machine together.
        device: The device of this process; it may use host memory.
        num_sharers: Number of these processes.
        unit_bytes: Weight bytes of the largest unit, if known.
    """
    beside = _BESIDE_BYTES + (_BESIDE_UNITS * unit_bytes if device.has_host_memory else 0)
    free_host = max(0, host_free_bytes() - (num_sharers * beside if num_sharers > 1 else 0))
    shared = 0.5 if device.has_host_memory else 1.0  # the same free bytes serve both tiers
    free_device = free_host // num_sharers if device.has_host_memory else device.memory_bytes()
    device_bytes = budget.device if budget.device is not None else int(_DEVICE_SHARE * shared * free_device)
    host_bytes = budget.host if budget.host is not None else int(_HOST_SHARE * shared * free_host)
    disk_bytes = budget.disk_bytes
    if budget.disk is not None and disk_bytes is None:
        disk_bytes = sum(disk_free_bytes(Path(p)) for p in budget.paths)
    disk_bytes = None if disk_bytes is None else disk_bytes // num_sharers
    return Limits(device_bytes=device_bytes, host_bytes=host_bytes // num_sharers, disk_bytes=disk_bytes)
