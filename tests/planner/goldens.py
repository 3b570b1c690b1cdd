"""Plans and visits whose schedules are kept as text. Run as a module to write them anew, then read the difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import schedule
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.schedule import Phase, Visit, usual_visits

from .models import unit

FOLDER = Path(__file__).parent / "golden"
HOST, DISK, DEVICE = ("host",) * 3, ("disk",) * 3, ("device",) * 3


def model(names: str, frozen: str = "", precision: str = "bf16") -> ModelSpec:
    """A root and a unit per letter; each kind of data has a different size, so that kinds can be told apart."""
    units = [unit("", 500, precision=precision)]
    units += [unit(n, 0 if n in frozen else 3000, 3000 if n in frozen else 0, precision=precision) for n in names]
    return ModelSpec(units=tuple(units), state_names=("exp_avg", "exp_avg_sq"), precision=precision)


def plan(
    spec: ModelSpec,
    *homes: tuple[str, str, str],
    slots: int,
    depth: int | None = None,
    early: str = "",
    staged: str = "",
    **pools: int,
) -> Plan:
    """A plan; the root's weights are resident. Args: homes: Weights, gradients and states of the units after the root.

    ``early``, ``staged``: Letters of the units that are updated inside backward, or by the device.
    """
    units = [UnitPlan(name="", weights="device", gradients=homes[0][1], states=homes[0][2])]
    for i, spec_of in enumerate(spec.units[1:]):
        weights, gradients, states = homes[i % len(homes)]
        if not spec_of.trainable:
            gradients = states = weights
        units.append(UnitPlan(name=spec_of.name, weights=weights, gradients=gradients, states=states))
    units = [replace(u, early=u.name in early and bool(u.name)) for u in units]
    units = [replace(u, update="device" if u.name in staged and u.name else "host") for u in units]
    steps = 1 if early else None
    comfort = {"num_buckets": 2, "max_slots_host": 2, **pools}
    return Plan(
        precision=spec.precision,
        units=tuple(units),
        pools=pools_for(spec, units, Comfort(prefetch_depth=slots - 1, **comfort)),
        prefetch_depth=slots - 1 if depth is None else depth,
        accumulation_steps=steps,
    )


def visits(spec: ModelSpec, text: str) -> tuple[Visit, ...]:
    """Parse ``"Fa Fb Bb Ba"``: forward of a and b, then backward. ``I`` is inference; no letter means the root."""
    phases = {"F": Phase.FORWARD, "B": Phase.BACKWARD, "I": Phase.INFERENCE}
    names = [u.name for u in spec.units]
    return tuple(Visit(phases[word[0]], names.index(word[1:])) for word in text.split())


def _cases() -> dict[str, tuple[ModelSpec, Plan, tuple[Visit, ...]]]:
    four, five, half = model("abcd"), model("abcde"), model("abcd", frozen="ab")
    mixed = (("device", "host", "host"), ("disk", "host", "disk"), ("host", "disk", "host"), DEVICE)
    return {
        "host_1_slot": (four, plan(four, HOST, slots=1), usual_visits(four)),
        "host_2_slots": (four, plan(four, HOST, slots=2), usual_visits(four)),
        "host_3_slots_2_micro_batches": (five, plan(five, HOST, slots=3), usual_visits(five, 2)),
        "disk_2_slots": (four, plan(four, DISK, slots=2), usual_visits(four)),
        "disk_3_states_slots": (
            five,
            plan(five, ("host", "host", "disk"), slots=2, max_slots_host=3),
            usual_visits(five),
        ),
        "disk_3_states_slots_in_turn": (
            five,
            replace(plan(five, ("host", "host", "disk"), slots=2, max_slots_host=3), kept_updated_first=False),
            usual_visits(five),
        ),
        "early_2_slots": (four, plan(four, HOST, ("disk", "disk", "disk"), slots=2, early="abd"), usual_visits(four)),
        "on_the_device_2_slots": (
            four,
            plan(four, HOST, ("device", "device", "host"), slots=2, staged="bcd"),
            usual_visits(four),
        ),
        "mixed_2_slots": (four, plan(four, *mixed, slots=2), usual_visits(four)),
        "frozen_2_slots_evaluation": (
            half,
            plan(half, HOST, slots=2),
            visits(half, "Ia Ib Ic Id Fa Fb Fc Fd F Bd Bc"),
        ),
        "block_used_twice": (four, plan(four, HOST, slots=2), visits(four, "Fa Fb Fb Fc F Bc Bb Bb Ba")),
        "two_forwards_one_backward": (
            four,
            plan(four, HOST, slots=3, depth=0),
            visits(four, "Fa Fb Fc Fd Fa Fb Fc Fd Bd Bc Bb Ba Bd Bc Bb Ba"),
        ),
    }


CASES = _cases()


def text(name: str) -> str:
    """Return the schedule of a case as text."""
    return schedule(*CASES[name]).to_text()


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(text(case))
