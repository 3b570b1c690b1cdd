"""Kill trainings that save at every step, start them again until they are done, and look whether anything was lost.

Each life is a process. It loads the newest checkpoint, trains, and saves behind every step. It is killed (SIGKILL) at
a system call of a phase of a save, inside a load, or at any time. In the end weights, states and losses must be those
of a run that nobody has killed.

python tests/outside/checkpoint_kills.py --minutes 30 --report report.md
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEPS = 6
PHASES = ("write", "manifest", "rename", "removal", "load", "any time")
KINDS = tuple(itertools.product(("full", "lora"), ("device", "host", "disk")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the kills, and which kind of run comes first")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        first = args.seed % len(KINDS)
        kinds = (*KINDS[first:], *KINDS[:first])
        found = kill(Path(folder), args.kills, args.seed, seconds=60 * args.minutes, kinds=kinds)
    text = shown(found, args.seed)
    print(text)
    if args.report:
        args.report.write_text(text)
    return len(found["wrong"]) > 0


def shown(found: dict[str, Any], seed: int) -> str:
    """As a page."""
    rows = [f"| kills, {phase} | {found['kills'][phase]:,} |" for phase in PHASES]
    rows += [f"| {name} | {value:,} |" for name, value in found.items() if isinstance(value, int)]
    wrong = "\n".join(["", *found["wrong"][:20], ""])
    return f"# Killed while saving\n\n`--seed {seed}`\n\n| what | count |\n|---|---|\n" + "\n".join(rows) + wrong


def kill(folder: Path, num_kills: int, seed: int, *, seconds: float, kinds: Any = KINDS) -> dict[str, Any]:
    """Run and kill until there are so many kills; the run that is under way then is finished."""
    rng, end_s = random.Random(seed), time.monotonic() + seconds
    found: dict[str, Any] = {"kills": collections.Counter(), "runs": 0, "lives": 0, "lives that committed": 0}
    found |= {"most lives in a row without a commit": 0, "wrong": []}
    wanted: dict[tuple[str, str], str] = {}
    for number in itertools.count():
        if sum(found["kills"].values()) >= num_kills or time.monotonic() > end_s:
            return found
        kind = kinds[number % len(kinds)]
        if kind not in wanted:
            wanted[kind] = _lived(folder / f"want-{'-'.join(kind)}", kind, None)[1]
        _one_run(folder / f"run-{number}", kind, rng, found, wanted[kind])


def _one_run(folder: Path, kind: tuple[str, str], rng: random.Random, found: dict[str, Any], want: str) -> None:
    """One training, killed until it is done."""
    found["runs"] += 1
    committed, in_a_row = -1, 0
    for life in range(40):
        phase = PHASES[(found["lives"] + life) % len(PHASES)] if life < 30 else ""
        # Mostly behind its first save, so that a life gets somewhere.
        plan = (phase, rng.randrange(1, 120), rng.choice((0, 1, 1, 2))) if phase else None
        status, digest, was = _lived(folder, kind, plan)
        found["lives"] += 1
        newest = _newest(folder / "c")
        if newest < committed:
            found["wrong"].append(f"{kind}, life {life} ({plan}): step {newest} is there, and {committed} was before")
        found["lives that committed"] += newest > committed
        in_a_row = 0 if newest > committed else in_a_row + 1
        found["most lives in a row without a commit"] = max(in_a_row, found["most lives in a row without a commit"])
        committed = newest
        if status == -signal.SIGKILL:
            found["kills"][phase] += 1
        elif status != 0:
            found["wrong"].append(f"{kind}, life {life} ({plan}): {was}")
            return
        else:
            if digest != want:
                found["wrong"].append(f"{kind}, life {life}: other weights, states or losses in the end")
            hidden = [p.name for p in (folder / "c").iterdir() if p.name.startswith(".")]
            if hidden:
                found["wrong"].append(f"{kind}: {hidden} stayed behind")
            return
    found["wrong"].append(f"{kind}: not done after 40 lives")


def _newest(folder: Path) -> int:
    """Of those that check."""
    from outcore.core.errors import ConfigError
    from outcore.memory.checkpoint_folder import read_manifest
    from outcore.saving.found import found_in

    for step, path in found_in(folder):
        try:
            read_manifest(path, check=False)
        except ConfigError:
            continue
        return step
    return -1


def _lived(folder: Path, kind: tuple[str, str], plan: tuple[str, int, int] | None) -> tuple[int, str, str]:
    """How a life ended: status, digest of the result, and what it said."""
    folder.mkdir(exist_ok=True)
    told = mmap.mmap(-1, 4096)  # shared with the child
    pid = os.fork()
    if pid == 0:
        try:
            told.write(_live(folder, kind, plan).encode()[:4000])
            os._exit(0)
        except BaseException:
            told.write(traceback.format_exc()[-4000:].encode())
            os._exit(1)
    if plan is not None and plan[0] == "any time":
        time.sleep(plan[1] / 120 * 1.5)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = told[:].rstrip(b"\0").decode()
    return status, text, text


class _Killer:
    """Kills this process at a call of a phase."""

    def __init__(self, plan: tuple[str, int, int] | None) -> None:
        self._phase, number, self._at_save = plan or ("", 0, 0)
        self._left = number % {"write": 40, "removal": 12, "load": 12}.get(self._phase, 3)
        self.saves = 0

    def in_save(self, call: Any, do: Any) -> Any:
        from outside.calls import phase_of

        if self._phase == phase_of(call) and self.saves > self._at_save:
            self._strike()
        return do()

    def in_load(self, _: Any, do: Any) -> Any:
        if self._phase == "load":
            self._strike()
        return do()

    def _strike(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _live(folder: Path, kind: tuple[str, str], plan: tuple[str, int, int] | None) -> str:
    """Load, train, save; die as planned."""
    from saving import small

    import outcore
    from outside.calls import watched

    warnings.simplefilter("ignore")
    killer, checkpoints = _Killer(plan), folder / "c"
    model = small.build("plain", num_blocks=1) if kind[0] == "full" else small.with_adapters(small.build("llama"))
    checkpoints.mkdir(exist_ok=True)
    with small.prepared(model, folder, kind[1]) as (model, optimizer):
        first, losses = 0, []
        if any(checkpoints.glob("step-*")):
            with watched(checkpoints, killer.in_load, reads=True):
                extra = outcore.load_checkpoint(model, optimizer, checkpoints)
            first, losses = extra["step"], extra["losses"]
        with watched(checkpoints, killer.in_save):
            for step in range(first, STEPS):
                losses += [float(loss) for loss in small.train(model, optimizer, range(step, step + 1))]
                killer.saves += 1
                save = outcore.save_checkpoint(
                    model, optimizer, checkpoints, step=step + 1, extra={"losses": losses}, keep=2, wait=step % 2 == 0
                )
            if first < STEPS:
                save.wait()
        return _digest(model, optimizer, losses)


def _digest(model: Any, optimizer: Any, losses: list[float]) -> str:
    import torch

    import outcore

    found = hashlib.blake2b(repr(losses).encode())
    values = [tensor for _, tensor in outcore.named_tensors(model)]
    values += [torch.as_tensor(v) for state in optimizer.state_dict()["state"].values() for v in state.values()]
    for value in values:
        found.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    sys.exit(main())
