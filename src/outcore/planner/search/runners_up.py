"""Simple plans that anyone would think of, and why they were not chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outcore.core.quantities import format_bytes
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.pools import UnitHomes
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_space import ALL_DEVICE, ALL_DISK, ALL_HOST, Candidate
from outcore.spec.plan import Plan

SMALLEST_GAIN = 1e-4
"""The smallest gain, as a fraction of a step, that is worth another plan."""


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen."""

    name: str
    step_s: float | None
    """Seconds of a step; None if the plan does not fit."""
    reason: str


def uniform(looks: Evaluations, away: ActivationPolicy | None) -> dict[str, Candidate]:
    """Return plans in which all units have the same homes, by name. Some may not fit."""
    named = {"everything on the device": ALL_DEVICE, "all in host memory": ALL_HOST, "all on disk": ALL_DISK}
    named["states on disk, the rest in host memory"] = UnitHomes("host", "host", "disk")
    return {name: looks.choice.uniform(kind, saves=away) for name, kind in named.items()}


def runners_up(looks: Evaluations, bare: Plan, away: ActivationPolicy | None, step_s: float) -> Iterator[RunnerUp]:
    """Yield simple plans, and why each lost.

    Args:
        looks: What is known of candidates.
        bare: The plan that was chosen, without activations that leave.
        away: What becomes of its activations.
        step_s: Seconds of its step.
    """
    others: Iterable[tuple[str, Plan, ActivationPolicy | None]] = [
        ("filled tier by tier", looks.today, looks.job.ways[0])
    ]
    for name, candidate in uniform(looks, away).items():
        missing = looks.missing(candidate)
        if missing:
            needs = ", ".join(f"{format_bytes(nbytes)} of {tier}" for tier, nbytes in missing.items())
            yield RunnerUp(name, None, f"does not fit: it lacks {needs}")
        else:
            others = itertools.chain(others, [(name, looks.plan(candidate), away)])
    for name, other, way in others:
        simulation = looks.simulation(other, way)
        binds = max(simulation.binding, key=simulation.binding.__getitem__, default="compute")
        slower = simulation.step_s / step_s - 1 if step_s else 0.0
        same = "equally fast" if slower > -SMALLEST_GAIN else f"predicted {-slower:.1%} faster"
        reason = f"{slower:.1%} slower: limited by {binds}" if slower > SMALLEST_GAIN else same
        if (other.units, other.pools, way) != (bare.units, bare.pools, away):
            yield RunnerUp(name, simulation.step_s, reason)
