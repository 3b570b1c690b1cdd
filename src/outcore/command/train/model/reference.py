"""The frozen copy that preferences are measured against: out of core beside the model, within the same budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.planner.timing.simulate import Simulation
from outcore.preparation.with_ranks import of_node
from outcore.ranks.world import num_local_ranks
from outcore.spec.budget import Budget, tier_bytes
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Tier


class PlacedModel(NamedTuple):
    """A model, and where it lives."""

    spec: ModelSpec
    plan: Plan
    predicted: Simulation | None = None
    """Steps in time, if the largest batch and the machine are known."""

    @property
    def num_ranks(self) -> int:
        """Ranks that train together."""
        return self.spec.units[0].num_ranks

    @property
    def taken(self) -> Mapping[Tier, int]:
        """Bytes on each tier, as a budget counts them."""
        return of_node(tier_bytes(self.spec, self.plan), num_local_ranks())


_SHARES = 16
"""Shares of the device that are tried for the reference if simple ones do not do."""
Planner = Callable[[Budget], PlacedModel]
Bytes = Mapping[str, int]
"""Bytes by tier."""


def plan_both(budget: Budget, model: Planner, reference: Planner) -> tuple[PlacedModel, PlacedModel]:
    """Share a budget among a model and its reference.

    Args:
        budget: Has a number for every tier that is allowed.
        model: Plans the model that is trained, within a budget.
        reference: Plans the frozen copy, within a budget.

    Returns:
        Model and reference, together within the budget. The first share that lets both fit is taken: in proportion to
        what they need, then for the reference no more than it must have, then for the model no more than it must have,
        then some shares of the device, with the host memory that the reference must have beside its own.

    Raises:
        PlanInfeasibleError: No share lets both fit. ``required_bytes`` is the least of both together.
    """
    given = _bytes(budget)
    ours, other = _least(budget, model), _least(budget, reference)
    fraction = sum(other.values()) / (sum(ours.values()) + sum(other.values()))
    in_proportion = {tier: min(nbytes, max(other[tier], int(fraction * nbytes))) for tier, nbytes in given.items()}
    shares = itertools.chain([in_proportion, other, _less(given, ours)], _between(budget, ours, other, reference))
    for share in shares:
        try:
            second = reference(_budget(budget, {**share, "disk": given["disk"]}))
            return model(_budget(budget, _less(given, second.taken))), second
        except PlanInfeasibleError:
            continue
    raise _infeasible(given, ours, other)


def _least(budget: Budget, planner: Planner) -> Bytes:
    """Return the least bytes needed: least on the device, then on the host, then on disk, where these are allowed."""
    next_to_nothing = {tier: min(1, nbytes) for tier, nbytes in _bytes(budget).items()}
    try:
        return dict(planner(_budget(budget, next_to_nothing)).taken.items())
    except PlanInfeasibleError as error:
        return error.required_bytes


def _between(budget: Budget, ours: Bytes, other: Bytes, reference: Planner) -> Iterator[Bytes]:
    """Yield shares of the reference between the least that it and the model need of the device."""
    given = _bytes(budget)
    more = given["device"] - ours["device"] - other["device"]
    for part in range(_SHARES + 1) if more >= 0 else ():
        share = {**given, "device": other["device"] + part * more // _SHARES, "host": min(1, given["host"])}
        try:
            reference(_budget(budget, share))
        except PlanInfeasibleError as error:
            share["host"] = error.raise_one_to.get("host", given["host"])
        yield share


def _bytes(budget: Budget) -> dict[str, int]:
    return {"device": budget.device or 0, "host": budget.host or 0, "disk": budget.disk_bytes or 0}


def _budget(like: Budget, nbytes: Bytes) -> Budget:
    disk_bytes = None if like.disk is None else nbytes["disk"]
    return Budget(device=nbytes["device"], host=nbytes["host"], disk=like.disk, disk_bytes=disk_bytes)


def _less(given: Bytes, taken: Bytes | Mapping[Tier, int]) -> Bytes:
    return {tier: max(0, given[tier] - nbytes) for tier, nbytes in taken.items()}


def _infeasible(given: Bytes, ours: Bytes, other: Bytes) -> PlanInfeasibleError:
    lines = [
        "expected a budget for the model and its frozen reference together, but no share of it lets both fit; the "
        "least that would do is:"
    ]
    for tier, nbytes in given.items():
        parts = f"{format_bytes(ours[tier])} for the model and {format_bytes(other[tier])} for the reference"
        lines.append(f"{tier:<6}  budget {format_bytes(nbytes)}: {parts}")
    lines.append("give that much, or train adapters, which need no reference (--lora RANK)")
    return PlanInfeasibleError("\n".join(lines), {tier: ours[tier] + other[tier] for tier in ours})
