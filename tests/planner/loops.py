"""Random plans and training loops, with any homes, slots and order of visits."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, takewhile

from hypothesis import strategies as st
from plans import share_updates

from outcore.planner.homes.pools import Comfort, pools_for
from outcore.spec.budget import can_be_early
from outcore.spec.model import ModelSpec
from outcore.spec.plan import TIERS, Plan, UnitPlan
from outcore.spec.schedule import Phase, Visit

from .models import unit

LEGAL = [(w, g, s) for w in TIERS for g in TIERS for s in TIERS if s != "device" or w == g == "device"]


@st.composite
def loops(draw: st.DrawFn) -> tuple[ModelSpec, Plan, tuple[Visit, ...]]:
    """Draw a model, a plan for it, and the visits of a step."""
    spec = draw(_models())
    homes = [draw(st.sampled_from([h for h in LEGAL if i or h[0] == "device"])) for i in range(len(spec.units))]
    order, units = draw(_visits(len(spec.units))), []
    for of, (weights, gradients, states) in zip(spec.units, homes, strict=True):
        rest = (gradients, states) if of.trainable else (weights, weights)
        homes_of = UnitPlan(name=of.name, weights=weights, gradients=rest[0], states=rest[1])
        is_used = bool(of.name) or _begins_with_root(order)  # otherwise nothing gives the root gradients
        is_early = is_used and can_be_early(of, homes_of) and draw(st.booleans())
        units.append(replace(homes_of, early=is_early))
    units = share_updates(units, draw(st.sampled_from([0.0, 0.5, 1.0])))
    steps = None
    if any(u.early for u in units):
        steps = max(1, sum(phase is Phase.BACKWARD for phase, _ in groupby(visit.phase for visit in order)))
    comfort = Comfort(
        prefetch_depth=draw(st.integers(0, 3)),
        num_buckets=draw(st.integers(1, 2)),
        max_slots_host=draw(st.integers(1, 4)),
    )
    plan = Plan(
        precision=spec.precision,
        units=tuple(units),
        pools=pools_for(spec, units, comfort),
        prefetch_depth=draw(st.integers(0, 3)),
        accumulation_steps=steps,
    )
    return spec, plan, order


def _begins_with_root(order: tuple[Visit, ...]) -> bool:
    """Whether the root is used before the first backward."""
    return Visit(Phase.FORWARD, 0) in takewhile(lambda visit: visit.phase is not Phase.BACKWARD, order)


@st.composite
def _models(draw: st.DrawFn) -> ModelSpec:
    """Draw a model with few units; most are alike, some frozen, some of another size."""
    sizes = st.sampled_from([(3000, 0), (3000, 0), (3000, 500), (0, 3000), (9000, 0)])
    units = [unit("", draw(st.sampled_from([0, 500])))]
    units += [unit(name, *draw(sizes)) for name in "abcde"[: draw(st.integers(1, 5))]]
    names = draw(st.sampled_from([(), ("exp_avg", "exp_avg_sq")]))
    return ModelSpec(units=tuple(units), state_names=names, precision="bf16")


@st.composite
def _visits(draw: st.DrawFn, num_units: int) -> tuple[Visit, ...]:
    """Draw micro-batches that use units in any order, some twice; some steps begin with an evaluation."""
    used = st.lists(st.integers(1, num_units - 1), max_size=7)
    order = [Visit(Phase.INFERENCE, i) for i in draw(st.one_of(st.just([]), used))]
    for _ in range(draw(st.integers(1, 2))):
        forward = draw(st.one_of(used, st.just(list(range(1, num_units)))))
        backward = forward[draw(st.integers(0, 2)) :]  # the first units may be frozen
        order += [Visit(Phase.FORWARD, i) for i in forward] + [Visit(Phase.FORWARD, 0)] * draw(st.integers(0, 1))
        order += [Visit(Phase.BACKWARD, i) for i in reversed(backward)]
    return tuple(order)
