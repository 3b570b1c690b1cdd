"""The disk store compared with fio, on the same preallocated, written file.

Prints one JSON object. The store moves whole extents between its files and host memory; fio moves blocks of 4 MiB with
io_uring (libaio where the kernel has none) at the depth that was fastest in a first sweep over 1 to 64. Then both run
in turn, repetition by repetition, since machines are noisy. Both use direct I/O, so the page cache plays no part; where
the filesystem does not support it, both are buffered and the output says so. Both have buffers in huge pages, which
can double the rate: a transfer is then a few long segments instead of a thousand of 4 KiB.

    python benchmarks/disk_io.py --folder /mnt/nvme
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measuring import context, spread

from outcore.core.quantities import parse_bytes
from outcore.memory.disk import DEFAULT_NUM_THREADS, DiskStore, Extent
from outcore.memory.host import HostMemory

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
GOAL_FRACTION = 0.9


def main() -> None:
    args = _arguments()
    nbytes, extent_bytes = parse_bytes(args.nbytes, what="--nbytes"), parse_bytes(args.extent, what="--extent")
    extent_bytes = min(extent_bytes, nbytes)
    nbytes -= nbytes % extent_bytes
    with (
        DiskStore.open([args.folder], nbytes, num_threads=args.num_threads) as store,
        HostMemory.open(extent_bytes) as memory,
    ):
        memory.tensor.random_(generator=torch.Generator().manual_seed(0))
        extents = [store.take(extent_bytes, owner=f"extent {i}") for i in range(nbytes // extent_bytes)]
        moves = {"write": store.write, "read": store.read}
        results = {}
        for verb, move in moves.items():
            _timed(extents, memory.tensor, store.write)  # once before the measurement, and over what fio wrote
            fio = None if shutil.which("fio") is None else Fio(verb, nbytes, is_direct=not store.buffered_paths)
            results[verb] = _compare(lambda move=move: _timed(extents, memory.tensor, move), fio, args.repetitions)
        is_direct = not store.buffered_paths
    print(json.dumps(_report(args, nbytes, extent_bytes, is_direct=is_direct) | results, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the file is made")
    parser.add_argument("--nbytes", default="2GiB", help="size of the file")
    parser.add_argument("--extent", default="512MiB", help="size of one transfer of the store")
    parser.add_argument("--num-threads", type=int, default=DEFAULT_NUM_THREADS)
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


def _timed(extents: Sequence[Extent], memory: torch.Tensor, move: Callable[[Extent, torch.Tensor], None]) -> float:
    """Move every extent once. Returns bytes per second."""
    start_s = time.perf_counter()
    for extent in extents:
        move(extent, memory)
    return sum(extent.nbytes for extent in extents) / (time.perf_counter() - start_s)


class Fio:
    """One direction of fio on the store's file, which has no name and is reached through this process's descriptor."""

    def __init__(self, verb: str, nbytes: int, *, is_direct: bool) -> None:
        links = [Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        self.file = next(link for link in links if link.is_symlink() and os.readlink(link).endswith("/data (deleted)"))
        self.verb, self.nbytes, self.is_direct = verb, nbytes, is_direct
        self.engine = "io_uring"
        try:
            self.run(1)
        except subprocess.CalledProcessError:
            self.engine = "libaio"
        self.sweep = {depth: self.run(depth) for depth in DEPTHS}
        self.depth = max(self.sweep, key=lambda depth: self.sweep[depth])

    def run(self, depth: int) -> float:
        """Return bytes per second."""
        command = ["fio", "--name=outcore", f"--filename={self.file}", f"--rw={self.verb}", "--bs=4M"]
        command += [f"--size={self.nbytes}", f"--direct={int(self.is_direct)}", f"--ioengine={self.engine}"]
        command += [f"--iodepth={depth}", "--allow_file_create=0", "--output-format=json"]
        huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # glibc 2.35 and later; older versions ignore it
        environment = {**os.environ, **huge_pages}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        job = json.loads(output[output.index("{") :])["jobs"][0]
        return float(job[self.verb]["bw_bytes"])


def _compare(store: Callable[[], float], fio: Fio | None, repetitions: int) -> dict[str, object]:
    store_rates, fio_rates = [], []
    for _ in range(repetitions):
        store_rates.append(store())
        if fio is not None:
            fio_rates.append(fio.run(fio.depth))
    result: dict[str, object] = {"store_bytes_per_s": spread(store_rates)}
    if fio is None:
        return result | {"fio": "not found on PATH: apt-get install fio"}
    ratio = statistics.median(store_rates) / statistics.median(fio_rates)
    return result | {
        "fio_bytes_per_s": spread(fio_rates),
        "fio_settings": {"engine": fio.engine, "iodepth": fio.depth},
        "fio_sweep_bytes_per_s": fio.sweep,
        "store_over_fio": ratio,
        "store_over_fio_by_pair": spread([a / b for a, b in zip(store_rates, fio_rates, strict=True)]),
        "meets_goal": ratio >= GOAL_FRACTION,
    }


def _report(args: argparse.Namespace, nbytes: int, extent_bytes: int, *, is_direct: bool) -> dict[str, object]:
    fio = shutil.which("fio")
    return {
        "benchmark": "disk_io",
        "goal_store_over_fio": GOAL_FRACTION,
        "nbytes": nbytes,
        "extent_bytes": extent_bytes,
        "num_threads": args.num_threads,
        "repetitions": args.repetitions,
        "direct_io": is_direct,
        "filesystem": _output("findmnt", "-no", "FSTYPE,SOURCE", "--target", str(args.folder)),
        "drives": _output("lsblk", "-dno", "NAME,MODEL,SIZE,ROTA"),
        "fio_version": _output("fio", "--version") if fio else None,
        **context(),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
