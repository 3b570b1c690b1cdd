"""Kill runs of ``outcore train`` on several ranks at any time, saves included, and resume them until they are done.

All ranks are killed at once (a machine that loses power or memory), or one of them, whose end the others must notice.
In the end the weights must be those of a run that was not killed, with every step once in ``metrics.jsonl``.

python tests/outside/command_kills.py --kills 60 --ranks 2
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OUTCORE_HARDWARE", "none")
from cli.conftest import CONFIG
from ranks.conftest import start

MAIN = "from outcore.cli.main import main; main()"
STEPS = 8
ARGUMENTS = [
    *("--device-memory", "260KiB", "--host-memory", "1500KiB", "--lr", "1e-3", "--batch-size", "1"),
    *("--seq-len", "32", "--device", "cpu", "--steps", str(STEPS), "--save-every", "1", "--keep", "2"),
    *("--grad-accum", "2", "--resume", "auto"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, found = random.Random(options.seed), collections.Counter()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "text.txt").write_text(" ".join(f"{n} bottles of beer on the wall," for n in range(150)))
        (folder / "tier").mkdir()
        for out in ("first", "whole"):  # the first also imports libraries
            whole_s = -time.monotonic()
            statuses, said = life(folder, out, options.ranks)
            assert not any(statuses), said
            whole_s += time.monotonic()
        while found["kills"] < options.kills:
            found["runs"] += 1
            one_run(folder, f"run-{found['runs']}", options.ranks, chance, whole_s, found)
            print(dict(found), flush=True)
    sys.exit(bool(found["wrong"]))


def one_run(
    folder: Path, out: str, num_ranks: int, chance: random.Random, whole_s: float, found: collections.Counter
) -> None:
    """Kill a run up to four times, then let it end."""
    for _ in range(4):
        rank = chance.choice([None, *range(num_ranks)])
        statuses, said = life(folder, out, num_ranks, after_s=chance.uniform(0.2, 0.9) * whole_s, rank=rank)
        if not any(statuses):
            break
        found["kills"] += 1
        found["of one rank"] += rank is not None
        found["in a save"] += any(path.name.startswith(".") for path in (folder / out).glob(".*checkpoint*"))
        found["behind a save"] += any((folder / out).glob("checkpoint-*"))
    else:
        statuses, said = life(folder, out, num_ranks)
    wrong = [f"{said}"] if any(statuses) else list(differences(folder / out, folder / "whole"))
    found["wrong"] += bool(wrong)
    for text in wrong:
        print(f"{out}: {text}", file=sys.stderr, flush=True)


def life(
    folder: Path, out: str, num_ranks: int, *, after_s: float | None = None, rank: int | None = None
) -> tuple[list[int], str]:
    """Run until the end, or kill ranks after some seconds. Args: rank: The rank to kill; None: all."""
    files = ["--model", str(folder / "config.json"), "--data", str(folder / "text.txt"), "--disk", str(folder / "tier")]
    ranks = start(MAIN, num_ranks, ["train", *files, *ARGUMENTS, "--out", str(folder / out)], timeout_s=30)
    deadline_s = time.monotonic() + (after_s or 0.0)
    while after_s is not None and time.monotonic() < deadline_s and any(each.poll() is None for each in ranks):
        time.sleep(0.01)
    for number, each in enumerate(ranks):
        if after_s is not None and rank in (None, number):
            each.kill()
    said = [each.communicate(timeout=300) for each in ranks]
    return [each.returncode for each in ranks], "\n".join(str(err)[-1500:] for _, err in said)


def differences(run: Path, whole: Path) -> list[str]:
    """Compare a run that was killed with one that was not."""
    from safetensors.torch import load_file

    mine, wanted = (load_file(each / "model" / "model.safetensors") for each in (run, whole))
    found = [f"weight '{name}' differs" for name in wanted if not wanted[name].equal(mine[name])]
    steps = [json.loads(line).get("step") for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if step is not None]
    return found + ([f"steps {trained}"] if sorted(set(trained)) != list(range(1, STEPS + 1)) else [])


if __name__ == "__main__":
    main()
