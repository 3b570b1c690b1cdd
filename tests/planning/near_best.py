"""How near the best of all plans the search comes, by the simulator, on small random models, machines and budgets.

    python -m planning.near_best --jobs 200 --seed 0          (in the folder tests)

The best is sought among all arrangements of homes for up to three units. For four to six it is sought among all
arrangements in one or two runs and 60 random ones. Each comes with many and few slots, and with the device updating no
unit, half of them, or all. What has a lower bound above the step that the search found cannot be better, and is not
simulated.
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

from outcore.core.errors import PlanInfeasibleError
from outcore.planning.bound.bound import bound_of, busiest_s
from outcore.planning.homes.placement import place
from outcore.planning.paper.schedule import Circumstances, usual_visits
from outcore.planning.search.candidates import KINDS, ROOMY, TIGHT, Candidate, Choice, Kind
from outcore.planning.search.search import Job, search
from outcore.planning.timing.rates import Rates
from outcore.planning.timing.simulate import simulate
from outcore.spec.budget import Limits
from outcore.spec.plan import Plan

from .models import layered

MIB = 2**20
RANDOM_ARRANGEMENTS = 60


def random_job(chance: random.Random, most_units: int = 6) -> Job:
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
    return Job(model=model, limits=limits, rates=rates, micro_batches=chance.choice([1, 1, 2]))


def arrangements(count: int, chance: random.Random) -> Iterator[tuple[Kind, ...]]:
    """Homes of all units but the root."""
    if count <= 3:
        yield from itertools.product(KINDS, repeat=count)
        return
    yield from ((kind,) * count for kind in KINDS)
    for near, far in itertools.permutations(KINDS, 2):
        yield from ((near,) * n + (far,) * (count - n) for n in range(1, count))
    for _ in range(RANDOM_ARRANGEMENTS):
        yield tuple(chance.choice(KINDS) for _ in range(count))


def step_s(job: Job, plan: Plan) -> float:
    """As the search settles it."""
    visits = usual_visits(job.model, job.micro_batches)
    return simulate(job.model, plan, job.rates, visits, Circumstances(clips=job.clipping), warm_up=4).step_s


def best_s(job: Job, enough_s: float, chance: random.Random) -> tuple[float, Candidate | None]:
    """The shortest step below ``enough_s`` and its plan."""
    choice = Choice(job.model, policy=job.policy, accumulation_steps=None, may_be_early=False)
    room = (job.limits.device_bytes, job.limits.host_bytes, job.limits.disk_bytes or 0)
    visits, clips = usual_visits(job.model, job.micro_batches), Circumstances(clips=job.clipping)
    best: tuple[float, Candidate | None] = (enough_s, None)
    roots = (KINDS[0], KINDS[2], KINDS[-1]) if job.model.units[0].params else (KINDS[0],)
    for kinds, root in itertools.product(arrangements(len(job.model.units) - 1, chance), roots):
        shares = (0.0, 0.5, 1.0) if any(kind.states == "host" for kind in (root, *kinds)) else (0.0,)
        for comfort, share in itertools.product((ROOMY, TIGHT), shares):
            candidate = Candidate((root, *kinds), comfort, share)
            taken = choice.tier_bytes(candidate).values()
            if any(nbytes > most for nbytes, most in zip(taken, room, strict=True)):
                continue
            plan = choice.plan(candidate)
            facts = (job.model, plan, job.rates, visits, clips)
            if busiest_s(*facts)[0] < best[0] and bound_of(*facts).seconds < best[0]:
                seconds = step_s(job, plan)
                best = min(best, (seconds, candidate), key=lambda pair: pair[0])
    return best


@dataclasses.dataclass(frozen=True)
class Row:
    """One job."""

    seed: int
    units: int
    over_best: float
    """What the search found, over the best."""
    over_today: float
    more_is_slower: float
    """The largest loss that a half more of one tier brought."""
    search_s: float
    better: str


def compare(seed: int, *, most_units: int = 6, with_more: bool = True) -> Row | None:
    """None: nothing fits."""
    chance = random.Random(seed)
    job = random_job(chance, most_units)
    try:
        start_s = time.process_time()
        found = search(job)
        search_s = time.process_time() - start_s
        today = place(job.model, job.limits)
    except PlanInfeasibleError:
        return None
    seconds = step_s(job, found.plan)
    best, candidate = best_s(job, seconds, chance)
    losses = [1.0]
    for tier in ("device", "host") if with_more else ():
        more = int(1.5 * getattr(job.limits, f"{tier}_bytes"))
        limits = dataclasses.replace(job.limits, **{f"{tier}_bytes": more})
        roomier = search(dataclasses.replace(job, limits=limits))
        losses.append(roomier.simulation.step_s / found.simulation.step_s)
    better = "" if candidate is None else f"{candidate.kinds} {candidate.comfort} share {candidate.share}"
    units = len(job.model.units) - 1
    return Row(seed, units, seconds / best, seconds / step_s(job, today), max(losses), search_s, better)


def report(rows: list[Row], *, detail: bool) -> str:
    """As a page."""
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
        f"- half as much again of device or host memory: slower by more than 1% in "
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
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--rows", type=Path, help="File of rows that were made before; new ones are added to it.")
    given = parser.parse_args()
    rows = []
    if given.rows is not None and given.rows.exists():
        rows = [Row(**json.loads(line)) for line in given.rows.read_text().splitlines()]
    for seed in range(given.seed, given.seed + given.jobs):
        row = compare(seed) if all(known.seed != seed for known in rows) else None
        rows += [row] if row is not None else []
        if row is not None and given.rows is not None:
            with given.rows.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    print(report(rows, detail=given.detail))


if __name__ == "__main__":
    main()
