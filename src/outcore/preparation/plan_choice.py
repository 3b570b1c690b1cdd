"""Chooses the plan of a run from the user's arguments and what is free on this machine."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
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
from outcore.planner.homes.activation_policies import ActivationPolicy, ways_to, workspace_bytes
from outcore.planner.homes.check import check_plan, room_bytes, with_room
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.homes.placement import fitting, refusal
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import Candidate
from outcore.planner.search.search import better_than
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.profile import Profile, UnitWork
from outcore.planner.timing.rank_layout import ALONE, Ranks
from outcore.planner.timing.simulate import Simulation
from outcore.preparation.forecast import DeviceFacts, Loop, asked_hardware, hardware_for
from outcore.preparation.prepare_options import Options, tier_of_activations
from outcore.probe.kept_blocks import runs_here, with_times
from outcore.spec.budget import Budget, Limits
from outcore.spec.hardware import Hardware
from outcore.spec.plan import AwayTier, Plan

_DEVICE_SHARE = 0.9  # of free memory, if there is no budget: the rest is for the driver and fragmentation
_HOST_SHARE = 0.8
_BESIDE_BYTES, _BESIDE_UNITS = 64 * 2**20, 4
"""Host memory that each of several ranks takes beside its budget, and that those shares would not cover: bytes for its
threads and libraries and, on the CPU, fresh gradients of a unit, as a multiple of its weights."""


class ChosenPlan(NamedTuple):
    """The plan of a run, and the question that it answers."""

    plan: Plan
    bare: Plan
    """The plan without the activations that leave."""
    candidate: Candidate | None
    """Short description of the plan; None if it is the rule's, or a given one."""
    question: PlanQuestion
    """Of the ways to treat activations, the rule's is the first. It has a machine if the plan was searched."""


def choose_plan(question: PlanQuestion, cut: Partition, options: Options, device: Device) -> ChosenPlan:
    """Return the given plan if it can be followed, or search a plan within the limits.

    Args:
        question: From ``question_of``.
        cut: The model.
        options: The user's arguments.
        device: The device that will compute.

    Raises:
        ConfigError: An argument cannot be used, or the plan is for another model.
        PlanInfeasibleError: The budget does not suffice.
    """
    if options.hardware is not None:
        asked_hardware(options.hardware)  # a wrong name is refused also where no times are needed
    if options.plan is None:
        return planned(question, cut, options, device)
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
    check_plan(question.model, options.plan, question.limits)
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
    room = min(options.plan.kept_bytes, room_bytes(question.model, options.plan, question.limits))
    return ChosenPlan(dataclasses.replace(options.plan, kept_bytes=room), options.plan, None, question)


def question_of(
    cut: Partition, options: Options, device: DeviceFacts, limits: Limits, *, ranks: Ranks = ALONE
) -> PlanQuestion:
    """Return what is asked, for a machine that is not known yet: see ``on_machine``.

    Args: as for ``choose_plan``. limits: The most to take. ranks: All that train.
    """
    is_cast = torch.is_autocast_enabled(device.torch_device.type)
    return PlanQuestion(
        model=cut.spec,
        limits=limits,
        profile_of=functools.cache(lambda _: Profile({}, _footprint(cut, options, device))),
        micro_batches=(options.loop or Loop(options.accumulation_steps or 1)).micro_batches,
        clipping=options.early_steps is None,
        activation_share=device.activation_share,
        # With its cache of casts, autocast saves other tensors: see docs/explanation/activations.md, Keep what fits.
        keeps_what_fits=not (is_cast and torch.is_autocast_cache_enabled()),
        may_be_plain=options.clipping and options.accumulation_steps is None,
        in_bf16=is_cast,
        ranks=ranks,
    )


def on_machine(
    question: PlanQuestion, cut: Partition, options: Options, device: DeviceFacts, *, may_measure: bool = True
) -> PlanQuestion | None:
    """Return the question with the machine; None if it or the micro-batch is not known.

    Args: as for ``choose_plan``. may_measure: See ``hardware_for``.
    """
    if question.machine is not None or options.sample is None:
        return None if question.machine is None else question
    with Autocast.now(device.torch_device).off():  # since the machine may be measured now
        hardware = hardware_for(options.hardware, device, options.budget.paths, may_measure=may_measure)
    work = None if hardware is None else _work(cut, options, device, hardware)
    if work is None:
        return None
    return dataclasses.replace(
        question, machine=hardware, profile_of=lambda rows: Profile(work, question.profile_of(rows).footprint)
    )


def predicted(chosen: ChosenPlan, cut: Partition, options: Options, device: DeviceFacts) -> Simulation | None:
    """Predict steps of a plan; None if the micro-batch or the machine is not known. Args: as for ``choose_plan``."""
    question = on_machine(chosen.question, cut, options, device, may_measure=not chosen.plan.rests_on_device)
    return None if question is None else question.predict(chosen.plan)


def _work(cut: Partition, options: Options, device: DeviceFacts, hardware: Hardware) -> Mapping[str, UnitWork] | None:
    """Return the work of units; None, with a warning, if the model cannot be followed on shapes alone."""
    sample = options.sample or {}
    try:
        work = counted_work(cut, sample, device.torch_device)
    except ConfigError as error:
        warnings.warn(f"the plan was made without predicted times: {error}", stacklevel=2)
        return None
    is_compiled = options.compile is not False
    if is_compiled or not isinstance(device, Device) or not runs_here(cut, hardware, device.torch_device):
        return work
    return with_times(work, cut, sample, device, hardware)


def _footprint(cut: Partition, options: Options, device: DeviceFacts) -> Footprint | None:
    """Return the footprint of the sample. None if there is none, or if it cannot be followed (a warning if it matters).

    Raises:
        ConfigError: The model cannot be followed, and the user wants activations on another tier.
    """
    if options.sample is None:
        return None
    makes_logits = options.loop is None or options.loop.makes_logits
    try:
        return footprint_of(cut, options.sample, device.torch_device, makes_logits=makes_logits)
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


def planned(
    question: PlanQuestion, cut: Partition, options: Options, device: DeviceFacts, *, searches: bool = True
) -> ChosenPlan:
    """Find a plan. Activations rest where the user wants them, else where the predicted step is shortest.

    Args: as for ``choose_plan``. searches: Whether to search for a faster plan than the rule's.

    Raises:
        PlanInfeasibleError: Nothing fits.
    """
    usual = _usual(dataclasses.replace(question, ways=_ways(question, options, device)), options)
    plan, bare, _, question = usual
    is_best = bare.rests_on_device and (len(question.ways) == 1 or _keeps_all(question, plan))
    if is_best or not searches:
        return usual
    timed = on_machine(question, cut, options, device)
    if timed is not None:
        bare, candidate = better_than(bare, timed)
        way = timed.ways[0] if candidate is None else candidate.saves
        return ChosenPlan(_whole(timed, bare, way, options), bare, candidate, timed)
    if question.clipping:  # a clipped step would lose its early updates; only a measured run can weigh that
        return usual
    left = question.activations(question.ways[0]).left(question.limits)
    promised = dataclasses.replace(bare, accumulation_steps=question.micro_batches)
    bare = with_early_updates(question.model, promised, left)
    return ChosenPlan(_whole(question, bare, question.ways[0], options), bare, None, question)


def _usual(question: PlanQuestion, options: Options) -> ChosenPlan:
    """Return the rule's plan, with the first way for which there is room. Raises: PlanInfeasibleError: Nothing fits."""
    ways, steps = [way for way in question.ways if way is None or way.tier != "device"], options.accumulation_steps
    for way in ways:
        bare = fitting(question.model, question.limits, question.activations(way), accumulation_steps=steps)
        if bare is not None:
            others = question.ways if None in question.ways else ()
            question = dataclasses.replace(question, ways=tuple(dict.fromkeys((way, *others))))
            return ChosenPlan(_whole(question, bare, way, options), bare, None, question)
    raise refusal(question.model, question.limits, list(map(question.activations, ways)))


def _keeps_all(question: PlanQuestion, plan: Plan) -> bool:
    """Whether nothing is recomputed, or no footprint tells what is."""
    if question.footprint is None:
        return True
    return (plan.plain or question.keeps_what_fits) and question.footprint.keep_bytes <= plan.kept_bytes


def _ways(question: PlanQuestion, options: Options, device: DeviceFacts) -> tuple[ActivationPolicy | None, ...]:
    """Return what may become of activations: they go where the user wants them, else stay or go anywhere.

    There is no way but to stay for a device that uses host memory, nor for a model that cannot be followed.
    """
    tier, may_select = tier_of_activations(options), options.compile is False
    if tier is None and (device.has_host_memory or not device.activation_share):
        return (None,)
    footprint = question.footprint
    if footprint is None:
        return (None,) if tier is None else ()
    if tier is not None:
        return tuple(ways_to(tier, footprint, may_select=may_select))
    gains = may_select and any(unit.select > unit.recompute for unit in footprint.saved.values())
    tiers: list[AwayTier] = ["host", "disk"] if question.limits.disk_bytes else ["host"]
    away = [way for tier in tiers for way in ways_to(tier, footprint, may_select=may_select)]
    # Results that are expensive to compute may stay beside arguments.
    return (None, *([ActivationPolicy("device", "select")] if gains else []), *away)


def _whole(question: PlanQuestion, bare: Plan, way: ActivationPolicy | None, options: Options) -> Plan:
    """Add the activations that leave, and the room that is left to keep others."""
    plan, limits, share = question.activations(way).applied(bare), question.limits, question.activation_share
    workspace = workspace_bytes(question.footprint, plan.units) if share and question.footprint is not None else 0
    plan = dataclasses.replace(plan, workspace_bytes=workspace)
    check_plan(question.model, plan, limits)
    return with_room(question.model, plan, limits, clipping=options.clipping)


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
