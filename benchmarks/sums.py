"""What the sums of the disk tier cost: as a rate, in transfers of the store, and in whole training steps.

Prints one JSON object. ``rates`` has one thread, over memory that is in no cache: the sum, a copy, and ``zlib.crc32``.
``transfers`` moves whole extents by a store with sums and by one without. ``step`` is the disk plan of
benchmarks/step.py, with weights and states on disk, prepared twice. In each pair both run, and the one that begins
changes; ratios are taken within pairs, since machines are noisy. ``cpu_over`` is the same for the processor time of the
whole process, and ``share_of_cpu`` that part of it which goes into sums.

    python benchmarks/sums.py --disk /mnt/nvme --pairs 8
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import step
import torch
from measuring import context, spread

from outcore.core.quantities import parse_bytes
from outcore.memory import disk
from outcore.memory.host import HostMemory
from outcore.memory.sums import Segment, Sums

GOAL_FRACTION = 0.02
NAMES = ("without", "with")


class NoSums:
    """The same segments, and nothing known about them."""

    def __init__(self) -> None:
        self.real = Sums()
        self.cover, self.segment = self.real.cover, self.real.segment

    def note(self, start: int, memory: memoryview) -> None:
        """Forget it."""

    def wrong(self, start: int, memory: memoryview) -> Segment | None:
        """Believe it."""


class TimedSums(NoSums):
    """Says how long the threads work on them."""

    spent_s: ClassVar[list[float]] = []

    def note(self, start: int, memory: memoryview) -> None:
        """See ``Sums``."""
        start_s = time.thread_time()
        self.real.note(start, memory)
        self.spent_s.append(time.thread_time() - start_s)

    def wrong(self, start: int, memory: memoryview) -> Segment | None:
        """See ``Sums``."""
        start_s = time.thread_time()
        found = self.real.wrong(start, memory)
        self.spent_s.append(time.thread_time() - start_s)
        return found


@contextmanager
def knowing(name: str) -> Iterator[None]:
    """Stores that are opened inside have them, or not."""
    real = disk.Sums
    disk.Sums = TimedSums if name == "with" else NoSums  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        disk.Sums = real  # type: ignore[misc]


def main() -> None:
    args = _arguments()
    report = {"benchmark": "sums", "goal_fraction": GOAL_FRACTION}
    print(json.dumps(report | {"rates": rates(args), "transfers": transfers(args), "step": steps(args)} | context()))


def rates(args: argparse.Namespace) -> dict[str, object]:
    """Bytes per second of one thread."""
    nbytes = parse_bytes(args.nbytes, what="--nbytes")
    with HostMemory.open(nbytes) as memory, HostMemory.open(disk.STRIPE_BYTES) as other:
        memory.tensor.random_(generator=torch.Generator().manual_seed(0))
        known = Sums()
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


def transfers(args: argparse.Namespace) -> dict[str, object]:
    """Seconds for one extent."""
    nbytes = parse_bytes(args.nbytes, what="--nbytes")
    with ExitStack() as closing:
        memory = closing.enter_context(HostMemory.open(nbytes)).tensor
        memory.random_(generator=torch.Generator().manual_seed(0))
        stores = {}
        for name in NAMES:
            with knowing(name):
                store = closing.enter_context(disk.DiskStore.open([args.disk], nbytes))
            stores[name] = store, store.take(nbytes, owner="benchmark")
            store.write(stores[name][1], memory)
        moves: dict[str, dict[str, Callable[[], None]]] = {
            "write": {n: lambda s=s, e=e: s.write(e, memory) for n, (s, e) in stores.items()},  # type: ignore[misc]
            "read": {n: lambda s=s, e=e: s.read(e, memory) for n, (s, e) in stores.items()},  # type: ignore[misc]
        }
        return {verb: _in_pairs(both, args.pairs) for verb, both in moves.items()}


def steps(args: argparse.Namespace) -> dict[str, object]:
    """Seconds for ``--steps`` steps."""
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
