"""Hold the device's own counter of memory against random plans. Prints a table in Markdown.

python tests/simulated_gpu/run.py tests/simulated_gpu/memory_of_plans.py --count 50
python tests/simulated_gpu/run.py tests/simulated_gpu/memory_of_plans.py --count 50 --footprint
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ["OUTCORE_TEST_DEVICE"] = "cuda"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from memory_tests import check, most_beside_the_plan, planned_and_seen, random_case, random_policies, train

from outcore.model import expensive_operations as dear

KIB = 1024
COLUMNS = ("plan", "policy, where activations rest", "planned", "prepared", "between steps", "in a step", "at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--footprint", action="store_true", help="what shapes tell of one step against what it takes")
    args = parser.parse_args()
    if args.footprint:
        print_footprints(args.count)
        return
    print("|", " | ".join(COLUMNS), "|")
    print("|", " | ".join("---" for _ in COLUMNS), "|")
    for seed in range(args.count):
        print("|", " | ".join(row(seed)), "|", flush=True)


def print_footprints(count: int) -> None:
    """What was planned from shapes, what the device counted, and the second over the first."""
    print("| policies | where they rest | everything else | pieces | planned KiB | seen KiB | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    ratios = []
    for seed in range(count):
        policies, tiers, homes, pieces = random_policies(seed)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(dear, "DEAR_FLOP_PER_BYTE", 30):
            planned, seen = planned_and_seen(seed, Path(folder))
        ratios.append(seen / planned)
        resting = " ".join(tier[:2] for tier in tiers), homes, str(pieces)
        numbers = f"{planned / KIB:.0f}", f"{seen / KIB:.0f}", f"{ratios[-1]:.3f}"
        print("|", " | ".join([" ".join(p[0] for p in policies), *resting, *numbers]), "|", flush=True)
    print(f"\nleast {min(ratios):.3f}, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}")


def row(seed: int) -> list[str]:
    """What is planned, and what there is beside it."""
    case = random_case(seed)
    with tempfile.TemporaryDirectory() as folder:
        seen = train(case, Path(folder))
    check(case, seen)
    more = [f"share {case.share:.2g}"] * bool(case.share) + ["early"] * case.early + ["minimal"] * case.is_minimal
    more += [f"{case.pieces} pieces"] * (case.pieces > 1)
    beside = [seen.prepared - seen.planned, seen.between_steps - seen.planned, seen.peak - seen.prepared]
    numbers = [seen.planned, *beside, most_beside_the_plan(case.name, case.policy)]
    resting = f"{case.policy}, {case.activations}" if case.policy != "recompute" else case.policy
    return [", ".join([case.kind, *more]), resting, *(f"{n / KIB:.0f}" for n in numbers)]


if __name__ == "__main__":
    main()
