"""Which slots a plan needs: a pure function of where everything lives.

The size of a slot follows from the homes (``needs_of``). The number of slots is a preference (``Comfort``), from double
buffering down to the one slot that suffices.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.spec.cut import in_slot, weights_home
from outcore.spec.layout import (
    COMPACT_BYTES,
    NOISE_BYTES,
    SCRATCH_BYTES,
    has_compact,
    staging,
    states_bytes,
    sums_on_device,
)
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import MAX_SLOTS, Pool, PoolKind, Tier, UnitPlan

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
