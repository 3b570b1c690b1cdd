"""Which slots a plan needs, and plans from homes of units: a pure function of where everything lives.

The size of a slot follows from the homes (``needs_of``). The number of slots is a preference (``Comfort``), from double
buffering down to the one slot that suffices.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.spec.budget import tier_bytes
from outcore.spec.layout import (
    COMPACT_BYTES,
    NOISE_BYTES,
    SCRATCH_BYTES,
    has_compact,
    in_slot,
    is_resident,
    lay_out_states,
    shared,
    staging,
    states_bytes,
    sums_on_device,
    weights_home,
)
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import MAX_SLOTS, Plan, Policy, Pool, PoolKind, Tier, UnitPlan

POOL_ORDER: tuple[tuple[Tier, PoolKind], ...] = (
    ("device", "weights"),
    ("device", "bucket"),
    ("device", "received"),
    ("device", "sums"),
    ("device", "scratch"),
    ("device", "staging"),
    ("device", "activations"),
    ("device", "temporary"),
    ("host", "weights"),
    ("host", "new_weights"),
    ("host", "states"),
    ("host", "gradients"),
    ("host", "landing"),
    ("host", "activations"),
    ("host", "temporary"),
)

_TWO = ("new_weights", "gradients", "landing")
_HOST_SLOTS = {"states": 3, "activations": 3, "temporary": 1} | dict.fromkeys(
    _TWO, 2
)  # one slot each to read into, to use and to write from: some kinds need all three


_UPDATES_THERE: frozenset[tuple[Tier, PoolKind]] = frozenset({("device", "scratch"), ("device", "staging")})
"""Slots of the device's two kinds of updates, in place and staged. They run on two lanes, which may work together."""


class Need(NamedTuple):
    """A unit needs a slot of at least ``nbytes``."""

    tier: Tier
    kind: PoolKind
    nbytes: int
    is_kept: bool = False
    """Whether the unit keeps the slot to itself, if there are enough slots."""


@dataclass(frozen=True, kw_only=True)
class Comfort:
    """How many slots are wanted. Fewer slots never change the result, but operations wait longer."""

    prefetch_depth: int
    num_buckets: int
    max_slots_host: int

    def num_slots(self, tier: Tier, kind: PoolKind) -> int:
        """Return the number of slots wanted in a pool."""
        if tier == "device":
            wanted = {"weights": self.prefetch_depth + 1, "bucket": self.num_buckets, "staging": self.num_buckets}
            wanted |= dict.fromkeys(("received", "sums"), self.num_buckets)
            wanted["activations"] = min(self.num_buckets, 2)
            return wanted.get(kind, 1)
        return min(self.max_slots_host, _HOST_SLOTS.get(kind, self.prefetch_depth + 1))


DEVICE_COMFORTS = ((2, 2), (1, 2), (1, 1), (0, 1))
"""Pairs of prefetch depth and number of buckets, from generous to the least that works."""
HOST_COMFORTS = (3, 2, 1)
"""The most slots per pool, from generous to the least that works."""
LEAST = Comfort(prefetch_depth=0, num_buckets=1, max_slots_host=1)


@dataclass(kw_only=True)
class Needs:
    """Slot sizes that units need, and how many units need each."""

    sizes: dict[tuple[Tier, PoolKind], Counter[int]] = field(default_factory=dict)
    kept: set[tuple[Tier, PoolKind]] = field(default_factory=set)
    """Pools in which each unit keeps a slot to itself."""

    def add(self, needs: Iterable[Need], count: int = 1) -> None:
        """Add what ``count`` equal units need."""
        for need in needs:
            if need.is_kept:
                self.kept.add((need.tier, need.kind))
            sizes = self.sizes.get((need.tier, need.kind))
            if sizes is None:
                sizes = self.sizes[need.tier, need.kind] = Counter()
            sizes[need.nbytes] += count


def needs_of(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Iterator[Need]:
    """Yield the slots that one unit needs."""
    is_empty = bool(spec.trainable) and not spec.trainable_bytes  # its operations take slots, but use no byte of them
    for need in _needs(spec, unit, model):
        if need.nbytes:
            yield need
        elif is_empty and need.kind not in ("weights", "temporary"):
            yield need._replace(nbytes=PAGE_BYTES)


def _needs(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Iterator[Need]:
    yield Need("device", "weights", in_slot(spec, unit, "device"))
    yield Need("host", "weights", in_slot(spec, unit, "host"))
    if unit.activations != "device":
        yield Need("device", "activations", unit.saved_bytes)
    if unit.activations == "disk":
        yield Need("host", "activations", unit.saved_bytes)
    if spec.num_ranks > 1:
        yield Need("device", "bucket", spec.bucket_bytes, is_kept=spec.keeps_bucket)
        yield Need("device", "received", spec.bucket_bytes)
    elif spec.name and unit.gradients != "device":  # else gradients go home from where autograd made them
        yield Need("device", "bucket", spec.bucket_bytes)
    if not spec.trainable:
        return
    if sums_on_device(spec, unit):
        yield Need("device", "sums", spec.update_bytes)
    elif unit.gradients != "device":  # also with one micro-batch per step: a loop may step without zeroing
        yield Need("host", "landing", spec.bucket_bytes)
    yield from _update_needs(spec, unit, model)


def _update_needs(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Iterator[Need]:
    on_host = unit.is_updated_on_host
    made = max((p.temporary_bytes for p in spec.trainable if p.is_whole or not on_host), default=0)
    if on_host and any(p.draws_noise for p in spec.trainable):
        made += NOISE_BYTES
    if not on_host and has_compact(spec, unit):
        made += COMPACT_BYTES
    yield Need("host" if on_host else "device", "temporary", align_up(made, PAGE_BYTES))
    if unit.states == "device":
        yield Need("device", "scratch", min(SCRATCH_BYTES, spec.update_bytes))
        return
    if unit.update == "device":
        yield Need("device", "staging", align_up(staging(spec, unit, model).scratch[1], PAGE_BYTES))
        return
    if unit.weights != "host":
        yield Need("host", "new_weights", weights_home(spec, unit).updated_bytes)
    if unit.states == "disk":
        yield Need("host", "states", states_bytes(spec, unit, model))
    if unit.gradients != "host":
        yield Need("host", "gradients", spec.update_bytes)


def pools_for(model: ModelSpec, units: Sequence[UnitPlan], comfort: Comfort = LEAST) -> tuple[Pool, ...]:
    """Return the pools that a plan needs.

    Args:
        model: The model to train.
        units: Homes, in the order of ``model.units``.
        comfort: How many slots are wanted.
    """
    needs = Needs()
    for spec, unit in zip(model.units, units, strict=True):
        needs.add(needs_of(spec, unit, model))
    return tuple(build_pools(needs, comfort))


def build_pools(needs: Needs, comfort: Comfort) -> Iterator[Pool]:
    """Turn needs into pools, never with more slots than there are units to use them."""
    for key in POOL_ORDER:
        sizes = needs.sizes.get(key)
        if not sizes:
            continue
        wanted = comfort.num_slots(*key)
        if key == ("device", "temporary") and needs.sizes.keys() >= _UPDATES_THERE:
            wanted = 2
        if key in needs.kept:
            wanted = min(sum(sizes.values()), MAX_SLOTS)
        for slot_bytes, num_slots in _cut(sizes, wanted):
            yield _pool(*key, slot_bytes, num_slots)


@functools.lru_cache(4096)
def _pool(tier: Tier, kind: PoolKind, slot_bytes: int, num_slots: int) -> Pool:
    """Return a pool. Hundreds of plans share equal ones."""
    return Pool(tier=tier, kind=kind, slot_bytes=slot_bytes, num_slots=num_slots)


def _cut(sizes: Mapping[int, int], wanted: int) -> list[tuple[int, int]]:
    """Choose slots for units of given sizes: one pool, or two where a few large units would inflate every slot.

    Args:
        sizes: Bytes -> number of units of that size.
        wanted: Slots wanted in each pool.

    Returns:
        The choice that takes the least memory: pairs of slot bytes and number of slots, largest first.
    """
    largest, num_larger, num_units = max(sizes), 0, sum(sizes.values())
    best = [(largest, min(wanted, num_units))]
    if wanted == 1:
        return best
    for size in sorted(sizes, reverse=True):
        if num_larger:
            cut = [(largest, min(wanted, num_larger)), (size, min(wanted, num_units - num_larger))]
            best = min(best, cut, key=lambda pools: sum(size * slots for size, slots in pools))
        num_larger += sizes[size]
    return best


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
