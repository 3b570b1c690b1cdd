"""Which plan a run follows: arguments of the user's, what is free on this machine, and the planner between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.device.device import Device
from outcore.forecast import Forecast, Loop, NamedHardware, hardware_for, rests_on_device
from outcore.memory.limits import disk_free_bytes, host_free_bytes
from outcore.planning.homes.check import check_plan
from outcore.planning.homes.early import with_early_updates
from outcore.planning.homes.fits import room_bytes, with_room
from outcore.planning.homes.placement import place
from outcore.planning.timing.simulate import Simulation
from outcore.planning.units.activations import Sending, saved_bytes
from outcore.planning.units.partition import Partition
from outcore.spec.budget import Budget, Limits
from outcore.spec.model import Precision
from outcore.spec.plan import AwayTier, Plan

_DEVICE_SHARE = 0.9  # of what is free, where no budget says otherwise: the rest is for the driver and fragmentation
_HOST_SHARE = 0.8


class Options(NamedTuple):
    """Arguments of ``prepare``."""

    sample: Mapping[str, torch.Tensor] | None = None
    budget: Budget = Budget()
    precision: Precision | None = None
    accumulation_steps: int | None = None
    clipping: bool = True
    weights: str | Path | None = None
    units: Sequence[str | type] | None = None
    plan: Plan | None = None
    device: torch.device | str | None = None
    activations: AwayTier | None = None
    hardware: NamedHardware | None = None
    loop: Loop | None = None
    """What a loop of ours does with every step; it promises what plans need."""
    compile: bool | Mapping[str, Any] = False


def choose_plan(cut: Partition, options: Options, device: Device, timed: Timed) -> Plan:
    """The plan that was given, if it can be obeyed, or one for what the budget leaves.

    Args:
        cut: The model.
        options: Of the user's.
        device: That will compute.
        timed: Of the same.

    Raises:
        ConfigError: Arguments that cannot be used, or a plan for another model.
        PlanInfeasibleError: The budget does not suffice.
    """
    limits, sending = limits_of(options.budget, device), _sending(cut, options, device)
    if options.plan is None:
        steps = options.accumulation_steps
        left = limits if sending is None else sending.left(limits)
        try:
            plan = place(cut.spec, left, accumulation_steps=steps, activation_share=device.activation_share)
        except PlanInfeasibleError as error:
            raise error if sending is None else sending.explained(error) from None
        forecast = None if sending is not None or rests_on_device(plan) else timed.forecast()
        if forecast is not None:
            plan = forecast.better_than(plan, left)
        elif steps is not None and not options.clipping:
            # With clipping an attempt is lost whenever a step clips, which only a measured run can weigh.
            plan = with_early_updates(cut.spec, plan, left)
        if sending is not None:
            plan = sending.applied(plan)
            check_plan(cut.spec, plan, limits)
        return with_room(cut.spec, plan, limits, clipping=options.clipping)
    promised, given = options.plan.accumulation_steps, options.accumulation_steps
    if given is not None and promised != given:
        raise ConfigError(
            f"prepare: expected the accumulation_steps that the plan was made for ({promised}), but got {given}; "
            "leave it out, or make the plan again"
        )
    check_plan(cut.spec, options.plan, limits)
    if options.plan.plain and not options.clipping:
        raise ConfigError(
            "prepare: expected clipping=True with a plan that leaves gradients to autograd (plain), but got False; "
            "set plain to false in the plan, or make the plan again"
        )
    room = min(options.plan.kept_bytes, room_bytes(cut.spec, options.plan, limits))
    return dataclasses.replace(options.plan, kept_bytes=room)


class Timed:
    """Plans of a run in time. What the model computes is counted once, when that is first asked for."""

    def __init__(self, cut: Partition, options: Options, device: Device) -> None:
        """Args: as for ``choose_plan``."""
        self._cut, self._options, self._device = cut, options, device
        self._known: Forecast | None = None

    def predict(self, plan: Plan) -> Simulation | None:
        """Steps of a plan; None where the micro-batch or the machine is not known, or cannot be."""
        forecast = self.forecast(may_measure=not rests_on_device(plan))
        return None if forecast is None else forecast.simulate(plan)

    def forecast(self, *, may_measure: bool = True) -> Forecast | None:
        """None where the micro-batch or the machine is not known. Args: may_measure: See ``hardware_for``."""
        if self._known is None:
            self._known = self._make(may_measure=may_measure)
        return self._known

    def _make(self, *, may_measure: bool) -> Forecast | None:
        options, device = self._options, self._device
        if options.sample is None:
            return None
        hardware = hardware_for(options.hardware, device, options.budget.paths, may_measure=may_measure)
        if hardware is None:
            return None
        steps = options.accumulation_steps
        loop = options.loop or Loop(steps or 1, clips=options.clipping, is_promised=steps is not None)
        return Forecast.of(self._cut, options.sample, device, hardware, loop)


def _sending(cut: Partition, options: Options, device: Device) -> Sending | None:
    """Which activations leave the device, if the user wants that."""
    if options.activations is None:
        return None
    if options.activations not in ("host", "disk"):
        raise ConfigError(
            f"activations: expected 'host' or 'disk', or None to keep what fits on the device, but got "
            f"{options.activations!r}"
        )
    if options.plan is not None:
        raise ConfigError(
            "activations: expected it without plan=, which says where activations rest, but got both; leave one out"
        )
    if options.sample is None:
        raise ConfigError(
            "activations: expected sample= beside it, the largest micro-batch as keyword arguments of the model's "
            "forward, from which the room that activations take is worked out, but got none"
        )
    if options.activations == "disk" and options.budget.disk is None:
        raise ConfigError(
            "activations: expected a folder for the disk tier beside activations='disk', but the budget has none; give "
            "outcore.Budget(disk=...), --disk DIR in the command"
        )
    return Sending(options.activations, saved_bytes(cut, options.sample, device.torch_device))


def limits_of(budget: Budget, device: Device) -> Limits:
    """The most to take on each tier: what the budget says, else most of what is free now."""
    free_host = host_free_bytes()
    shared = 0.5 if device.has_host_memory else 1.0  # what is free is free for both tiers
    device_bytes = budget.device if budget.device is not None else int(_DEVICE_SHARE * shared * device.memory_bytes())
    host_bytes = budget.host if budget.host is not None else int(_HOST_SHARE * shared * free_host)
    disk_bytes = budget.disk_bytes
    if budget.disk is not None and disk_bytes is None:
        disk_bytes = sum(disk_free_bytes(Path(p)) for p in budget.paths)
    return Limits(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes)
