"""Turns homes of units into a plan: legal homes, the slots that they need, and the bytes that both take."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from outcore.planner.homes.pools import Comfort, Need, Needs, build_pools, needs_of
from outcore.spec.cut import is_resident, shared
from outcore.spec.layout import lay_out_states
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, Policy, Pool, Tier, UnitPlan
from outcore.spec.reservations import tier_bytes


class UnitHomes(NamedTuple):
    """Homes of a unit."""

    weights: Tier
    gradients: Tier
    states: Tier


class Placement(NamedTuple):
    """Homes of a unit, and where and when it is updated."""

    homes: UnitHomes
    is_staged: bool = False
    """Whether the device updates a unit whose states are in host memory."""
    is_early: bool = False
    """Whether it is updated inside backward."""


class TierBytes(NamedTuple):
    """Bytes of each tier."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def plus(self, other: TierBytes, times: int = 1) -> TierBytes:
        """Return the sum."""
        return TierBytes(
            self.device + times * other.device, self.host + times * other.host, self.disk + times * other.disk
        )


class _UnitFootprint(NamedTuple):
    """What one unit takes: bytes of its homes, and the slots that it needs."""

    homes: TierBytes
    needs: tuple[Need, ...]


class Placer:
    """Makes plans of one model. Equal units are worked out once: 100 equal layers cost as much as one."""

    def __init__(
        self, model: ModelSpec, *, policy: Policy = "recompute", accumulation_steps: int | None = None
    ) -> None:
        """Set what all plans have in common.

        Args:
            model: Units in the plan's order.
            policy: Activation policy of all units but the root.
            accumulation_steps: Micro-batches of a step if their number is promised, else None.
        """
        self._model, self._policy, self._accumulation_steps = model, policy, accumulation_steps
        shapes = [_shape_of(unit, model) for unit in model.units]
        first = {shape: i for i, shape in reversed(list(enumerate(shapes)))}
        self.alike = [first[shape] for shape in shapes]
        """Unit -> the first unit that takes the same bytes."""
        # Cached per object: functools.cache on the methods would keep every placer alive.
        self.unit = functools.cache(self._write_unit)
        """(unit, placement) -> its plan, with legal homes."""
        self._footprint = functools.cache(self._measure)

    def homes_bytes(self, counts: Iterable[tuple[tuple[int, Placement], int]]) -> TierBytes:
        """Return the bytes of homes alone. Args: counts: ((a unit, its placement), number of such units)."""
        total = TierBytes()
        for key, count in counts:
            total = total.plus(self._footprint(*key).homes, count)
        return total

    def needs(self, counts: Iterable[tuple[tuple[int, Placement], int]]) -> Needs:
        """Return the slots that units need. Args: as for ``homes_bytes``."""
        needs = Needs()
        for key, count in counts:
            needs.add(self._footprint(*key).needs, count)
        return needs

    def plan(self, placements: Sequence[Placement], comfort: Comfort, pools: tuple[Pool, ...]) -> Plan:
        """Return the plan with the usual order of updates. Args: pools: As ``needs`` and ``comfort`` ask for."""
        units = tuple(map(self.unit, range(len(placements)), placements))
        fetches = not all(map(is_resident, self._model.units, units))
        return Plan(
            precision=self._model.precision,
            units=units,
            pools=pools,
            prefetch_depth=comfort.prefetch_depth if fetches else 0,
            accumulation_steps=self._accumulation_steps,
            micro_batches_in_unit=self._model.micro_batches_in_unit,
        )

    def _measure(self, index: int, placement: Placement) -> _UnitFootprint:
        spec, unit = self._model.units[index], self.unit(index, placement)
        alone = Plan(precision=self._model.precision, units=(unit,), pools=(), prefetch_depth=0)
        nbytes = tier_bytes(replace(self._model, units=(spec,)), alone)
        return _UnitFootprint(TierBytes(**nbytes), tuple(needs_of(spec, unit, self._model)))

    def _write_unit(self, index: int, placement: Placement) -> UnitPlan:
        """Return a unit's plan. What it does not have gets the home of its weights."""
        spec, homes = self._model.units[index], placement.homes
        weights: Tier = homes.weights if spec.name and spec.weight_bytes else "device"
        gradients, states = (homes.gradients, homes.states) if spec.trainable_bytes else (weights, weights)
        if states == "device" and (weights, gradients) != ("device", "device"):
            states = "host"
        plan = UnitPlan(
            name=spec.name,
            weights=weights,
            gradients=gradients,
            states=states,
            policy=self._policy if spec.name else "keep",
            update="device" if placement.is_staged else "host",
            early=placement.is_early,
        )
        return shared(plan, self._model.sharing)


def with_slots(homes: TierBytes, needs: Needs, comfort: Comfort) -> tuple[tuple[Pool, ...], TierBytes]:
    """Return the slots for some needs, and the bytes of homes and slots together."""
    pools = tuple(build_pools(needs, comfort))
    slots = {"device": 0, "host": 0}
    for pool in pools:
        slots[pool.tier] += pool.total_bytes
    return pools, homes.plus(TierBytes(**slots))


def _shape_of(unit: UnitSpec, model: ModelSpec) -> Hashable:
    """Return what a unit's bytes depend on, besides its homes."""
    states = lay_out_states(unit, ("master", *model.state_names)).values()
    nbytes = (unit.weight_bytes, unit.trainable_bytes, unit.update_bytes, unit.buffer_bytes)
    compact = [param.numel for param in unit.trainable if param.master_format == "compact"]
    rules = frozenset((param.temporary_bytes, param.is_whole, param.draws_noise) for param in unit.trainable)
    return *nbytes, *(state.nbytes for state in states), *compact, rules, not unit.name
