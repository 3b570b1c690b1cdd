"""Hold the device's own counter of memory against what shapes tell of random steps. Prints a table in Markdown.

python tests/simulated_gpu/run.py tests/simulated_gpu/footprint_of_plans.py --count 50
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

os.environ["OUTCORE_TEST_DEVICE"] = "cuda"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from footprint_tests import DEAR, bytes_of, random_case

from outcore.model import expensive_operations as dear

KIB = 1024
COLUMNS = ("seed", "model", "policies", "they rest", "all else", "pieces", "beside: planned", "seen", "ratio", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed")
    args = parser.parse_args()
    print("|", " | ".join((*COLUMNS, "peak", "ratio")), "|")
    print("|", " | ".join("---" for _ in (*COLUMNS, "", "")), "|")
    beside, whole = [], []
    for seed in range(args.first, args.first + args.count):
        case = random_case(seed)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(dear, "DEAR_FLOP_PER_BYTE", DEAR):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = bytes_of(case, Path(folder))
        beside.append(found.seen / found.planned)
        whole.append(found.peak / found.plan)
        what = (
            f"{case.model} {case.numbers}",
            " ".join(p[0] for p in case.policies),
            " ".join(t[:2] for t in case.tiers),
        )
        numbers = [f"{n / KIB:.0f}" for n in (found.planned, found.seen)]
        totals = [f"{n / KIB:.0f}" for n in (found.plan, found.peak)]
        row = str(seed), *what, case.homes, str(case.pieces), *numbers, f"{beside[-1]:.3f}", *totals, f"{whole[-1]:.3f}"
        print("|", " | ".join(row), "|", flush=True)
    for name, ratios in (("beside", beside), ("whole", whole)):
        print(f"\n{name}: least {min(ratios):.3f}, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
