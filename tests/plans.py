"""Plans that put every unit where a test wants it, without the planner, and a machine to predict them on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from outcore import api
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.model.partition import partition as cut_into_units
from outcore.optim.joined import members
from outcore.optim.rules import rule_for
from outcore.planner.homes.pools import LEAST, Comfort, pools_for
from outcore.planner.homes.share import can_be_staged, spread
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.simulate import Simulation
from outcore.preparation.prepare_options import Options
from outcore.spec.budget import can_be_early
from outcore.spec.hardware import Hardware
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, UnitPlan


def plan_for(model: nn.Module, optimizer: Any, **options: Any) -> tuple[ModelSpec, Plan]:
    """Return the plan of ``prepare`` with these arguments."""
    return api.plan_for(model, optimizer, Options(**options))


def plan_in_time(model: nn.Module, optimizer: Any, **options: Any) -> tuple[ModelSpec, Plan, Simulation | None]:
    """Return the plan of ``prepare`` with these arguments, and predicted steps."""
    return api.plan_in_time(model, optimizer, Options(**options))


def prepare_for_test(
    model: nn.Module,
    optimizer: Any,
    *,
    faults: Faults | None = None,
    race_checker: RaceChecker | None = None,
    **options: Any,
) -> api.Prepared:
    """Prepare with injected faults and a race checker."""
    return api.prepare_in_loop(model, optimizer, Options(**options), faults, race_checker)


SAVED_BYTES = 2**20
"""Room for the activations of one call, where they leave the device."""
Homes = Callable[[int], Sequence[str]]
"""Unit number -> home tiers of weights, gradients and states. Unit 0 is the root: its weights stay on the device."""


def forced(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    homes: str | Homes,
    *,
    policy: str | Callable[[int], str] = "recompute",
    activations: str | Callable[[int], str] = "device",
    units: Sequence[Any] | None = None,
    precision: str | None = None,
    comfort: Comfort = LEAST,
    depth: int | None = None,
    steps: int | None = None,
    early: bool = False,
    share: float = 0.0,
    may_be_one: bool = False,
    pieces: int = 1,
    num_ranks: int = 1,
    per_node: int | None = None,
    partition: str | Callable[[int], str] = "replicate",
    gather: str = "link",
) -> tuple[ModelSpec, Plan]:
    """Return the specification of the units, and the plan.

    Args:
        model: The model before it is prepared.
        optimizer: None to evaluate.
        homes: One tier for everything, or tiers by unit. Everything of a frozen unit has the home of its weights.
        policy: Policy for activations of all units but the root.
        activations: Where saved activations rest.
        units: As for ``prepare``.
        precision: As for ``prepare``.
        comfort: How many slots there are.
        depth: Depth of prefetching, if it is not that of ``comfort``.
        steps: Promised micro-batches per step.
        early: Whether every unit that can be is updated inside backward.
        share: Share of the units that are updated on the device through staging slots, among those that can be.
        may_be_one: Whether the root may be the only unit.
        pieces: ``micro_batches_in_unit``.
        num_ranks: Number of ranks that train together.
        per_node: Number of ranks on each machine; None: all.
        partition: Partition of the weights of all units but the root.
        gather: How partitioned weights are gathered; by link where one copy cannot hold them.
    """
    rule, groups = (None, []) if optimizer is None else (rule_for(*members(optimizer)), optimizer.param_groups)
    keeps = None if rule is None else rule.kept(groups)
    cut = cut_into_units(model, units=units, keeps=keeps, precision=precision, micro_batches_in_unit=pieces)
    spec = cut.spec.among(num_ranks, 0, per_node)
    assert may_be_one or len(spec.units) > 1, "nothing moves"
    plans = []
    for i, unit in enumerate(spec.units):
        weights, gradients, states = (homes,) * 3 if isinstance(homes, str) else homes(i)
        weights = weights if i else "device"
        rest = (gradients, states) if unit.trainable else (weights, weights)
        kept = policy if isinstance(policy, str) else policy(i)
        tier = activations if isinstance(activations, str) else activations(i)
        plan = UnitPlan(
            name=unit.name, weights=weights, gradients=rest[0], states=rest[1], policy=kept if i else "keep"
        )
        if i and tier != "device":
            plan = dataclasses.replace(plan, activations=tier, saved_bytes=SAVED_BYTES)
        if i:
            over = partition if isinstance(partition, str) else partition(i)
            way = gather if over == "node" and weights == "host" else "link"
            plan = dataclasses.replace(plan, partition=over, gather=way)
        plans.append(dataclasses.replace(plan, early=early and can_be_early(unit, plan)))
    plans = share_updates(plans, share)
    return spec, Plan(
        precision=spec.precision,
        units=tuple(plans),
        pools=pools_for(spec, plans, comfort),
        prefetch_depth=comfort.prefetch_depth if depth is None else depth,
        accumulation_steps=steps,
        micro_batches_in_unit=pieces,
    )


def share_updates(units: Sequence[UnitPlan], fraction: float) -> list[UnitPlan]:
    """Let the device update a fraction of the units whose states live in host memory, evenly spread."""
    chosen = spread([i for i, u in enumerate(units) if can_be_staged(u)], fraction)
    return [dataclasses.replace(u, update="device" if i in chosen else "host") for i, u in enumerate(units)]


def without_launches(name: str) -> Hardware:
    """A named machine that launches kernels in no time: steps of tiny models would consist of that alone."""
    machine = known_hardware(name)
    host = dataclasses.replace(machine.host, visit_s=0.0, resting_visit_s=0.0)
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, kernel_s=0.0), host=host)
