"""The floor of a step: what no order of a plan's operations can beat, from bytes and rates alone. See docs/overlap.md.

[Note: two parts] A step falls into two parts. The *window* is its first forward: all that changes weights for it lies
between ``step()`` and its end, unless it runs early. The *rest* is every backward, and every other forward, up to the
next ``step()``. Within a part everything may overlap, so a part lasts as long as the resource with the most work in
it, and the step as long as both parts; or as long as the resource with the most work in the whole step, if that is
more. What slips from the rest into the window, or behind it, is at most what slots hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from outcore.spec.layout import has_master, staging, states_bytes
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, PoolKind, Tier, UnitPlan

Resource = Literal["compute", "h2d", "d2h", "disk_read", "disk_write", "update", "device_update"]
"""What works at one rate. All that goes the same way shares a link, whatever its lane: ``h2d`` serves fetches, weights
written back and states on their way to an update on the device; ``disk_read`` serves weights and states."""
RESOURCES: tuple[Resource, ...] = get_args(Resource)

_Part = Literal["window", "rest", "anywhere"]
_Pairs = Sequence[tuple[UnitSpec, UnitPlan]]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a machine is. What is left out takes no time."""

    forward_s: Mapping[str, float]
    """Unit -> seconds of its forward over one micro-batch."""
    backward_s: Mapping[str, float]
    """Unit -> seconds of its backward over one micro-batch, without recompute."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """``h2d``, ``d2h``, ``disk_read``, ``disk_write`` -> bandwidth."""
    parameters_per_s: Mapping[str, float] = field(default_factory=dict)
    """``update`` (by the CPU), ``device_update`` (states from host memory, beside compute), ``compute`` (states that
    live on the device, in ``step()``) -> parameters updated per second."""

    def move_s(self, resource: Resource, nbytes: int) -> float:
        """Seconds to move bytes."""
        return nbytes / self.bytes_per_s.get(resource, math.inf)

    def update_s(self, resource: Resource, spec: UnitSpec) -> float:
        """Seconds to update a unit."""
        return sum(p.numel for p in spec.trainable) / self.parameters_per_s.get(resource, math.inf)


@dataclass(frozen=True)
class Floor:
    """Seconds that each resource must work. See [Note: two parts]."""

    window_s: Mapping[Resource, float]
    rest_s: Mapping[Resource, float]
    total_s: Mapping[Resource, float]
    """In the whole step."""

    @property
    def seconds(self) -> float:
        """No step is shorter."""
        return max(max(self.rest_s.values()) + max(self.window_s.values()), max(self.total_s.values()))

    @property
    def binding(self) -> str:
        """What binds: one resource, or one in the rest and another in the window, such as ``compute + update``."""
        rest, window, total = (max(part, key=part.__getitem__) for part in (self.rest_s, self.window_s, self.total_s))
        if rest == window or self.seconds > self.rest_s[rest] + self.window_s[window]:
            return total
        return f"{rest} + {window}"


class _Job(NamedTuple):
    part: _Part
    resource: Resource
    seconds: float


def floor_of(model: ModelSpec, plan: Plan, rates: Rates, *, accumulation_steps: int = 1) -> Floor:
    """Work out the floor of a step.

    Args:
        model: Units in the order of forward, the root first.
        plan: Where they live, and how many slots they share.
        rates: Of the machine.
        accumulation_steps: Micro-batches per step.
    """
    pairs = list(zip(model.units, plan.units, strict=True))
    work: defaultdict[tuple[_Part, Resource], float] = defaultdict(float)
    for spec, unit in pairs:
        for job in (
            *_compute(spec, unit, rates, accumulation_steps),
            *_gradients(spec, unit, rates, accumulation_steps),
            *_update(spec, unit, rates, model),
        ):
            work[job.part, job.resource] += job.seconds
    for job in (
        *_fetches(pairs, plan, rates, accumulation_steps),
        *_kept(pairs, plan, rates, model, accumulation_steps),
    ):
        work[job.part, job.resource] += job.seconds
    late_s = {job[:2]: job.seconds for job in _late(pairs, plan, rates)}

    def part(name: _Part) -> dict[Resource, float]:
        return {r: max(work[name, r] - late_s.get((name, r), 0.0), 0.0) for r in RESOURCES}

    total = {r: work["window", r] + work["rest", r] + work["anywhere", r] for r in RESOURCES}
    return Floor(part("window"), part("rest"), total)


def _compute(spec: UnitSpec, unit: UnitPlan, rates: Rates, num_batches: int) -> Iterator[_Job]:
    forward_s, backward_s = rates.forward_s.get(spec.name, 0.0), rates.backward_s.get(spec.name, 0.0)
    if unit.policy == "recompute":
        backward_s += forward_s
    yield _Job("window", "compute", forward_s)
    yield _Job("rest", "compute", num_batches * backward_s + (num_batches - 1) * forward_s)


def _fetches(pairs: _Pairs, plan: Plan, rates: Rates, num_batches: int) -> Iterator[_Job]:
    """Every forward and backward passes over all weights; what slots hold at its end, the next one need not fetch."""
    slots = _slots(plan, "device", "weights")
    links: list[tuple[Resource, tuple[Tier, ...], int]] = [
        ("h2d", ("host", "disk"), slots),
        ("disk_read", ("disk",), slots + _slots(plan, "host", "weights")),
    ]
    for link, tiers, kept in links:
        swept = [(spec, unit) for spec, unit in pairs if unit.weights in tiers]
        nbytes = sum(spec.weight_bytes for spec, _ in swept)
        changed = sum(spec.weight_bytes for spec, _ in swept if spec.trainable)
        yield _Job("rest", link, (2 * num_batches - 1) * rates.move_s(link, max(nbytes - kept, 0)))
        yield _Job("window", link, rates.move_s(link, changed + max(nbytes - changed - kept, 0)))


def _kept(pairs: _Pairs, plan: Plan, rates: Rates, model: ModelSpec, num_batches: int) -> Iterator[_Job]:
    """What updates need not read, since it is in slots still: states of the last ones, gradients that came last."""
    trained = [(spec, unit) for spec, unit in pairs if spec.trainable]
    last_in = "landing" if num_batches == 1 else "gradients"
    num_slots = sum(p.num_slots for p in plan.pools if p.kind == last_in)
    spared = sum(max(p.num_slots - 1, 1) * p.slot_bytes for p in plan.pools if (p.tier, p.kind) == ("host", "states"))

    def kept(units: _Pairs) -> int:
        states = sum(states_bytes(spec, unit, model) for spec, unit in units if unit.states == "disk")
        gradients = sorted((spec.update_bytes for spec, unit in units if unit.gradients == "disk"), reverse=True)
        return min(states, spared) + sum(gradients[:num_slots])

    late = kept([(spec, unit) for spec, unit in trained if not unit.early])
    yield _Job("window", "disk_read", -rates.move_s("disk_read", late))
    yield _Job("anywhere", "disk_read", -rates.move_s("disk_read", kept(trained) - late))


def _gradients(spec: UnitSpec, unit: UnitPlan, rates: Rates, num_batches: int) -> Iterator[_Job]:
    """On their way home. Those of the root need no slot, so nothing keeps them from leaving late."""
    if unit.gradients != "device":
        part: _Part = "rest" if spec.name else "anywhere"
        yield _Job(part, "d2h", num_batches * rates.move_s("d2h", spec.trainable_bytes))
    if unit.gradients == "disk":
        added = (num_batches - 1) * spec.update_bytes
        yield _Job("anywhere", "disk_write", rates.move_s("disk_write", spec.trainable_bytes + added))
        yield _Job("anywhere", "disk_read", rates.move_s("disk_read", added))


def _update(spec: UnitSpec, unit: UnitPlan, rates: Rates, model: ModelSpec) -> Iterator[_Job]:
    """All that lies between a unit's last gradient and its next fetch."""
    if unit.states == "device":
        yield _Job("window", "compute", rates.update_s("compute", spec))
        return
    if unit.update == "device":
        yield from _staged_update(spec, unit, rates, model)
        return
    part: _Part = "anywhere" if unit.early else "window"
    states = states_bytes(spec, unit, model) if unit.states == "disk" else 0
    read = states + (spec.update_bytes if unit.gradients == "disk" else 0)
    write = states + (spec.trainable_bytes if unit.weights == "disk" else 0)
    yield _Job(part, "update", rates.update_s("update", spec))
    yield _Job(part, "d2h", rates.move_s("d2h", spec.update_bytes if unit.gradients == "device" else 0))
    yield _Job(part, "h2d", rates.move_s("h2d", spec.trainable_bytes if unit.weights == "device" else 0))
    yield _Job(part, "disk_read", rates.move_s("disk_read", read))
    yield _Job(part, "disk_write", rates.move_s("disk_write", write))


def _staged_update(spec: UnitSpec, unit: UnitPlan, rates: Rates, model: ModelSpec) -> Iterator[_Job]:
    """States in host memory that pass through the device."""
    states, gradients, weights, _ = (stop - start for start, stop in staging(spec, unit, model))
    there = states + gradients + (0 if has_master(unit, model.precision) else weights)
    back = states + (weights if unit.weights == "host" else 0)
    yield _Job("window", "h2d", rates.move_s("h2d", there))
    yield _Job("window", "device_update", rates.update_s("device_update", spec))
    yield _Job("anywhere", "d2h", rates.move_s("d2h", back))


def _late(pairs: _Pairs, plan: Plan, rates: Rates) -> Iterator[_Job]:
    """Work that may lie outside of its part: what is in slots at its end, or its beginning."""
    if any(unit.early for _, unit in pairs):
        yield _Job("window", "h2d", rates.move_s("h2d", _slots(plan, "device", "weights")))
        fetched = _slots(plan, "device", "weights") + _slots(plan, "host", "weights")
        yield _Job("window", "disk_read", rates.move_s("disk_read", fetched))
    written = _slots(plan, "host", "states") + _slots(plan, "host", "new_weights")
    yield _Job("window", "disk_write", rates.move_s("disk_write", written))
    # The last gradient is that of the unit that forward needs first; the window cannot begin before it is home.
    first = next((unit for spec, unit in pairs if spec.name and spec.trainable), None)
    if first is not None and first.gradients == "device":
        yield _Job("rest", "d2h", rates.move_s("d2h", _slots(plan, "device", "bucket")))


def _slots(plan: Plan, tier: Tier, kind: PoolKind) -> int:
    return sum(pool.total_bytes for pool in plan.pools if (pool.tier, pool.kind) == (tier, kind))
