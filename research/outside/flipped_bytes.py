"""Change single bytes of checkpoints: every byte of the manifest, and many of all other files, one at a time.

The newer of two checkpoints is changed. ``load_checkpoint`` must load the older one, whose weights and states are
compared, or refuse if the newer one is asked for. For checkpoints of ``outcore train``, resuming must find the older
one.

With ``--of disk`` single bits of the disk tier are changed while a run is unaware of it. Its next step must end with a
``DiskError`` that names unit, folder and the 64 KiB in which the bit lies.

python research/outside/flipped_bytes.py --flips 2000 --report report.md
python research/outside/flipped_bytes.py --of disk --flips 200
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import itertools
import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]

PAGE_BYTES = 4096
KINDS = ("full", "lora", "train")
NOT_TAKEN = "refused, though an older one was there"
WRONG = (NOT_TAKEN, "loaded")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000, help="of each kind, beside those of the manifest")
    parser.add_argument("--every", type=int, default=1, help="so many bytes of the manifest, one is changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", choices=("checkpoints", "disk"), default="checkpoints")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if args.of == "disk":
        with tempfile.TemporaryDirectory() as folder:
            found = flip_disk(Path(folder), args.flips, args.seed)
        print("\n".join(["| what | bits |", "|---|---|", *(f"| {what} | {count} |" for what, count in found.items())]))
        return found["not named"] + found["not noticed"] > 0
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: flip(Path(folder) / kind, kind, args.flips, args.seed, args.every) for kind in KINDS}
    names = [name for name in dict.fromkeys(name for counts in found.values() for name in counts) if name not in WRONG]
    rows = [f"| {name} | {' | '.join(f'{found[kind][name]:,}' for kind in KINDS)} |" for name in (*names, *WRONG)]
    head = f"| what | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}"
    text = "\n".join([f"# Flipped bytes\n\n`--flips {args.flips} --seed {args.seed}`\n", head, *rows, ""])
    print(text)
    if args.report:
        args.report.write_text(text)
    return sum(counts[name] for counts in found.values() for name in WRONG) > 0


def flip(folder: Path, kind: str, num_flips: int, seed: int, every: int) -> collections.Counter[str]:
    """Count the outcomes of the changes; see ``WRONG``."""
    rng, found = random.Random(seed), collections.Counter[str]()
    folder.mkdir()
    with (_of_train if kind == "train" else _of_a_loop)(folder, kind) as (newest, take):
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
        manifest = newest / "manifest.json"
        files.remove(manifest)
        if take(True) != "loaded" or take(False) != "loaded":
            raise RuntimeError(f"{kind}: expected the newest checkpoint to be loaded as long as nothing is changed")
        places = [(manifest, place) for place in range(0, manifest.stat().st_size, every)]
        found["files"], found["bytes of the manifest"] = len(files), len(places)
        for number in range(num_flips):
            path = files[number % len(files)]
            places.append((path, rng.randrange(path.stat().st_size)))
        for path, place in places:
            with flipped(path, place, rng.randrange(1, 256)):
                found[take(rng.random() < 0.5)] += 1
    found["flips"] = len(places)
    return found


def flip_disk(folder: Path, num_flips: int, seed: int) -> dict[str, int]:
    """Count what the next step reported of each bit, or a later reader if the step did not read it."""
    from checkpoint import small
    from plans import forced

    import outcore
    from outcore.core.errors import DiskError

    rng, found = random.Random(seed), dict.fromkeys(("named", "not named", "not noticed", "written over"), 0)
    for number in itertools.count():
        if sum(found.values()) - found["written over"] == num_flips:
            return found
        model = small.build(("llama", "gpt2", "plain")[number % 3])
        optimizer = small.adamw(model)
        options: dict[str, Any] = {"plan": forced(model, optimizer, lambda _: ("disk", "host", "disk"), depth=1)[1]}
        options |= {"budget": outcore.Budget(disk=folder), "device": small.DEVICE}
        with warnings.catch_warnings(action="ignore"), outcore.prepare(model, optimizer, **options) as pair:
            small.train(*pair)
            pair.optimizer.engine.device.synchronize()
            fd = _disk_tier()
            try:
                place, page = _flip_one(fd, rng)
                small.train(*pair, range(1, 2))
                list(outcore.named_tensors(pair.model))
                pair.optimizer.state_dict()
                is_there = os.pread(fd, PAGE_BYTES, place // PAGE_BYTES * PAGE_BYTES) == page
                found["not noticed" if is_there else "written over"] += 1
            except DiskError as error:
                units = [unit.label for unit in pair.optimizer.engine.units]
                found["named" if _is_named(str(error), str(folder), units, place) else "not named"] += 1
            finally:
                os.close(fd)
    raise AssertionError("never comes here")


def _flip_one(fd: int, rng: random.Random) -> tuple[int, bytes]:
    """Flip a bit of a byte that is not 0. Returns the byte's place, and the new contents of its page.

    A byte that is written over may become the flipped one by chance, but not its whole page.
    """
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    place = next(place for place in iter(lambda: rng.randrange(len(data)), -1) if data[place])
    os.pwrite(fd, bytes([data[place] ^ 1 << rng.randrange(8)]), place)
    return place, os.pread(fd, PAGE_BYTES, place // PAGE_BYTES * PAGE_BYTES)


def _is_named(text: str, folder: str, units: list[str], place: int) -> bool:
    """Whether a message names the unit, the folder, and the part in which the byte lies."""
    part = re.search(r"the ([0-9.]+) (B|KiB) at byte (\d+) are not what was written there", text)
    if part is None or folder not in text or not any(f"'{unit} " in text for unit in units):
        return False
    size = float(part[1]) * {"B": 1, "KiB": 1024}[part[2]]
    return int(part[3]) <= place < int(part[3]) + size


def _disk_tier() -> int:
    """Open the file of the only store once more."""
    links = (fd for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd))
    return os.open(next(fd for fd in links if "/data (del" in os.readlink(fd)), os.O_RDWR)


@contextmanager
def flipped(path: Path, place: int, bits: int) -> Iterator[None]:
    """Flip bits of a byte inside the ``with`` block."""
    with path.open("r+b", buffering=0) as file:
        was = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([was[0] ^ bits]), place)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), was, place)


Take = Callable[[bool], str]
"""Loads from the folder, the newest checkpoint alone if asked; returns what came of it."""


@contextmanager
def _of_a_loop(folder: Path, kind: str) -> Iterator[tuple[Path, Take]]:
    from checkpoint import small

    import outcore
    from outcore.core.errors import ConfigError
    from outside.checkpoint_kills import state_digest

    model = small.build("plain", num_blocks=1) if kind == "full" else small.with_adapters(small.build("llama"))
    with small.prepared(model, folder, "host") as (model, optimizer):
        digests = {}
        for step in (1, 2):
            small.train(model, optimizer, range(step, step + 1))
            outcore.save_checkpoint(model, optimizer, folder / "c", step=step, extra={"x": [1.5]}, wait=True)
            digests[step] = state_digest(model, optimizer, [])

        def take(is_newest: bool) -> str:
            try:
                extra = outcore.load_checkpoint(model, optimizer, folder / "c", step=2 if is_newest else None)
            except ConfigError:
                return "refused" if is_newest else NOT_TAKEN
            is_older = extra["step"] == 1 and state_digest(model, optimizer, []) == digests[1]
            return "the older one taken" if is_older and not is_newest else "loaded"

        yield folder / "c" / "step-00000002", take


@contextmanager
def _of_train(folder: Path, _: str) -> Iterator[tuple[Path, Take]]:
    from outcore.core.errors import ConfigError
    from outcore.integrations import checkpoints
    from outside import checkpoint_kills as kills

    life = kills.lived(folder, ("train", "full", "host"), None)
    if life.status:
        raise RuntimeError(life.text)
    older, newest = (folder / "c" / f"checkpoint-{kills.STEPS - n}" for n in (1, 0))

    def take(is_newest: bool) -> str:
        checkpoints._checked.clear()  # as in a process that has not checked it yet
        if not is_newest:
            with ExitStack() as holding:
                try:
                    found = checkpoints.newest_to_resume(folder / "c", holding)
                except ConfigError:
                    return NOT_TAKEN
            return "the older one taken" if found == older else "loaded"
        try:
            checkpoints.refuse_incomplete(str(newest))
        except ConfigError:
            return "refused"
        return "loaded"

    yield newest, take


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    import nursery

    for name in (*nursery.IMPORTED, "checkpoint.small", "command.conftest"):
        importlib.import_module(name)
    gc.freeze()
    sys.exit(main())
