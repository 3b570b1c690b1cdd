"""Kill trainings that save at every step, restart them until they are done, and check that nothing was lost.

Each life is a process: of a loop that calls ``save_checkpoint`` and ``load_checkpoint``, or of ``outcore train``. Or it
is two processes: the ranks of ``outcore train --nproc 2``, as torch's launcher starts them. It goes on from the newest
checkpoint, and is killed (SIGKILL) at a system call in a phase of a save, inside a load, or at any time. Of two ranks
one is killed, and the other must end by itself. After a life that committed nothing, the next is killed after its first
commit, so two lives in a row without a commit would be a run that is stuck. In the end weights, states and losses must
be those of a run that was not killed, with every step once in ``metrics.jsonl``.

python research/outside/checkpoint_kills.py --minutes 30 --report report.md
"""

from __future__ import annotations

import argparse
import collections
import gc
import hashlib
import importlib
import itertools
import json
import mmap
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]
from ranks.conftest import free_port  # noqa: E402

STEPS = 6
IN_A_SAVE = ("write", "manifest", "rename", "removal")
PHASES = (*IN_A_SAVE, "load", "any time")
CALLS = {
    "loop": {"write": 42, "manifest": 3, "rename": 2, "removal": 9, "load": 7},
    "train": {"write": 170, "manifest": 3, "rename": 2, "removal": 18, "load": 25},
    "ranks": {"write": 60, "manifest": 3, "rename": 2, "removal": 18, "load": 25},
}
"""Approximate number of system calls in each phase of a save or load."""
KINDS = tuple(itertools.product(("loop", "train", "ranks"), ("full", "lora"), ("device", "host", "disk")))
NUM_RANKS = 2
BUDGETS = {"full": ("200KiB", "400KiB"), "lora": ("80KiB", "76KiB")}
OF_RANKS = {"full": ("260KiB", "1300KiB"), "lora": ("160KiB", "400KiB")}
BOUND_S = 60.0
"""Time within which a rank ends once another one was killed."""


class Plan(NamedTuple):
    """Where a life is to end."""

    phase: str
    number: int
    """Number of calls of the phase before the kill; at any time: thousandths of the time that a whole life takes."""
    commits: int
    """Number of checkpoints that this life commits first."""
    rank: int = 0
    """Which of several processes is killed."""


class Life(NamedTuple):
    """How a life ended."""

    status: int
    begun: int
    """The step that it went on from; -1: it did not get that far."""
    durable: int
    """The last step that was reported durable."""
    text: str
    """A digest of what was trained, or the error."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the kills, and which kind of run comes first")
    parser.add_argument("--of", choices=("loop", "train", "ranks"), help="kill these alone")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if args.of in (None, kind[0])]
    first = args.seed % len(kinds)
    with tempfile.TemporaryDirectory() as folder:
        found = kill(Path(folder), args, (*kinds[first:], *kinds[:first]))
    print(shown(found, args.seed))
    return len(found["wrong"]) > 0


def shown(found: dict[str, Any], seed: int) -> str:
    """Format the counts as a page."""
    kills, programs = found["kills"], sorted({program for program, _ in found["kills"]})
    rows = [f"| what | {' | '.join(programs)} |", "|---|" + "---|" * len(programs)]
    for name in PHASES:
        rows.append(f"| kills, {name} | {' | '.join(str(kills[program, name]) for program in programs)} |")
    saving = (sum(kills[program, name] for name in IN_A_SAVE) for program in programs)
    rows.append(f"| kills inside a save | {' | '.join(map(str, saving))} |")
    for name, counts in found["counts"].items():
        rows.append(f"| {name} | {' | '.join(str(counts[program]) for program in programs)} |")
    wrong = ["", *found["wrong"][:20]] if found["wrong"] else ["", "Wrong: nothing."]
    return "\n".join([f"# Killed while saving\n\n`--seed {seed}`, {sum(kills.values()):,} kills\n", *rows, *wrong, ""])


def kill(folder: Path, args: Any, kinds: Any) -> dict[str, Any]:
    """Run and kill until there are enough kills; then finish the run that is under way."""
    rng, end_s = random.Random(args.seed), time.monotonic() + 60 * args.minutes
    counts: dict[str, Any] = collections.defaultdict(collections.Counter)
    found: dict[str, Any] = {"kills": collections.Counter(), "counts": counts, "wrong": []}
    wanted: dict[Any, tuple[str, float]] = {}
    for number in itertools.count():
        if sum(found["kills"].values()) >= args.kills or time.monotonic() > end_s:
            return found
        kind = kinds[number % len(kinds)]
        if kind not in wanted:
            begun_s = time.monotonic()
            life = lived(folder / f"want-{'-'.join(kind)}", kind, None)
            if life.status:
                raise RuntimeError(f"{kind}: {life.text}")
            wanted[kind] = life.text, time.monotonic() - begun_s
        _one_run(folder / f"run-{number}", kind, rng, found, *wanted[kind])
        if args.report:
            args.report.write_text(shown(found, args.seed))


def _one_run(folder: Path, kind: Any, rng: random.Random, found: dict[str, Any], want: str, whole_s: float) -> None:
    """Kill one training repeatedly until it is done."""
    program, counts, kills = kind[0], found["counts"], found["kills"]
    counts["runs"][program] += 1
    newest, in_a_row = -1, 0
    for number in range(40):
        plan = _plan(program, kills, rng, has_committed=in_a_row == 0, newest=newest) if number < 30 else None
        life = lived(folder, kind, plan, whole_s)
        before, newest = newest, _newest(folder / "c")
        counts["lives"][program] += 1
        counts["lives that committed"][program] += newest > before
        in_a_row = 0 if newest > before or life.status == 0 else in_a_row + 1
        most = counts["most lives in a row without a commit"]
        most[program] = max(in_a_row, most[program])
        where = f"{kind}, life {number} ({plan})"
        if in_a_row > 1:
            found["wrong"].append(f"{where}: committed nothing, as the one before; {life.text}")
        if newest < max(before, life.durable):
            found["wrong"].append(f"{where}: step {newest} is there, and {max(before, life.durable)} was")
        if life.begun not in (-1, max(before, 0)):
            found["wrong"].append(f"{where}: went on from step {life.begun}, and {before} was there")
        counts["lives that went on from a checkpoint"][program] += life.begun > 0
        if life.status == -signal.SIGKILL and plan is not None:
            kills[program, plan.phase] += 1
            continue
        if life.status != 0:
            found["wrong"].append(f"{where}: {life.text}")
        elif life.text != want:
            found["wrong"].append(f"{where}: other weights, states, losses or steps in the end")
        elif hidden := [path.name for path in (folder / "c").iterdir() if path.name.startswith(".")]:
            found["wrong"].append(f"{where}: {hidden} stayed behind")
        return
    found["wrong"].append(f"{kind}: not done after 40 lives")


def _plan(program: str, kills: Any, rng: random.Random, *, has_committed: bool, newest: int) -> Plan:
    """Choose the phase with the fewest kills; after a life without a commit, a place after the next commit."""
    phases = [phase for phase in (PHASES if has_committed else IN_A_SAVE) if phase != "load" or newest > 0]
    phase = min(phases, key=lambda phase: (kills[program, phase], rng.random()))
    number = rng.randrange(CALLS[program].get(phase, 1000))
    is_of_all = program == "ranks" and phase in ("write", "load", "any time")  # rank 0 does the rest
    commits = rng.choice((0, 0, 1, 2)) if has_committed else 1
    return Plan(phase, number, commits, rng.randrange(NUM_RANKS) if is_of_all else 0)


def _newest(folder: Path) -> int:
    """The newest step whose checkpoint passes its check."""
    from outcore.checkpoint.find_checkpoints import found_in
    from outcore.core.errors import ConfigError
    from outcore.memory.files.checkpoint_folder import read_manifest

    for step, path in found_in(folder):
        try:
            read_manifest(path, check=True)
        except ConfigError:
            continue
        return step
    return -1


def lived(folder: Path, kind: Any, plan: Plan | None, whole_s: float = 0.0) -> Life:
    """Run one life in its own process."""
    folder.mkdir(exist_ok=True)
    (folder / "c").mkdir(exist_ok=True)
    said = folder / "said"
    said.unlink(missing_ok=True)
    if kind[0] != "loop":
        _write_files(folder)
    told = mmap.mmap(-1, 8192)  # shared with the child
    told[:16] = struct.pack("qq", -1, -1)
    port = free_port()
    pids = [_begun(folder, kind, plan, told, rank, port) for rank in range(NUM_RANKS if kind[0] == "ranks" else 1)]
    first = 0 if plan is None else plan.rank
    if plan is not None and plan.phase == "any time":
        time.sleep(plan.number / 1000 * whole_s)
        os.kill(pids[first], signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pids[first], 0)[1])]
    text = told[16:].rstrip(b"\0").decode(errors="replace")
    for pid in pids:
        if pid != pids[first] and (status := _soon(pid)) is None:
            text, statuses = f"a rank did not end within {BOUND_S:g} s of the other", [1]
        elif pid != pids[first]:
            statuses.append(status)
    text = text or told[16:].rstrip(b"\0").decode(errors="replace")
    begun, durable = struct.unpack("qq", told[:16])
    if kind[0] != "loop" and said.exists() and (found := re.search(r", at step (\d+) of ", said.read_text())):
        begun = int(found[1])
    return Life(statuses[0] or max(statuses), begun, durable, text)


def _begun(folder: Path, kind: Any, plan: Plan | None, told: mmap.mmap, rank: int, port: str) -> int:
    """Begin a process of a life. Returns its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if kind[0] == "ranks":
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
        text, status = _what_came(folder, kind, plan if plan is not None and plan.rank == rank else None, told)
        end = text.encode(errors="replace")[16 - len(told) :]
        if end:
            told[16 : 16 + len(end)] = end
    finally:
        os._exit(status)


def _soon(pid: int) -> int | None:
    """Wait for a process whose other ranks have ended. Returns its status; None if it had to be killed."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _what_came(folder: Path, kind: Any, plan: Plan | None, told: mmap.mmap) -> tuple[str, int]:
    """Run a life that is not killed. Returns its text and its status."""
    try:
        return (_loop if kind[0] == "loop" else _train)(folder, kind, plan, told), 0
    except BaseException:
        return traceback.format_exc(), 1


class _Killer:
    """Kills this process at a call in a phase."""

    def __init__(self, plan: Plan | None) -> None:
        self._phase, self._left, self._commits, _ = plan or Plan("never", 0, 0)
        self._done = 0
        self._is_loading = True

    def __call__(self, call: Any, do: Any) -> Any:
        from outside.calls import phase_of

        phase = phase_of(call)
        self._is_loading &= phase != "write"
        if phase == self._phase and (phase != "load" or self._is_loading):
            self._strike()
        result = do()
        self._done += phase == "rename" and call.name in ("rename", "exchange")
        return result

    def _strike(self) -> None:
        if self._done >= self._commits:
            self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _loop(folder: Path, kind: Any, plan: Plan | None, told: mmap.mmap) -> str:
    """Load, train and save; die as planned."""
    from checkpoint import small

    import outcore
    from outside.calls import watched

    warnings.simplefilter("ignore")
    checkpoints = folder / "c"
    model = small.build("plain", num_blocks=1) if kind[1] == "full" else small.with_adapters(small.build("llama"))
    with small.prepared(model, folder, kind[2]) as (model, optimizer), watched(checkpoints, _Killer(plan), reads=True):
        first, losses = 0, []
        if any(checkpoints.glob("step-*")):
            extra = outcore.load_checkpoint(model, optimizer, checkpoints)
            first, losses = extra["step"], extra["losses"]
        told[:8] = struct.pack("q", first)
        for step in range(first, STEPS):
            losses += [float(loss) for loss in small.train(model, optimizer, range(step, step + 1))]
            is_last, options = step == STEPS - 1, {"extra": {"losses": losses}, "keep": 2}
            waits = is_last or step % 2 == 0
            outcore.save_checkpoint(model, optimizer, checkpoints, step=step + 1, wait=waits, **options)
            if waits:
                told[8:16] = struct.pack("q", step + 1)
        return state_digest(model, optimizer, losses)


def state_digest(model: Any, optimizer: Any, losses: list[float]) -> str:
    """A digest of weights, states and losses."""
    import torch

    import outcore

    found = hashlib.blake2b(repr(losses).encode())
    values = [tensor for _, tensor in outcore.named_tensors(model)]
    values += [torch.as_tensor(v) for state in optimizer.state_dict()["state"].values() for v in state.values()]
    for value in values:
        found.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _write_files(folder: Path) -> None:
    """Write what ``outcore train`` reads."""
    from command.conftest import CONFIG, write_json, write_jsonl

    write_json(folder / "model.json", {**CONFIG, "num_hidden_layers": 2, "attention_dropout": 0.1})
    write_jsonl(folder / "rows.jsonl", [{"prompt": f"{n} and {n} is ", "completion": f"{2 * n}"} for n in range(5)])


def _train(folder: Path, kind: Any, plan: Plan | None, told: mmap.mmap) -> str:
    """Run ``outcore train --resume auto``, with an evaluation after each epoch of three steps."""
    from outcore.command import main as cli
    from outside.calls import watched

    model, rows, out = folder / "model.json", folder / "rows.jsonl", folder / "c"
    rank = int(os.environ.get("RANK", "0"))
    device, host = (OF_RANKS if kind[0] == "ranks" else BUDGETS)[kind[1]]
    memory = {"device": [], "host": ["--device-memory", device]}
    memory["disk"] = [*memory["host"], "--host-memory", host, "--disk", str(folder)]
    size = 2 // NUM_RANKS if kind[0] == "ranks" else 2
    command = f"outcore train --steps {STEPS} --batch-size {size} --seq-len 32 --lr 1e-2 --save-every 1".split()
    command += [
        "--model",
        str(model),
        "--data",
        str(rows),
        "--eval-data",
        str(rows),
        "--out",
        str(out),
        *memory[kind[2]],
    ]
    command += [
        "--keep",
        "2",
        "--set",
        "eval_strategy=epoch",
        "--resume",
        "auto",
        *(["--lora", "2"] if kind[1] == "lora" else []),
    ]
    with (folder / ("said" if rank == 0 else f"said-{rank}")).open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.argv = command
    killer = _Killer(plan)
    try:
        with watched(out, killer, reads=True):
            cli.main()
    except SystemExit as stop:
        sys.stdout.flush()
        if stop.code:
            raise RuntimeError((folder / "said").read_text()) from stop
    return "" if rank else _trained(out)


def _trained(out: Path) -> str:
    """A digest of weights, states and metrics; each step once."""
    import torch
    from safetensors import safe_open

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["step"], "loss" in line) for line in lines]
    wanted = [(step, True) for step in range(1, STEPS + 1)] + [(3, False), (6, False)]
    if sorted(steps) != sorted(wanted):
        raise AssertionError(f"metrics.jsonl has {steps}")
    kept = ("step", "epoch", "loss", "lr", "grad_norm", "eval_loss")
    found = hashlib.blake2b(repr([{key: line.get(key) for key in kept} for line in lines]).encode())
    for folder in (out / f"checkpoint-{STEPS}", out / "model"):
        for path in sorted(folder.glob("*.safetensors")):  # tensors may be in another order
            with safe_open(path, "pt") as file:
                found.update(f"{path.name} {sorted(file.metadata().items())}".encode())
                for name in sorted(file.keys()):
                    tensor = file.get_tensor(name)
                    data = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
                    found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + data.tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    import nursery

    for name in (*nursery.IMPORTED, "checkpoint.small", "outside.calls", "command.conftest"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    sys.exit(main())
