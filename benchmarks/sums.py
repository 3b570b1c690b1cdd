"""The cost of the disk tier's sums: as a rate, in transfers of the store, and in whole training steps.

Prints one JSON object. ``rates`` uses one thread, over memory that is in no cache: the sum, a copy, and ``zlib.crc32``.
``paced`` moves whole extents by a store with sums and by one without, both over a drive that takes known time and none
of the machine's cores. ``transfers`` does so over the real drive: if its bytes come from the memory of a virtual
machine's host, only cores bind. ``step`` is the disk plan of benchmarks/step.py, with weights and states on disk,
prepared twice. In each pair both run, and take turns to begin; ratios are taken within pairs, since machines are noisy.
``cpu_over`` is the same for the processor time of the whole process, and ``share_of_cpu`` is the part that sums take.

    python benchmarks/sums.py --disk /mnt/nvme --pairs 8
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import step
import torch
from measuring import context, spread

from outcore.core.quantities import parse_bytes
from outcore.memory import disk
from outcore.memory.checksums import Checksums, Segment
from outcore.memory.disk_file import OsDiskIO
from outcore.memory.host import HostMemory

GOAL_FRACTION = 0.02
NAMES = ("without", "with")
PACES = (0.5, 1, 3)  # GB/s


class NoSums:
    """The same segments, without any sums."""

    def __init__(self) -> None:
        self.real = Checksums()
        self.cover, self.segment = self.real.cover, self.real.segment

    def note(self, start: int, memory: memoryview) -> None:
        """Do nothing."""

    def wrong(self, start: int, memory: memoryview) -> Segment | None:
        """Return None: there is nothing to compare with."""


class TimedSums(NoSums):
    """Measures how long the threads work on sums."""

    spent_s: ClassVar[list[float]] = []

    def note(self, start: int, memory: memoryview) -> None:
        """See ``Checksums``."""
        start_s = time.thread_time()
        self.real.note(start, memory)
        self.spent_s.append(time.thread_time() - start_s)

    def wrong(self, start: int, memory: memoryview) -> Segment | None:
        """See ``Checksums``."""
        start_s = time.thread_time()
        found = self.real.wrong(start, memory)
        self.spent_s.append(time.thread_time() - start_s)
        return found


class PacedDrive(OsDiskIO):
    """A drive that takes time, one request after the other, and moves nothing: memory keeps what it held."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._free_s, self._lock = 0.0, threading.Lock()

    def pread(self, fd: int, memory: memoryview, offset: int) -> int:
        """See ``DiskIO``."""
        with self._lock:
            self._free_s = max(self._free_s, time.perf_counter()) + memory.nbytes / self.bytes_per_s
            end_s = self._free_s
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return memory.nbytes

    pwrite = pread


@contextmanager
def knowing(name: str) -> Iterator[None]:
    """Make stores opened inside have sums, or none. Args: name: ``with``, or anything else for none."""
    real = disk.Checksums
    disk.Checksums = TimedSums if name == "with" else NoSums  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        disk.Checksums = real  # type: ignore[misc]


def main() -> None:
    args = _arguments()
    report: dict[str, object] = {"benchmark": "sums", "goal_fraction": GOAL_FRACTION}
    parts = {"rates": rates, "paced": paced, "transfers": transfers, "step": steps}
    report |= {name: part(args) for name, part in parts.items() if name in args.parts}
    print(json.dumps(report | context()))


def rates(args: argparse.Namespace) -> dict[str, object]:
    """Return bytes per second of one thread."""
    nbytes = parse_bytes(args.nbytes, what="--nbytes")
    with HostMemory.open(nbytes) as memory, HostMemory.open(disk.STRIPE_BYTES) as other:
        memory.tensor.random_(generator=torch.Generator().manual_seed(0))
        known = Checksums()
        known.cover(0, nbytes)
        size = min(nbytes, disk.STRIPE_BYTES)
        pieces = [memory.tensor[at : at + size] for at in range(0, nbytes, size)]
        ways: dict[str, Callable[[int, torch.Tensor], object]] = {
            "sum": lambda i, piece: known.note(i * size, piece.numpy().data),
            "copy": lambda _, piece: other.tensor[: len(piece)].copy_(piece),
            "crc32": lambda _, piece: zlib.crc32(piece.numpy().data),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.pairs):
            for name, way in ways.items():
                start_s = time.perf_counter()
                for i, piece in enumerate(pieces):
                    way(i, piece)
                found[name].append(nbytes / (time.perf_counter() - start_s))
    return {f"{name}_bytes_per_s": spread(values) for name, values in found.items()}


def paced(args: argparse.Namespace) -> dict[str, object]:
    """Return the drive's rate in GB/s -> seconds for one extent."""
    drive, found = PacedDrive(), {}
    with _both_stores(args, drive) as moves:
        for rate in PACES:
            drive.bytes_per_s = 1e9 * rate
            found[f"{rate:g}"] = {verb: _in_pairs(both, args.pairs) for verb, both in moves.items()}
    return found


def transfers(args: argparse.Namespace) -> dict[str, object]:
    """Return the seconds for one extent."""
    with _both_stores(args, None) as moves:
        return {verb: _in_pairs(both, args.pairs) for verb, both in moves.items()}


@contextmanager
def _both_stores(args: argparse.Namespace, io: OsDiskIO | None) -> Iterator[dict[str, dict[str, Callable[[], None]]]]:
    nbytes = parse_bytes(args.nbytes, what="--nbytes")
    with ExitStack() as closing:
        memory = closing.enter_context(HostMemory.open(nbytes)).tensor
        memory.random_(generator=torch.Generator().manual_seed(0))
        moves: dict[str, dict[str, Callable[[], None]]] = {"write": {}, "read": {}}
        for name in NAMES:
            with knowing(name):
                store = closing.enter_context(disk.DiskStore.open([args.disk], nbytes, io=io))
            extent = store.take(nbytes, owner="benchmark")
            store.write(extent, memory)
            moves["write"][name] = partial(store.write, extent, memory)
            moves["read"][name] = partial(store.read, extent, memory)
        yield moves


def steps(args: argparse.Namespace) -> dict[str, object]:
    """Return the seconds for ``--steps`` steps."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocabulary, (args.batch_size, args.seq_len), generator=generator).to(args.device)
    batch = {"input_ids": tokens, "labels": tokens}
    runs: dict[str, Callable[[], None]] = {}
    for name in NAMES:
        with knowing(name):
            contestant = step.streamed("disk", step.build(args), batch, args.disk, args.device)

        def run(contestant: step.Contestant = contestant) -> None:
            for _ in range(args.steps):
                contestant.step()
            contestant.drain()

        run()
        runs[name] = run
    num_parameters = sum(p.numel() for p in step.build(args).parameters())
    return {"parameters": num_parameters, "tokens_per_step": tokens.numel()} | _in_pairs(runs, args.pairs)


def _in_pairs(both: dict[str, Callable[[], None]], pairs: int) -> dict[str, object]:
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    cpu_s: dict[str, list[float]] = {name: [] for name in NAMES}
    shares = []
    TimedSums.spent_s.clear()
    for pair in range(pairs):
        for name in NAMES[:: -1 if pair % 2 else 1]:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            both[name]()
            seconds[name].append(time.perf_counter() - start_s)
            cpu_s[name].append(time.process_time() - start_cpu_s)
            if name == "with":
                shares.append(sum(TimedSums.spent_s) / cpu_s[name][-1])
            TimedSums.spent_s.clear()
    return {
        **{f"{name}_s": spread(values) for name, values in seconds.items()},
        "over": spread([a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]),
        "cpu_over": spread([a / b for a, b in zip(cpu_s["with"], cpu_s["without"], strict=True)]),
        "share_of_cpu": spread(shares),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path(), help="folder of the disk tier")
    parser.add_argument("--parts", nargs="*", default=["rates", "paced", "transfers", "step"])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--nbytes", default="256MiB", help="of the rates and transfers; needed twice on disk")
    parser.add_argument("--steps", type=int, default=2, help="of one turn")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
