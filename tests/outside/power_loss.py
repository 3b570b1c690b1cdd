"""Cut the power while checkpoints are saved: system calls are recorded, and replayed without what was not synced.

A run saves some checkpoints (the last step twice) and keeps two. At a cut, what was synced is there. Of the rest any
subset is: bytes of files, and names in folders. Then the newest checkpoint that is accepted must be right, and not
older than the last one that was reported durable.

python tests/outside/power_loss.py --cuts 500 --report report.md
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@dataclass(eq=False)
class Node:
    """A file or folder: what was done to it, each with whether it is durable."""

    is_folder: bool
    writes: list[list[Any]] = field(default_factory=list)
    """Of a file: [offset, bytes, is synced]."""
    entries: list[list[Any]] = field(default_factory=list)
    """Of a folder: [{name: node or None}, is synced]."""
    now: dict[str, Node] = field(default_factory=dict)
    """Of a folder: as running programs see it."""


class Recording:
    """The calls of a run, as functions that make them in a model of a filesystem."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[Any] = []

    def hook(self, call: Any, do: Any) -> Any:
        """Make a call, and note it."""
        data = bytes(call.data) if call.data is not None else b""
        offset = call.offset
        if call.name == "write":
            offset = os.lseek(call.fd, 0, os.SEEK_CUR)
        result = do()
        if call.name != "exchange" or result:
            self.calls.append((call.name, self._parts(call.path), self._parts(call.to), offset, data[: result or 0]))
        return result

    def durable(self, step: int) -> None:
        """A step was reported durable."""
        self.calls.append(("durable", (), (), None, step))

    def _parts(self, path: str) -> tuple[str, ...]:
        return Path(path).relative_to(self.root).parts if path else ()


def replayed(calls: list[Any], rng: random.Random) -> tuple[Node, int]:
    """The folder after a power loss behind these calls, and the last step that was reported durable."""
    top, durable = Node(is_folder=True), -1
    for name, path, to, offset, data in calls:
        if name == "durable":
            durable = data
        elif name in ("write", "pwrite"):
            _at(top, path).writes.append([offset, data, False])
        elif name == "fsync":
            node = _at(top, path)
            for entry in node.writes + node.entries:
                entry[-1] = True
        else:
            assert path[:-1] == (to or path)[:-1]
            _change(_at(top, path[:-1]), name, path[-1], to[-1] if to else "")
    return _left(top, rng), durable


def _at(node: Node, parts: tuple[str, ...]) -> Node:
    for part in parts:
        node = node.now[part]
    return node


def _change(folder: Node, name: str, one: str, two: str) -> None:
    """Names in a folder: all of a call, or none."""
    there = folder.now.get(one)
    changes: dict[str, dict[str, Node | None]] = {
        "create": {one: Node(is_folder=False)},
        "mkdir": {one: Node(is_folder=True)},
        "unlink": {one: None},
        "rmdir": {one: None},
        "rename": {one: None, two: there},
        "exchange": {one: folder.now.get(two), two: there},
    }
    folder.entries.append([changes[name], False])
    _apply(changes[name], folder.now)


def _apply(names: dict[str, Node | None], now: dict[str, Node]) -> None:
    for name, node in names.items():
        now.pop(name, None)
        if node is not None:
            now[name] = node


def _left(node: Node, rng: random.Random) -> Node:
    """What is there after the loss: what was synced, and any of the rest."""
    share = rng.choice((0.0, 0.5, 0.9, 1.0))
    left = Node(is_folder=node.is_folder)
    for names, is_synced in node.entries:
        if is_synced or rng.random() < share:
            _apply(names, left.now)
    left.now = {name: _left(child, rng) for name, child in left.now.items()}
    left.writes = [write for write in node.writes if write[-1] or rng.random() < share]
    return left


def written(node: Node, path: Path) -> None:
    """As real files."""
    if node.is_folder:
        path.mkdir(exist_ok=True)
        for name, child in node.now.items():
            written(child, path / name)
        return
    with path.open("wb") as file:
        for offset, data, _ in node.writes:
            file.seek(offset)
            file.write(data)


def recorded(folder: Path, num_steps: int) -> tuple[list[Any], dict[int, list[dict[str, bytes]]]]:
    """The calls of a run, and what each step's checkpoint holds: one or more, if it was saved again."""
    from saving import small

    import outcore
    from outside.calls import watched

    recording, right = Recording(folder.resolve()), {}
    where = folder / "new" / "checkpoints"
    with small.prepared(small.build("plain", num_blocks=1), folder.parent, "host") as (model, optimizer):
        for step in [*range(1, num_steps + 1), num_steps]:
            small.train(model, optimizer, range(step, step + 1))
            with watched(folder, recording.hook):
                path = outcore.save_checkpoint(model, optimizer, where, step=step, keep=2).wait()
                recording.durable(step)
            right.setdefault(step, []).append({p.name: p.read_bytes() for p in path.iterdir()})
    return recording.calls, right


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(arguments)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = cut(Path(folder), args.cuts, args.seed, args.steps)
    text = "\n".join(f"| {name} | {value:,} |" for name, value in found.items() if name != "wrong")
    title = f"# Power loss\n\n`power_loss.py --cuts {args.cuts} --seed {args.seed} --steps {args.steps}`"
    text = f"{title}\n\n| what | count |\n|---|---|\n{text}\n| wrong | {len(found['wrong'])} |\n"
    print(text, *found["wrong"][:10], f"{time.monotonic() - start_s:.0f} s", sep="\n")
    if args.report:
        args.report.write_text(text)
    return len(found["wrong"]) > 0


def cut(folder: Path, num_cuts: int, seed: int, num_steps: int = 4) -> dict[str, Any]:
    """Cut at random places; count what is found then."""
    from outcore.core.errors import ConfigError
    from outcore.saving.found import find

    (folder / "run").mkdir()
    calls, right = recorded(folder / "run", num_steps)
    rng = random.Random(seed)
    found: dict[str, Any] = {"calls": len(calls), "cuts": num_cuts, "newest is later": 0, "newest is durable": 0}
    found |= {"none yet": 0, "damaged ones passed over": 0, "wrong": []}
    for i in range(num_cuts):
        place = rng.randrange(len(calls) + 1)
        left, durable = replayed(calls[:place], rng)
        after = folder / f"after-{i}"
        written(left, after)
        with warnings.catch_warnings(record=True) as passed_over:
            warnings.simplefilter("always")
            try:
                path, manifest = find(after / "new" / "checkpoints")
            except ConfigError:
                path, manifest = None, None
        found["damaged ones passed over"] += len(passed_over)
        if path is None or manifest is None:
            kind = "none yet" if durable < 0 else "wrong"
        else:
            names = [*manifest.files, "manifest.json"]
            is_right = {name: (path / name).read_bytes() for name in names} in right[manifest.step]
            kind = "newest is later" if manifest.step > durable else "newest is durable"
            kind = kind if is_right and manifest.step >= durable else "wrong"
        if kind == "wrong":
            found["wrong"].append(f"cut {i} behind call {place}: durable {durable}, found {path}")
        else:
            found[kind] += 1
    return found


if __name__ == "__main__":
    sys.exit(main())
