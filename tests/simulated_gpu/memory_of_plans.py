"""Hold the device's own counter of memory against random plans. Prints a table in Markdown.

python tests/simulated_gpu/run.py tests/simulated_gpu/memory_of_plans.py --count 50
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["OUTCORE_TEST_DEVICE"] = "cuda"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from memory_tests import check, most_beside_the_plan, random_case, train

KIB = 1024
COLUMNS = ("plan", "policy, where activations rest", "planned", "prepared", "between steps", "in a step", "at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    print("|", " | ".join(COLUMNS), "|")
    print("|", " | ".join("---" for _ in COLUMNS), "|")
    for seed in range(parser.parse_args().count):
        print("|", " | ".join(row(seed)), "|", flush=True)


def row(seed: int) -> list[str]:
    """What is planned, and what there is beside it."""
    case = random_case(seed)
    with tempfile.TemporaryDirectory() as folder:
        seen = train(case, Path(folder))
    check(case, seen)
    more = [f"share {case.share:.2g}"] * bool(case.share) + ["early"] * case.early + ["minimal"] * case.is_minimal
    beside = [seen.prepared - seen.planned, seen.between_steps - seen.planned, seen.peak - seen.prepared]
    numbers = [seen.planned, *beside, most_beside_the_plan(case.name, case.policy)]
    resting = f"{case.policy}, {case.activations}" if case.policy != "recompute" else case.policy
    return [", ".join([case.kind, *more]), resting, *(f"{n / KIB:.0f}" for n in numbers)]


if __name__ == "__main__":
    main()
