"""Random models, plans and delays on ranks, each against the plain loop: ``python research/outside/ranks.py``."""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(TESTS)]
os.environ.setdefault("OUTCORE_HARDWARE", "none")
os.environ.setdefault("OUTCORE_TEST_IMPORTED", "numpy torch._dynamo torch.distributed outcore.api")

RUN = "from ranks.cases import main; main(sys.argv[1:])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--fixed", action="store_true", help="the cases of the suite instead")
    parser.add_argument("--first", type=int, default=0, help="number of the first of these")
    parser.add_argument("--cut", action="store_true", help="weights are cut over ranks")
    parser.add_argument("--loop", default="6 3", help="micro-batches of all ranks in a step, and steps")
    parser.add_argument("--batch", type=int, default=20, help="cases of one launch")
    parser.add_argument("--per-node", type=int, help="ranks on a machine, which is all of them otherwise")
    options = parser.parse_args()
    os.environ["OUTCORE_TEST_LOOP"] = options.loop
    from ranks.cases import CASES, CUT, Case, plain, random_cases
    from ranks.conftest import launch

    began_s = time.monotonic()
    fixed = (CUT if options.cut else CASES)[options.first :][: options.cases]
    cases = fixed if options.fixed else list(random_cases(options.seed, options.cases, cut=options.cut))
    wrong = 0
    machine = {"LOCAL_WORLD_SIZE": str(options.per_node)} if options.per_node else {}
    for start in range(0, len(cases), options.batch):
        batch = cases[start : start + options.batch]
        wanted = [plain(case) for case in batch]
        told: dict[int, list[dict[str, object]]] = {}
        for num_ranks in options.ranks:
            with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
                said = launch(RUN, num_ranks, [json.dumps(batch), folder], timeout_s=300, limit_s=1500, **machine)
            ranks = [[json.loads(line) for line in of_rank.splitlines()] for of_rank in said]
            assert all(one == ranks[0] for one in ranks), "ranks differ from one another"
            told[num_ranks] = ranks[0]
        for i, case in enumerate(batch):
            # One rank adds gradients of a block that is called twice in another order (docs/reference/exceptions.md).
            counts = [num_ranks for num_ranks in options.ranks if num_ranks > 1 or case.kind != "backwards"]
            found = [told[num_ranks][i] for num_ranks in counts]
            if any(one != found[0] for one in found) or found[0]["weights"] != wanted[i]:
                wrong += 1
                print(f"wrong: {case.name}: {wanted[i]} {found}", flush=True)
        print(f"{start + len(batch)} of {len(cases)}, {wrong} wrong, {time.monotonic() - began_s:.0f} s", flush=True)
    for field in Case._fields:
        counts = collections.Counter(getattr(case, field) for case in cases)
        print(field, dict(counts) if len(counts) < 10 else f"{len(counts)} values")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
