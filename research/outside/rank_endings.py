"""Short runs on several ranks, which end while ranks are apart: ``python research/outside/rank_endings.py``.

See ``tests/ranks/endings.py``. A run is lost if a rank ends with an error, or if weights that a rank reads after the
last step are not those of the plain loop.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]
os.environ.setdefault("OUTCORE_HARDWARE", "none")
os.environ.setdefault("OUTCORE_TEST_IMPORTED", "numpy torch._dynamo torch.distributed outcore.api")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="half of them, or so, for each number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--batch", type=int, default=20, help="runs of one launch")
    options = parser.parse_args()
    from ranks.endings import endings, lost, run

    began_s, seed, num_runs = time.monotonic(), options.seed, 0
    wrong, counts = list[str](), collections.Counter[str]()
    while num_runs < options.runs:
        num_ranks, count = options.ranks[seed % len(options.ranks)], min(options.batch, options.runs - num_runs)
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
            found = lost(run(seed, count, num_ranks, folder), seed, count)
        wrong += found
        for ending in endings(seed, count):
            counts.update([f"{num_ranks} ranks", f"{ending.num_steps} steps", ending.kind, *set(ending.lanes)])
            counts.update([f"weights {ending.case.partition} {ending.case.gather}", f"homes {ending.case.homes}"])
        num_runs, seed = num_runs + count, seed + 1
        for text in found:
            print(text, flush=True)
        print(f"{num_runs} of {options.runs} runs, {len(wrong)} lost, {time.monotonic() - began_s:.0f} s", flush=True)
    print(json.dumps(dict(sorted(counts.items()))))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
