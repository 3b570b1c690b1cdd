"""Two searches over the same random settings: the steps of the plans that they find, and processor time.

    python -m planning.compare_searches rows NEW.jsonl 1000 1090        (in the folder research, at each commit)
    python -m planning.compare_searches table OLD.jsonl NEW.jsonl

A third of the settings are small models of equal layers, as in ``near_best``. A third have 9 to 24 such layers and up
to four micro-batches. A third are models of unequal units on machines of any balance, as in ``random_steps``. Half of
the first two know what units save. Steps are simulated anew, with a longer warm-up than a search uses. Settings in
which nothing fits are left out.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from outcore.core.errors import PlanInfeasibleError
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import search
from outcore.spec.budget import Limits

from .near_best import random_job, step_s
from .random_steps import random_model, random_rates


def mixed(chance: random.Random) -> PlanQuestion:
    """Draw a model of unequal units, a machine, and room for some of it."""
    model = random_model(chance)
    rates = random_rates(model, chance)
    count = len(model.units)
    state = sum(18 * param.numel for unit in model.units for param in unit.params) // count
    largest = max(unit.weight_bytes for unit in model.units)
    limits = Limits(
        device_bytes=int(chance.uniform(1.0, 1.0 + 0.6 * count) * state + 3 * largest),
        host_bytes=int(chance.uniform(0.4, 1.5 * count + 1) * state),
        disk_bytes=int(3 * count * state) if chance.random() < 0.7 else None,
    )
    asked = PlanQuestion(model=model, limits=limits, machine=rates, micro_batches=chance.choice([1, 1, 2]))
    return dataclasses.replace(asked, clipping=False) if chance.random() < 0.25 else asked


def setting(seed: int) -> tuple[str, PlanQuestion]:
    """Return the kind of a setting, and what is asked."""
    chance = random.Random(seed)
    if seed % 3 == 0:
        return "small", random_job(chance, 6)
    if seed % 3 == 2:
        return "mixed", mixed(chance)
    asked = random_job(chance, 24)
    while len(asked.model.units) < 10:
        asked = random_job(chance, 24)
    return "layers", dataclasses.replace(asked, micro_batches=chance.choice([1, 1, 2, 4]))


def write_rows(path: Path, first: int, last: int) -> None:
    """Search, and add a row for each setting to a file."""
    for seed in range(first, last):
        kind, asked = setting(seed)
        start_s = time.process_time()
        try:
            found = search(asked)
        except PlanInfeasibleError:
            continue
        took_s = time.process_time() - start_s
        row = {"seed": seed, "kind": kind, "step_s": step_s(asked, found.plan, found.candidate.saves), "took_s": took_s}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def rows_of(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a file by seed."""
    return {row["seed"]: row for row in map(json.loads, path.read_text().splitlines())}


def print_table(old: dict[int, dict[str, Any]], new: dict[int, dict[str, Any]]) -> None:
    """Print how the new search does beside the old one."""
    print("| settings | number | mean | best | worst | over 1.03 | processor seconds, old | new | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios = {seed: new[seed]["step_s"] / old[seed]["step_s"] for seed in sorted(old.keys() & new.keys())}
    for kind in ("small", "layers", "mixed", ""):
        seeds = [seed for seed in ratios if not kind or old[seed]["kind"] == kind]
        some = [ratios[seed] for seed in seeds]
        before_s, after_s = (sum(rows[seed]["took_s"] for seed in seeds) for rows in (old, new))
        print(
            f"| {kind or 'all'} | {len(some)} | {statistics.mean(some):.4f} | {min(some):.3f} | {max(some):.3f} "
            f"| {sum(ratio > 1.03 for ratio in some)} | {before_s:.0f} | {after_s:.0f} | {after_s / before_s:.2f} |"
        )
    far = ", ".join(f"{seed}: {ratio:.3f}" for seed, ratio in ratios.items() if abs(ratio - 1) > 0.01)
    print(f"\nBeyond 1%: {far}")


def main() -> None:
    what, *given = sys.argv[1:]
    if what == "rows":
        write_rows(Path(given[0]), int(given[1]), int(given[2]))
    else:
        print_table(*(rows_of(Path(name)) for name in given))


if __name__ == "__main__":
    main()
