"""What saving and loading add to a process whose training state is larger than its control group's memory.

One process trains on the disk tier inside a control group, and saves during a step. A second one starts from other
weights and loads that checkpoint. A third one does both. The largest resident size of each is compared with that of a
step before. Weights, masters and moments must be the same when they are saved, in the files, and after loading.

python research/outside/checkpoint_memory.py --state-gib 8 --limit-mib 1024 --disk /mnt/nvme --report report.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]

WIDTH = 1280
BLOCK_BYTES = 14 * 2 * WIDTH * (WIDTH + 1)
"""Bytes of a block: bf16 weights, their masters and two moments."""
ALLOWED_MIB = 64
_OF = ("before", "of the files", "afterwards")
STEPS = 5
"""Steps that come before: the largest resident size differs from step to step."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-gib", type=float, default=8.0)
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("DIR", "WORK"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        num_blocks = max(2, round(args.state_gib * 2**30 / BLOCK_BYTES))
        print(json.dumps(measured(Path(args.child[0]), num_blocks, args.child[1])))
        return 0
    found = in_a_group(args.disk, args.state_gib, args.limit_mib)
    text = shown(found, args.state_gib, args.limit_mib)
    print(text)
    if args.report:
        args.report.write_text(text)
    return max(each["added, MiB"] for each in found.values()) > ALLOWED_MIB


def shown(found: dict[str, Any], state_gib: float, limit_mib: int) -> str:
    """Format the results as a page."""
    rows = [
        f"| {name} | " + " | ".join(f"{each[name]:,.1f}" for each in found.values()) + " |" for name in found["save"]
    ]
    return "\n".join(
        [
            f"# Memory of saving and loading\n\n`--state-gib {state_gib:g} --limit-mib {limit_mib}`\n",
            f"| | {' | '.join(found)} |\n|---|{'---|' * len(found)}",
            *rows,
            "",
        ]
    )


def in_a_group(disk: Path, state_gib: float, limit_mib: int) -> dict[str, dict[str, float]]:
    """Run each kind of work in a control group. Returns what was measured of each."""
    from system.test_container import memory_group

    found: dict[str, Any] = {}
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": str(2**20)}  # for containers; see docs/internals/memory.md
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        for work in ("save", "load", "save, load"):
            with memory_group(limit_mib * 2**20) as group:

                def join(group: Path = group) -> None:
                    (group / "cgroup.procs").write_text(str(os.getpid()))

                command = [sys.executable, __file__, "--state-gib", str(state_gib), "--child", folder, work]
                pipe = {"stdout": subprocess.PIPE, "text": True, "check": True}
                done = subprocess.run(command, preexec_fn=join, env=environment, **pipe)
            found[work] = json.loads(done.stdout)
    digests = [digest for each in found.values() for of in _OF if (digest := each.pop(f"digest {of}")) is not None]
    if len(set(digests)) > 1:
        raise RuntimeError(f"expected the weights, masters and moments that were saved, but got others: {digests}")
    for each in found.values():
        each["digests that are the same"] = len(digests)
    return found


def measured(folder: Path, num_blocks: int, what: str) -> dict[str, Any]:
    """Train, and save or load, and measure it."""
    import torch
    from torch import nn

    import outcore

    warnings.simplefilter("ignore")
    torch.manual_seed(what == "load")
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(num_blocks)]
        model: Any = nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1)).to(torch.bfloat16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    budget = outcore.Budget(device=4 * BLOCK_BYTES, host=4 * BLOCK_BYTES, disk=folder)
    with outcore.prepare(model, optimizer, budget=budget) as (model, optimizer):

        def step() -> None:
            model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            _weights(model)

        def save() -> None:
            handle = outcore.save_checkpoint(model, optimizer, folder / "c", step=1, keep=1)
            step()
            handle.wait()

        def load() -> None:
            outcore.load_checkpoint(model, optimizer, folder / "c")

        before_mib, steps_s = _peak(lambda: [step() for _ in range(STEPS)])
        before = _state(optimizer) if what == "save" else None
        peak_mib, took_s = _peak({"save": save, "load": load, "save, load": lambda: (save(), load())}[what])
        return {
            "weights, masters and moments, GiB": num_blocks * BLOCK_BYTES / 2**30,
            "on disk, GiB": optimizer.plan.tier_bytes["disk"] / 2**30,
            "largest resident size in a step, MiB": before_mib,
            "largest resident size meanwhile, MiB": peak_mib,
            "added, MiB": max(0.0, peak_mib - before_mib),
            "a step, with its update and the reading of all weights, s": steps_s / STEPS,
            "took, s": took_s,
            "digest before": before,
            "digest of the files": None if what == "load" else _of_files(folder / "c" / "step-00000001"),
            "digest afterwards": None if what == "save" else _state(optimizer),
        }


def _peak(work: Any) -> tuple[float, float]:
    """The largest resident size while ``work`` runs, and its seconds."""
    Path("/proc/self/clear_refs").write_text("5")
    begun_s = time.monotonic()
    work()
    took_s = time.monotonic() - begun_s
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 2**10, took_s


def _weights(model: Any) -> None:
    """Read all weights, which waits for updates."""
    import outcore

    for _ in outcore.named_tensors(model):
        pass


def _state(optimizer: Any) -> int:
    """A digest of weights, masters and moments, read one at a time."""
    from outcore.engine.values.access import own_states

    access, found = optimizer.engine.access, {}
    for unit in optimizer.engine.units:
        for i, spec in enumerate(unit.spec.params):
            found[f"model.{spec.name}"] = _digest([access.read_weight(unit, i)])
            for state in own_states(unit, i):
                found[f"optimizer.{spec.name}.{state.name}"] = _digest([access.read_state(unit, state.name, i)])
    return _digest([str(sorted(found.items())).encode()])


def _of_files(folder: Path) -> int:
    """The same digest, of the tensors in a checkpoint's files."""
    from outcore.memory.files.checkpoint_folder import read_manifest
    from outcore.memory.files.weights_file import WeightsDirectory

    found = {}
    for name, record in read_manifest(folder, check=False).tensors.items():
        files = [WeightsDirectory.open(folder, part.file.removesuffix(".safetensors")) for part in record.parts]
        found[name] = _digest(piece for file in files for piece in file.pieces(record.name or name, 2**22))
    return _digest([str(sorted(found.items())).encode()])


def _digest(pieces: Any) -> int:
    import torch

    found = 0
    for piece in pieces:
        data = piece if isinstance(piece, bytes) else piece.reshape(-1).view(torch.uint8).numpy().data
        found = zlib.crc32(data, found)
    return found


if __name__ == "__main__":
    sys.exit(main())
