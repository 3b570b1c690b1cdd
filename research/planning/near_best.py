"""How close the search comes to the best of all plans, by the simulator, on small random models, machines and budgets.

    python -m planning.near_best --jobs 200 --seed 0          (in the folder research)

In half of the jobs it is known what units save. Their activations may rest on device, host and disk, saved by any
policy, of all units or of half. A quarter of the jobs promise what updates inside backward need.

For up to three units (two where activations may leave) the best is sought among all arrangements of homes. For more it
is sought among all arrangements in one or two runs and 60 random ones. Each arrangement comes with many, few and random
slots, with the device updating no unit, half of them, or all, with none, half or all of the others updated inside
backward, and with every way to save activations. A plan whose lower bound is above the step of the search cannot be
better, and is not simulated. Where activations may leave, three in ten arrangements of the larger models are tried.
Each comes with two kinds of slots, with every way for all units, and with one way for half of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from planner.models import even_footprint, layered

from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.placement import place
from outcore.planner.homes.pools import Comfort, UnitHomes
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import KINDS, ROOMY, TIGHT, Candidate, PlanSpace
from outcore.planner.search.search import search
from outcore.planner.timing.profile import Profile
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import simulate
from outcore.spec.budget import Limits
from outcore.spec.plan import POLICIES, Plan
from outcore.spec.schedule import usual_visits
from planning.bound.bound import bound_of, busiest_s

MIB = 2**20
RANDOM_ARRANGEMENTS = 60
SOME = 0.3
"""Share of arrangements tried for four to six units where activations may leave: there are many times as many plans."""


def random_job(chance: random.Random, most_units: int = 6) -> PlanQuestion:
    """A small model that does not fit on the device, on a machine of any balance, with room for some of everything."""
    count, layer = chance.randint(1, most_units), chance.choice([MIB // 2, MIB])
    model = layered(count, root=chance.choice([0, MIB // 4]), layer=layer)
    state, forward_s = 18 * layer, 10 ** chance.uniform(-3.5, -2.5)
    names = [unit.name for unit in model.units]
    speeds = {link: 10 ** chance.uniform(8.9, 10.2) for link in ("h2d", "d2h")}
    speeds |= {link: 10 ** chance.uniform(8.5, 9.7) for link in ("disk_read", "disk_write")}
    rates = Rates(
        forward_s=dict.fromkeys(names, forward_s),
        backward_s=dict.fromkeys(names, 2 * forward_s),
        bytes_per_s=speeds,
        parameters_per_s={"update": 10 ** chance.uniform(8.3, 9.5), "device_update": 3e10, "compute": 3e10},
    )
    limits = Limits(
        device_bytes=int(chance.uniform(0.5, 0.5 + 0.8 * count) * state),
        host_bytes=int(chance.uniform(0.4, 1.5 * count + 1) * state),
        disk_bytes=int(3 * count * state) if chance.random() < 0.7 else None,
    )
    job = PlanQuestion(model=model, limits=limits, machine=rates, micro_batches=chance.choice([1, 1, 2]))
    if chance.random() < 0.25:
        job = dataclasses.replace(job, clipping=False)
    return with_activations(job, chance) if chance.random() < 0.5 else job


def with_activations(job: PlanQuestion, chance: random.Random) -> PlanQuestion:
    """Add activations to a job: what units save is known, takes a part of the device, and may rest anywhere."""
    names = [unit.name for unit in job.model.units[1:]]
    given, kept = (align_up(int(chance.uniform(*s) * 18 * MIB), PAGE_BYTES) for s in ((0.02, 0.1), (0.1, 0.8)))
    footprint = even_footprint(names, given=given, selected=align_up(kept // 3, PAGE_BYTES), kept=kept)
    chosen: list[ActivationPolicy | None] = [
        None,
        ActivationPolicy("device", "select"),
        *(ActivationPolicy("host", p) for p in POLICIES),
    ]
    chosen += [ActivationPolicy("disk", policy) for policy in POLICIES] if job.limits.disk_bytes else []
    again_s = {name: 0.4 * s for name, s in job.rates.forward_s.items()}
    return dataclasses.replace(
        job,
        machine=dataclasses.replace(job.rates, selected_forward_s=again_s),
        limits=dataclasses.replace(job.limits, device_bytes=job.limits.device_bytes + 2 * kept),
        activation_share=0.1,
        profile_of=lambda _: Profile({}, footprint),
        ways=tuple(chosen),
    )


def arrangements(count: int, most_whole: int, chance: random.Random) -> Iterator[tuple[UnitHomes, ...]]:
    """Homes of all units but the root. Args: most_whole: Largest number of units that get all arrangements."""
    if count <= most_whole:
        yield from itertools.product(KINDS, repeat=count)
        return
    yield from ((kind,) * count for kind in KINDS)
    for near, far in itertools.permutations(KINDS, 2):
        yield from ((near,) * n + (far,) * (count - n) for n in range(1, count))
    for _ in range(RANDOM_ARRANGEMENTS):
        yield tuple(chance.choice(KINDS) for _ in range(count))


def candidates(job: PlanQuestion, chance: random.Random) -> Iterator[Candidate]:
    """Yield the plans among which the best is sought."""
    roots = (KINDS[0], KINDS[2], KINDS[-1]) if job.model.units[0].params else (KINDS[0],)
    halves = [way._replace(share=0.5) for way in job.ways if way is not None and len(job.model.units) > 2]
    early = (0.0, 0.5, 1.0) if not job.clipping else (0.0,)
    whole = 3 if len(job.ways) == 1 else 2
    for kinds, root in itertools.product(arrangements(len(job.model.units) - 1, whole, chance), roots):
        if len(job.ways) > 1 and len(kinds) > whole and chance.random() > SOME:
            continue
        shares = (0.0, 0.5, 1.0) if any(kind.states == "host" for kind in (root, *kinds)) else (0.0,)
        slots = [chance.randint(*span) for span in ((0, 3), (1, 4), (1, 4))]
        other = Comfort(prefetch_depth=slots[0], num_buckets=slots[1], max_slots_host=slots[2])
        comforts = (ROOMY, TIGHT, other) if len(job.ways) == 1 else (chance.choice([ROOMY, other]), TIGHT)
        ways = (*job.ways, *chance.sample(halves, min(len(halves), 1)))
        for comfort, share, some, away in itertools.product(comforts, shares, early, ways):
            yield Candidate((root, *kinds), comfort, share, some, saves=away)


def step_s(job: PlanQuestion, plan: Plan, away: ActivationPolicy | None = None) -> float:
    """Seconds of a step, simulated with a longer warm-up than the search uses."""
    visits, run = usual_visits(job.model, job.micro_batches), job.as_run(plan, away)
    return simulate(job.model, run, job.rates, visits, Circumstances(clips=job.clipping), warm_up=6).step_s


def best_s(job: PlanQuestion, enough_s: float, chance: random.Random) -> tuple[float, Candidate | None]:
    """Return the shortest step below ``enough_s`` and its plan."""
    steps = job.promised_steps
    choice = PlanSpace(job.model, accumulation_steps=steps, may_be_early=not job.clipping)
    visits, clips = usual_visits(job.model, job.micro_batches), Circumstances(clips=job.clipping)
    best: tuple[float, Candidate | None] = (enough_s, None)
    for candidate in candidates(job, chance):
        room, taken = job.room(candidate.saves), choice.tier_bytes(candidate)
        if any(taken[tier] > room[tier] for tier in room):
            continue
        plan = choice.plan(candidate)
        facts = (job.model, job.as_run(plan, candidate.saves), job.rates, visits, clips)
        if busiest_s(*facts)[0] < best[0] and bound_of(*facts).seconds < best[0]:
            seconds = step_s(job, plan, candidate.saves)
            best = min(best, (seconds, candidate), key=lambda pair: pair[0])
    return best


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one job."""

    seed: int
    units: int
    over_best: float
    """The step of the search's plan over the best step."""
    over_today: float
    more_is_slower: float
    """The largest slowdown caused by half as much memory again in one tier."""
    search_s: float
    better: str


def compare(seed: int, *, most_units: int = 6, with_more: bool = False) -> Row | None:
    """Compare the search with the best. Returns None if nothing fits."""
    chance = random.Random(seed)
    job = random_job(chance, most_units)
    try:
        start_s = time.process_time()
        found = search(job)
        search_s = time.process_time() - start_s
        today = place(job.model, job.limits, activations=job.activations(None))
    except PlanInfeasibleError:
        return None
    seconds = step_s(job, found.plan, found.candidate.saves)
    best, candidate = best_s(job, seconds, chance)
    losses = [1.0]
    for tier in ("device", "host", "disk") if with_more else ():
        if getattr(job.limits, f"{tier}_bytes") is None:
            continue
        more = int(1.5 * getattr(job.limits, f"{tier}_bytes"))
        limits = dataclasses.replace(job.limits, **{f"{tier}_bytes": more})
        roomier = search(dataclasses.replace(job, limits=limits))
        losses.append(roomier.simulation.step_s / found.simulation.step_s)
    better = "" if candidate is None else str(candidate)
    units = len(job.model.units) - 1
    return Row(seed, units, seconds / best, seconds / step_s(job, today), max(losses), search_s, better)


def report(rows: list[Row], *, detail: bool) -> str:
    """Format the rows as a page."""
    ratios = sorted(row.over_best for row in rows)
    counts = Counter(row.units for row in rows)
    near = {most: sum(ratio <= most for ratio in ratios) / len(ratios) for most in (1.0 + 1e-9, 1.02, 1.05)}
    lines = [
        f"{len(rows)} jobs: {', '.join(f'{n} of {units} units' for units, n in sorted(counts.items()))}.",
        "",
        f"- the best of all: {near[1.0 + 1e-9]:.1%}; within 2%: {near[1.02]:.1%}; within 5%: {near[1.05]:.1%}",
        f"- worst: {ratios[-1]:.4f} of the best",
        f"- faster than the filling by tiers in {sum(row.over_today < 0.999 for row in rows)}, "
        f"slower in {sum(row.over_today > 1 + 1e-9 for row in rows)}; "
        f"median {sorted(row.over_today for row in rows)[len(rows) // 2]:.3f} of its step",
        f"- half as much again of device, host or disk: slower by more than 1% in "
        f"{sum(row.more_is_slower > 1.01 for row in rows)}, at most {max(row.more_is_slower for row in rows):.4f}",
        f"- seconds of a search: median {sorted(row.search_s for row in rows)[len(rows) // 2]:.2f}, "
        f"most {max(row.search_s for row in rows):.2f}",
    ]
    if detail:
        worst = sorted(rows, key=lambda row: -row.over_best)[:8]
        lines += ["", *(f"- seed {r.seed}, {r.units} units: {r.over_best:.4f}; {r.better}" for r in worst)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", action="store_true", help="also search with half as much again of each tier")
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--rows", type=Path, help="File of rows that were made before; new ones are added to it.")
    given = parser.parse_args()
    rows = []
    if given.rows is not None and given.rows.exists():
        rows = [Row(**json.loads(line)) for line in given.rows.read_text().splitlines()]
    for seed in range(given.seed, given.seed + given.jobs):
        row = compare(seed, with_more=given.more) if all(known.seed != seed for known in rows) else None
        rows += [row] if row is not None else []
        if row is not None and given.rows is not None:
            with given.rows.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    print(report(rows, detail=given.detail))


if __name__ == "__main__":
    main()
