"""Cut the power while checkpoints are saved: system calls are recorded, and replayed without what was not synced.

A run saves some checkpoints and keeps two: a loop, which saves the last step twice, or ``outcore train``. What was
synced before the cut is there; of the rest any subset is: bytes of files, and names in folders. Then the newest
checkpoint that is accepted must be right, and not older than the last one that was reported durable. For ``outcore
train``, ``metrics.jsonl`` must have the lines of all steps up to it, each once and as written.

python research/outside/power_loss.py --cuts 500 --report report.md
"""

from __future__ import annotations

import argparse
import io
import os
import random
import sys
import tempfile
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]


@dataclass(eq=False)
class Node:
    """A file or folder as a list of changes, each with whether it is durable."""

    is_folder: bool
    writes: list[list[Any]] = field(default_factory=list)
    """Changes of a file: [offset, bytes, is synced]. Without an offset the file is emptied."""
    entries: list[list[Any]] = field(default_factory=list)
    """Changes of a folder: [{name: node or None}, is synced]."""
    now: dict[str, Node] = field(default_factory=dict)
    """A folder's entries as running programs see them."""


class Recording:
    """The calls of a run, to be replayed in a model of a filesystem."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[Any] = []
        self._top = Node(is_folder=True)
        """The root folder as running programs see it."""

    def hook(self, call: Any, do: Any) -> Any:
        """Make a call, and record it."""
        data = bytes(call.data) if call.data is not None else b""
        offset = call.offset
        if call.name == "write":
            offset = os.lseek(call.fd, 0, os.SEEK_CUR)
        if call.name not in ("create", "mkdir"):
            self._find_out(Path(call.path))
        result = do()
        if call.name != "exchange" or result:
            self._note((call.name, self._parts(call.path), self._parts(call.to), offset, data[: result or 0]))
        return result

    def _find_out(self, path: Path) -> None:
        """Record files that libraries wrote without an observed call as written in one piece and not synced."""
        node, missing = self._top, []
        for part in self._parts(str(path)):
            missing.append(part)
            if not missing[:-1] and part in node.now:
                node = node.now[missing.pop()]
        for number in range(len(missing) - 1, -1, -1):
            there = path if not number else path.parents[number - 1]
            parts = self._parts(str(there))
            if there.is_dir():
                self._note(("mkdir", parts, (), None, b""))
            elif there.is_file():
                self._note(("create", parts, (), None, b""))
                self._note(("pwrite", parts, (), 0, there.read_bytes()))

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        _do(self._top, *call)

    def durable(self, step: int) -> None:
        """Record that a step was reported durable."""
        self.calls.append(("durable", (), (), None, step))

    def _parts(self, path: str) -> tuple[str, ...]:
        return Path(path).relative_to(self.root).parts if path else ()


def replayed(calls: list[Any], rng: random.Random) -> tuple[Node, int]:
    """Return the folder after a power loss following these calls, and the last step reported durable by then."""
    top, durable = Node(is_folder=True), -1
    for name, path, to, offset, data in calls:
        if name == "durable":
            durable = data
        else:
            _do(top, name, path, to, offset, data)
    return _left(top, rng), durable


def _do(top: Node, name: str, path: tuple[str, ...], to: tuple[str, ...], offset: int | None, data: bytes) -> None:
    if name in ("write", "pwrite"):
        _at(top, path).writes.append([offset, data, False])
    elif name == "truncate":
        _at(top, path).writes.append([None, b"", False])
    elif name == "fsync":
        node = _at(top, path)
        for entry in node.writes + node.entries:
            entry[-1] = True
    else:
        _change(_at(top, path[:-1]), name, path[-1], to[-1] if to else "", _at(top, (to or path)[:-1]))


def _at(node: Node, parts: tuple[str, ...]) -> Node:
    for part in parts:
        node = node.now[part]
    return node


def _change(folder: Node, name: str, one: str, two: str, other: Node) -> None:
    """Change names in a folder, all of a call or none. A rename between two folders changes each by itself."""
    there = folder.now.get(one)
    if other is not folder:
        assert name == "rename"
        for where, change in ((folder, {one: None}), (other, {two: there})):
            where.entries.append([change, False])
            _apply(change, where.now)
        return
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
    """Return what is there after the loss: what was synced, and a random part of the rest."""
    share = rng.choice((0.0, 0.5, 0.9, 1.0))
    left = Node(is_folder=node.is_folder)
    for names, is_synced in node.entries:
        if is_synced or rng.random() < share:
            _apply(names, left.now)
    left.now = {name: _left(child, rng) for name, child in left.now.items()}
    left.writes = [write for write in node.writes if write[-1] or rng.random() < share]
    return left


def written(node: Node, path: Path) -> None:
    """Write a node as real files."""
    if node.is_folder:
        path.mkdir(exist_ok=True)
        for name, child in node.now.items():
            written(child, path / name)
        return
    with path.open("wb") as file:
        for offset, data, _ in node.writes:
            if offset is None:
                file.truncate(0)
                continue
            file.seek(offset)
            file.write(data)


def recorded(folder: Path, num_steps: int) -> tuple[list[Any], dict[int, list[dict[str, bytes]]]]:
    """Record a run. Returns its calls, and each step's possible checkpoints: several if it was saved again."""
    from checkpoint import small

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


def recorded_train(folder: Path, num_steps: int) -> tuple[list[Any], dict[int, list[dict[str, bytes]]]]:
    """The same for ``outcore train``, which saves during training; ``metrics.jsonl`` is among the right contents."""
    from command.conftest import CONFIG, write_json, write_jsonl

    from outcore.command import main as cli
    from outcore.integrations.trainer_saves import TrainerSaves
    from outside.calls import watched

    recording, right, out = Recording(folder.resolve()), {}, folder / "new" / "checkpoints"
    model = write_json(folder.parent / "model.json", {**CONFIG, "num_hidden_layers": 1})
    data = write_jsonl(folder.parent / "rows.jsonl", [{"prompt": f"{n} ", "completion": f"{n}"} for n in range(4)])
    files = ["--model", str(model), "--data", str(data), "--out", str(out)]
    options = f"--steps {num_steps} --batch-size 2 --seq-len 32 --save-every 1 --keep 2".split()
    settle = TrainerSaves.settle

    def settled(self: Any, **how: bool) -> None:
        under_way = self._under_way
        settle(self, **how)
        if under_way is not None:
            step, path = under_way.state.global_step, under_way.save.path
            recording.durable(step)
            held = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
            right[step] = [held]

    output = io.StringIO()
    with mock.patch.object(TrainerSaves, "settle", settled), watched(folder, recording.hook):
        with (
            redirect_stdout(output),
            redirect_stderr(output),
            mock.patch.object(sys, "argv", ["outcore", "train", *files, *options]),
        ):
            with suppress(SystemExit):
                cli.main()
    if len(right) < num_steps:
        raise RuntimeError(output.getvalue())
    metrics = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for step, held in right.items():
        held[0]["metrics.jsonl"] = b"".join(metrics[:step])
    return recording.calls, right


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--of", choices=("loop", "train"), default="loop")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(arguments)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = cut(Path(folder), args.cuts, args.seed, args.steps, args.of)
    text = "\n".join(f"| {name} | {value:,} |" for name, value in found.items() if name != "wrong")
    title = f"# Power loss\n\n`power_loss.py --of {args.of} --cuts {args.cuts} --seed {args.seed} --steps {args.steps}`"
    text = f"{title}\n\n| what | count |\n|---|---|\n{text}\n| wrong | {len(found['wrong'])} |\n"
    print(text, *found["wrong"][:10], f"{time.monotonic() - start_s:.0f} s", sep="\n")
    if args.report:
        args.report.write_text(text)
    return len(found["wrong"]) > 0


def cut(folder: Path, num_cuts: int, seed: int, num_steps: int = 4, of: str = "loop") -> dict[str, Any]:
    """Cut at random places, and count what is found afterwards."""
    (folder / "run").mkdir()
    calls, right = (recorded if of == "loop" else recorded_train)(folder / "run", num_steps)
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
            path, manifest = _newest(after / "new" / "checkpoints", of)
        found["damaged ones passed over"] += len(passed_over)
        if path is None or manifest is None:
            kind = "none yet" if durable < 0 else "wrong"
        else:
            held = {name: (path / name).read_bytes() for name in [*manifest.files, "manifest.json"]}
            if of == "train":
                lines = (path.parent / "metrics.jsonl").read_bytes().splitlines(keepends=True)
                held["metrics.jsonl"] = b"".join(lines[: manifest.step])
            kind = "newest is later" if manifest.step > durable else "newest is durable"
            kind = kind if held in right[manifest.step] and manifest.step >= durable else "wrong"
        if kind == "wrong":
            found["wrong"].append(f"cut {i} behind call {place}: durable {durable}, found {path}")
        else:
            found[kind] += 1
    return found


def _newest(folder: Path, of: str) -> tuple[Any, Any]:
    """The checkpoint that a run would go on from, and its manifest."""
    from checkpoint.small import find

    from outcore.command.train.output.folder import OutputFolder
    from outcore.core.errors import ConfigError
    from outcore.integrations.checkpoints import refuse_damaged
    from outcore.memory.files.checkpoint_folder import read_manifest

    try:
        if of == "loop":
            return find(folder)
        newest = OutputFolder(folder, resume="auto").checkpoint if folder.is_dir() else None
        if newest is None:
            return None, None
        refuse_damaged(newest.path)
        return newest.path, read_manifest(newest.path, check=False)
    except ConfigError:
        return None, None


if __name__ == "__main__":
    sys.exit(main())
