"""How all ranks end if one of them dies, stalls, fails or does not do what the others do.

python research/outside/rank_faults.py --runs 100 --jobs 3
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]
KINDS = "dies stalls is_interrupted skips asks fails_in_prepare fills_the_drive does_alone"
os.environ.setdefault("OUTCORE_HARDWARE", "none")
os.environ.setdefault("OUTCORE_TEST_IMPORTED", "numpy torch._dynamo torch.distributed outcore.api")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="in which the fault was reached, of each kind")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds that ranks wait; more on a busy machine")
    parser.add_argument("--kinds", nargs="+", default=KINDS.split())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["OUTCORE_TEST_TIMEOUT_S"] = str(options.timeout)
    from ranks.watched import draw, run

    num_wrong = 0
    print("| fault | reached | not reached | wrong | late | others heard of it: median, longest | had ended |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        faults = [draw(kind, options.seed + number, options.ranks) for number in range(3 * options.runs)]
        verdicts, waits, points = [], collections.Counter(), collections.Counter()
        for start in range(0, len(faults), options.jobs):
            with ThreadPoolExecutor(options.jobs) as pool:
                batch = faults[start : start + options.jobs]
                for fault, verdict in zip(batch, pool.map(lambda one: run(one, options.ranks), batch), strict=True):
                    verdicts.append(verdict)
                    points[fault.point] += verdict.is_reached
                    waits.update(map(_short, verdict.where))
                    for wrong in verdict.wrong:
                        print(f"wrong: {fault}: {wrong}", file=sys.stderr, flush=True)
            if sum(verdict.is_reached for verdict in verdicts) >= options.runs:
                break
        reached = [verdict for verdict in verdicts if verdict.is_reached]
        late = sum(any(text.startswith("took") for text in verdict.wrong) for verdict in verdicts)
        wrong = sum(any(not text.startswith("took") for text in verdict.wrong) for verdict in verdicts)
        num_wrong += wrong + late
        heard = [verdict.seconds for verdict in reached]
        ended = max((verdict.ended_s for verdict in reached), default=0.0)
        print(
            f"| {kind} | {len(reached)} | {len(verdicts) - len(reached)} | {wrong} | {late} | "
            f"{statistics.median(heard):.1f} s, {max(heard):.1f} s | {ended:.1f} s |",
            flush=True,
        )
        print(f"{kind}: {dict(points)}; others: {dict(waits.most_common())}", file=sys.stderr, flush=True)
    sys.exit(bool(num_wrong))


def _short(text: str) -> str:
    """What a rank was waiting for, without names and numbers."""
    found = re.search(r"expected all ranks to (.+?)(?:, but| with the same settings)", text)
    found = found or re.search(r"expected (.+?), ", text)
    return re.sub(r"'.*?'", "U", found[1]) if found else text[:40]


if __name__ == "__main__":
    main()
