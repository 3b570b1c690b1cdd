"""Runs whose ranks do not end at the same moment: none may be lost, and all have the bits of an undisturbed run.

python tests/outside/last_steps.py --runs 200 --ranks 2 3
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OUTCORE_HARDWARE", "none")
os.environ.setdefault("OUTCORE_TEST_IMPORTED", "numpy torch._dynamo torch.distributed outcore.api")
from ranks.conftest import launch_and_wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="of all numbers of ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--batch", type=int, default=20, help="runs of one launch; the first that is lost ends it")
    options = parser.parse_args()
    whole = lost = 0
    for first in range(0, options.runs, options.batch):
        num_ranks = options.ranks[first // options.batch % len(options.ranks)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = [str(options.seed + first), str(options.batch), folder]
            code = "from ranks.last_steps import main; main(sys.argv[1:])"
            ended = launch_and_wait(code, num_ranks, arguments, timeout_s=60)
        if any(status for status, _, _ in ended):
            lost += 1
            print("\n".join(err[-1500:] for _, _, err in ended), file=sys.stderr, flush=True)
        else:
            whole += options.batch
        print(f"{whole} runs whole, {lost} lost ({num_ranks} ranks, seeds from {options.seed + first})", flush=True)
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
