"""Runs everything that reads checkpoints under an audit hook: what pickle loads, and which pickle files are opened.

Prints a line of JSON: for each part the classes that pickle looked up, and the files by suffix. Loading with
``weights_only=True`` looks up no classes. A hook cannot be removed, so this is a process of its own.

python research/outside/pickles.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]
_HOLD_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")


class Audit:
    """Records what happens in one part at a time."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, list[str]] = {}
        self._folder, self._part = str(folder), ""
        sys.addaudithook(self._hear)

    def during(self, part: str, work: Callable[[], object]) -> None:
        """Record events while ``work`` runs."""
        self.found[part], self._part = [], part
        try:
            work()
        finally:
            self._part = ""

    def _hear(self, event: str, args: Any) -> None:
        if not self._part:
            return
        if event == "pickle.find_class":
            self.found[self._part].append(f"class {args[0]}.{args[1]}")
        elif event == "open" and isinstance(args[0], str) and args[0].startswith(self._folder):
            is_read = isinstance(args[1], str) and args[1].startswith("r")
            if is_read and Path(args[0]).suffix in _HOLD_PICKLES:
                self.found[self._part].append(f"file {Path(args[0]).name}")


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    audit = Audit(folder)
    audit.during("unpickling", lambda: __import__("pickle").loads(b"cbuiltins\nlen\n."))  # shows that the hook sees it
    _loop(audit, folder)
    _trainers(audit, folder)
    _command(audit, folder)
    print(json.dumps(audit.found))


def _loop(audit: Audit, folder: Path) -> None:
    import torch
    from checkpoint import small

    import outcore
    from outcore.checkpoint.export_checkpoint import export_checkpoint
    from outcore.command.checkpoint import listed

    base = small.build("llama")
    base.save_pretrained(folder / "base")
    for name, make in {
        "full": lambda: small.build("llama"),
        "lora": lambda: small.with_adapters(_built(folder)),
    }.items():
        place = folder / name
        with small.prepared(make(), folder) as (model, optimizer):
            small.train(model, optimizer)
            extra = {"tensor": torch.arange(3), "tuple": (1, None)}
            outcore.save_checkpoint(model, optimizer, place, step=1, extra=extra, wait=True)
            audit.during(f"load_checkpoint, {name}", lambda: outcore.load_checkpoint(model, optimizer, place))

        def again(place: Path = place, make: Callable[[], Any] = make) -> None:
            with small.prepared(make(), folder, checkpoint=place) as (model, optimizer):
                small.train(model, optimizer)

        audit.during(f"prepare, {name}", again)
        audit.during(f"verify, {name}", lambda: listed(place, check=True))
        audit.during(f"export, {name}", lambda: export_checkpoint(place, folder / f"{name}-hf", "hf"))
    audit.during("export, merged", lambda: export_checkpoint(folder / "lora", folder / "merged", "hf", merge=True))
    audit.during("export, dcp", lambda: export_checkpoint(folder / "full", folder / "dcp", "dcp"))


def _built(folder: Path) -> Any:
    from checkpoint import small
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "base").to(small.DEVICE)


def _trainers(audit: Audit, folder: Path) -> None:
    from integrations.rig import Plain, sft, streamed
    from integrations.test_checkpoints import sft_lora

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    for name, job in {"full": sft, "lora": sft_lora}.items():
        with streamed(folder) as side:
            ours = job(side, folder / f"ours-{name}", **saves, **best)
            audit.during(f"the best model, {name}", ours.train)
        job(Plain(), folder / f"plain-{name}", **saves).train()
        for origin in ("ours", "plain"):
            with streamed(folder) as side:
                resumed = job(side, folder / f"{origin}-{name}", **saves, num_train_epochs=3)
                audit.during(f"resume {origin}, {name}", lambda: resumed.train(resume_from_checkpoint=True))


def _command(audit: Audit, folder: Path) -> None:
    from command.conftest import CONFIG, write_json, write_jsonl

    from outcore.command import main as cli

    model = write_json(folder / "model.json", CONFIG)
    rows = write_jsonl(
        folder / "rows.jsonl", [{"prompt": f"{n} and {n} is ", "completion": f"{2 * n}"} for n in range(5)]
    )

    def run(*more: str) -> None:
        sys.argv = f"outcore train --batch-size 2 --seq-len 32 --model {model} --data {rows} --save-every 2".split()
        sys.argv += ["--out", str(folder / "run"), *more]
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"outcore train ended with {stop.code}") from stop

    out, sys.stdout = sys.stdout, sys.stderr
    try:
        run("--steps", "2")
        audit.during("outcore train --resume", lambda: run("--steps", "4", "--resume"))
    finally:
        sys.stdout = out


if __name__ == "__main__":
    main()
