"""Joint work of several ranks in ``prepare``: compare arguments, choose one plan, start from one model."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from outcore.core.errors import ConfigError, OutcoreError, PlanInfeasibleError, UnsupportedError
from outcore.core.quantities import PAGE_BYTES, format_bytes
from outcore.device.device import Device
from outcore.device.faults import Faults
from outcore.device.opening import device_of_rank, open_device
from outcore.engine.opened import Values
from outcore.engine.unit.unit import Unit
from outcore.memory.machine import host_bytes
from outcore.model.partition import Partition
from outcore.optim.rules import UpdateRule, said
from outcore.planner.homes.check import check_plan
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.timing.rank_layout import Ranks
from outcore.preparation.plan_choice import ChosenPlan, choose_plan, limits_of, question_of
from outcore.preparation.prepare_options import Options
from outcore.ranks.agreement import agree, least_limits
from outcore.ranks.one_copy import shared_memory
from outcore.ranks.world import World, join_world, num_local_ranks, num_ranks
from outcore.spec.budget import Budget, Limits
from outcore.spec.model import Sharing
from outcore.spec.plan import TIERS, Plan

T = TypeVar("T", bound=str)


@contextmanager
def joined(options: Options) -> Iterator[tuple[World | None, Options]]:
    """Join the ranks that train together. Yields the ranks (None if there is one), and options with an own device.

    All ranks leave the block, or all raise.

    Raises:
        ConfigError: The launcher does not say where the ranks meet, or there are more ranks than GPUs.
        UnsupportedError: The options ask for something that several ranks cannot do yet.
    """
    if not join_world(options.device):
        yield None, options
        return
    world = World()
    with world.kept("prepare"):
        yield world, of_this_rank(options)


def of_this_rank(options: Options) -> Options:
    """Return options with a device for this rank; unchanged if there is one rank. Raises: As ``joined``."""
    if not join_world(options.device):
        return options
    _refuse_what_one_rank_can(options)
    return dataclasses.replace(options, device=device_of_rank(options.device))


def meet(world: World | None) -> None:
    """Wait until all ranks have come here, or raise on all. Args: world: The ranks; None if there is one."""
    if world is not None:
        world.all_of(None)


def chosen(
    cut: Partition, options: Options, device: Device, world: World | None, groups: Iterable[str] = ()
) -> tuple[Partition, Plan]:
    """Return the model as this rank updates it, and the plan of all ranks. A collective if there are several.

    Args: as for ``choose_plan``. world: The ranks; None if there is one. groups: Texts of param groups, in order.

    Raises:
        ConfigError: Ranks have different models or arguments; or as ``choose_plan`` raises.
        PlanInfeasibleError: The budget does not suffice.
    """
    if world is None:
        question = question_of(cut, options, device, limits_of(options.budget, device))
        return cut, choose_plan(question, cut, options, device).plan
    world.join_lanes(device)
    agree(world, _facts(cut, options) | {f"param group {number}": said for number, said in enumerate(groups)})
    per_node = world.size if world.size % world.local_size else world.local_size
    ranks = Ranks(world.size // per_node, per_node)
    is_fast = options.reduction == "fast"
    cut = among(cut, ranks, world.rank, keeps_buckets=is_fast)
    largest = max(unit.weight_bytes for unit in cut.spec.units)
    mine = limits_of(options.budget, device, num_sharers=world.local_size, unit_bytes=largest)
    limits = least_limits(world, mine)
    can_share, made = _can_share(world), ""
    if world.rank == 0:
        with of_a_node(world.local_size):
            made = _searched(cut, options, device, ranks, limits, can_share=can_share).plan.to_json()
    plan = Plan.from_json(world.from_first(made), where="plan of rank 0")
    check_plan(cut.spec, plan, limits)
    if is_fast and plan.accumulation_steps is None:
        raise ConfigError(
            "prepare: expected accumulation_steps with reduction='fast', which exchanges gradients with the last "
            "micro-batch of a step, but got none; pass it, or leave reduction out"
        )
    return cut, plan


def _searched(
    cut: Partition, options: Options, device: Device, ranks: Ranks, limits: Limits, *, can_share: bool
) -> ChosenPlan:
    """Search the best plan over all ways to share weights.

    With a Trainer, the first way that fits is taken. A Trainer may call code that reads weights on one rank alone, such
    as generation, or saving the best model so far.
    """
    asked: list[Sharing] = ["copy" if can_share else "replicate"]
    if options.plan is None and ranks.size > 1:
        asked += sharings_over_links(ranks)
    question = question_of(cut, options, device, limits, ranks=ranks)
    make = functools.partial(choose_plan, cut=cut, options=options, device=device)
    return fastest(asked, question, make, in_order=options.loop is not None)


def groups_said(model: nn.Module, optimizer: torch.optim.Optimizer | None, rule: UpdateRule | None) -> Iterator[str]:
    """Yield each param group's settings and parameter names as a text."""
    if optimizer is None or rule is None:
        return
    names = {id(param): name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        yield f"{said(rule.hyper(group))} {[names.get(id(param)) for param in group['params']]}"


def among(cut: Partition, ranks: Ranks, rank: int, *, keeps_buckets: bool = False) -> Partition:
    """Return the model as one of several ranks updates it. Args: keeps_buckets: See ``UnitSpec``."""
    if ranks.size == 1:
        return cut
    return dataclasses.replace(cut, spec=cut.spec.among(ranks.size, rank, ranks.per_node, keeps_buckets=keeps_buckets))


@contextmanager
def of_a_node(num_sharers: int) -> Iterator[None]:
    """Rewrite errors of one rank's plan in terms of budgets as users give them: host and disk for a whole node."""
    try:
        yield
    except PlanInfeasibleError as error:
        if num_sharers == 1:
            raise
        text = f"{error}\nThese are budgets of one rank. {num_sharers} ranks share those of host memory and disk."
        needs = (of_node(nbytes, num_sharers) for nbytes in (error.required_bytes, error.raise_one_to))
        raise PlanInfeasibleError(text, *needs) from error


def chosen_alone(cut: Partition, options: Options, device: Device) -> ChosenPlan:
    """Choose as rank 0 would, without the other ranks. Raises: As ``chosen``."""
    size, sharers = num_ranks(), num_local_ranks()
    is_even = size % sharers == 0
    ranks = Ranks(size // sharers, sharers) if is_even else Ranks(1, size)
    limits = limits_of(options.budget, device, num_sharers=sharers)
    can_share = is_even and size > 1  # only prepare finds out whether ranks can share memory
    with of_a_node(sharers):
        return _searched(among(cut, ranks, 0), options, device, ranks, limits, can_share=can_share)


def free_budget(budget: Budget, *, device: torch.device | str | None = None) -> Budget:
    """Return the budget with a number for every tier it allows. An open number becomes what would be taken now.

    For host and disk, the numbers are for all ranks of this machine together.
    """
    sharers = num_local_ranks()
    with open_device(device, Faults(), None) as opened:
        limits, total_bytes = limits_of(budget, opened, num_sharers=sharers), opened.total_bytes()
    for tier, given, there in (("device", budget.device, total_bytes), ("host", budget.host, host_bytes())):
        if given is not None and given > there:
            warnings.warn(
                f"the {tier} budget of {format_bytes(given)} is more than this machine has ({format_bytes(there)}); a "
                "plan that takes more is refused when the run begins",
                stacklevel=2,
            )
    nbytes = of_node(limits.by_tier, sharers)
    disk_bytes = None if limits.disk_bytes is None else nbytes["disk"]
    return Budget(device=nbytes["device"], host=nbytes["host"], disk=budget.disk, disk_bytes=disk_bytes)


def of_node(nbytes: Mapping[T, int], num_sharers: int) -> dict[T, int]:
    """Convert bytes of a rank, by tier, to those of a budget: device per rank, host and disk per node."""
    return {tier: count * (1 if tier == "device" else num_sharers) for tier, count in nbytes.items()}


def sharings_over_links(ranks: Ranks) -> list[Sharing]:
    """Return the ways to share weights in which ranks put them together over links."""
    return ["cut", "node"] if ranks.nodes > 1 < ranks.per_node else ["cut"]


_ALL_TOGETHER = 0.05
"""Least predicted gain, as a fraction of a step, for which weights are put together between ranks. Then all ranks must
visit the same units, and more calls need all ranks."""


def fastest(
    sharings: Sequence[Sharing],
    question: PlanQuestion,
    make: Callable[[PlanQuestion], ChosenPlan],
    *,
    in_order: bool = False,
) -> ChosenPlan:
    """Return the plan whose way to share weights has the shortest predicted step.

    If times are not known: the first plan that leaves no weights on disk, else the last that fits.

    Args:
        sharings: Ways to share weights. An earlier one is preferred unless a later one gains enough.
        question: What is asked, with any way.
        make: Makes the plan of one way.
        in_order: Take the first way that fits.

    Raises:
        PlanInfeasibleError: No way fits. The error is that of the way that needs least.
    """
    best: ChosenPlan | None = None
    error: PlanInfeasibleError | None = None
    best_s = math.inf
    for sharing in sharings:
        try:
            made = make(dataclasses.replace(question, model=dataclasses.replace(question.model, sharing=sharing)))
        except PlanInfeasibleError as caught:
            error = caught if error is None else min(error, caught, key=_needs)
            continue
        if in_order:
            return made
        plan, known = made.plan, made.question
        question = dataclasses.replace(question, machine=known.machine, profile_of=known.profile_of)
        simulation = known.predict(plan) if len(sharings) > 1 and known.machine is not None else None
        if simulation is None or best is None or simulation.step_s < (1 - _ALL_TOGETHER) * best_s:
            best, best_s = made, math.inf if simulation is None else simulation.step_s
        if plan.rests_on_device or (simulation is None and all(unit.weights != "disk" for unit in plan.units)):
            break
    if best is None:
        raise AssertionError("there is no way to have weights") if error is None else error
    return best


def _needs(error: PlanInfeasibleError) -> list[int]:
    """Return the bytes that would do: the device's first, which counts most."""
    return [error.required_bytes.get(tier, 0) for tier in TIERS]


def _can_share(world: World) -> bool:
    """Whether ranks of a machine can share memory. A collective."""
    if world.size % world.local_size:
        return False
    try:
        shared_memory(world, PAGE_BYTES, world.local_size).close()
    except OutcoreError:
        if world.failure is not None:
            raise
        return False
    return True


def of_first_rank(world: World | None, model: nn.Module, values: Callable[[Unit], Values]) -> Callable[[Unit], Values]:
    """Let all ranks start with parameters and buffers of rank 0, as in DDP. All must ask for values in the same order.

    Args:
        world: The ranks; None if there is one, which keeps its values.
        model: The model, whose buffers are set at once.
        values: Unit -> this rank's first values.
    """
    if world is None:
        return values
    with torch.no_grad():
        for buffer in model.buffers():
            if not buffer.is_meta:
                buffer.copy_(world.copy_first(buffer))

    def of(unit: Unit) -> Values:
        mine = values(unit)
        return lambda index: world.copy_first(mine(index))

    return of


def _refuse_what_one_rank_can(options: Options) -> None:
    if (options.micro_batches_in_unit or 1) > 1:
        raise UnsupportedError(
            "prepare: expected one rank with micro_batches_in_unit, but there are several; leave it out, and call "
            "backward for each micro-batch"
        )


def _facts(cut: Partition, options: Options) -> dict[str, str]:
    """Return what must be equal on all ranks, by the name to use in errors."""
    model = cut.spec
    buffers = {
        f"buffer '{name}'": f"{buffer.dtype} {tuple(buffer.shape)} {buffer.stride()} {buffer.is_meta}"
        for name, buffer in cut.modules[0].named_buffers()
    }
    units = {f"unit '{unit.name or 'root'}'": repr(unit) for unit in model.units}
    asked = {f"{name}=": repr(getattr(options, name)) for name in ("accumulation_steps", "clipping", "reduction")}
    return (
        units | buffers | asked | {"precision=": model.precision, "what the optimizer keeps": repr(model.state_names)}
    )
