"""Trainers on several ranks, for ``launch`` and for the test itself: jobs as JSON, and a folder for all their files."""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from integrations.rig import Plain, language, llama, lora, sft, token_dataset
from plans import forced
from torch import nn
from transformers import Trainer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import outcore
from outcore.integrations.transformers import OutcoreMixin
from outcore.memory.files import weights_file
from outcore.planner.homes.pools import LEAST

from .cases import DEVICE, begin, blocked_norm

RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MICRO_BATCHES = 8
"""Micro-batches of a step. An epoch has 12, so its last step has 4."""
LARGEST_SCALE = 2.0**21
"""A loss scale with which the first steps overflow."""
TEXTS = [f"line {i} " + "abc " * (i % 5 + 1) for i in range(24)]


class Job(NamedTuple):
    name: str
    kind: str = "language"
    is_streamed: bool = True
    clip: float = 1e9
    dropout: float = 0.0
    resume: str | None = None
    """Path of a checkpoint, relative to the folder."""
    partition: str = "replicate"
    masters: str | None = None
    """The ``master_format`` for bf16 weights."""
    is_scaled: bool = False
    """Whether to use fp16 with a gradient scaler, on accelerators."""


class Normed(Trainer):
    """Clips by the norm as several ranks compute it."""

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        params = [p for p in model.parameters() if p.grad is not None]
        total = torch.linalg.vector_norm(torch.stack([blocked_norm(p.grad) for p in params]))
        nn.utils.clip_grads_with_norm_(params, self.args.max_grad_norm, total)
        return total


class Streamed(Plain):
    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job

    def trainer(self, kind: type[Trainer], **options: Any) -> Trainer:
        made = type(kind.__name__, (OutcoreMixin, kind), {})
        model = options["model"] if "peft_config" not in options else None
        if model is None:
            return made(**options, budget=outcore.Budget(disk=self.folder))
        tiers = ["host", "disk"]
        stored: Any = {"master_format": self.job.masters or "fp32"}
        how: Any = {"units": [LlamaDecoderLayer], "precision": self.job.masters and "bf16"}
        _, plan = forced(
            model,
            torch.optim.AdamW([{"params": list(model.parameters()), **stored}], fused=True),
            lambda i: (tiers[i % 2], "host", tiers[(i + 1) % 2]),
            num_ranks=NUM_RANKS,
            comfort=LEAST,
            partition=self.job.partition,
            **how,
        )
        return made(**options, plan=plan, budget=outcore.Budget(disk=self.folder), **stored, **how)


def count_calls(model: nn.Module, _: Any) -> None:
    if model.training:
        model.seen.add_(RANK + 1)


def fails_and_goes_on(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's drive is full in the middle of the third save: all ranks get the error, and resume from the second."""
    write, calls = weights_file._write_all, itertools.count()

    def full(file: Any, memory: memoryview) -> None:
        if trainer.state.global_step == 3 and next(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, memory)

    monkeypatch.setattr(weights_file, "_write_all", full)
    with pytest.raises(outcore.OutcoreError, match="No space left on device"):
        trainer.train()
    assert RANK or next(calls) == 4
    there = {path.name for path in Path(trainer.args.output_dir).iterdir()}
    assert there == {"checkpoint-1", "checkpoint-2"}
    trainer.train(resume_from_checkpoint=True)


def saves_its_own(_: Trainer, output_dir: str, state_dict: Any = None) -> None:
    """Write weights in a form of its own, as a class does that overrides ``_save`` in front of the mixin."""
    Path(output_dir).mkdir(exist_ok=True)
    Path(output_dir, "own").write_text("weights")


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train. Returns what was logged; the weights are written to a file."""
    datasets.disable_progress_bars()
    changes: dict[str, Any] = {
        "gradient_accumulation_steps": MICRO_BATCHES // NUM_RANKS,
        "max_grad_norm": job.clip,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "save_total_limit": 3,
        "metric_for_best_model": "eval_loss",
        "save_strategy": "steps" if job.is_streamed else "no",
        "use_cpu": DEVICE == "cpu",
        "ddp_backend": "gloo" if NUM_RANKS > 1 else None,
        "fp16": job.is_scaled,
    }
    side = Streamed(folder, job) if job.is_streamed else Plain()
    model = llama(attention_dropout=job.dropout, seed=3 + RANK if job.is_streamed else 3)  # all start as rank 0
    if job.kind == "lora":
        rows = {"train_dataset": datasets.Dataset.from_dict({"text": TEXTS}), "peft_config": lora()}
        trainer = sft(side, folder / job.name, model=model, parts=rows, **changes)
    else:
        if job.kind == "buffers":  # each rank has its own buffer
            model.register_buffer("seen", torch.zeros(1))
            model.register_forward_pre_hook(count_calls)
        kind = Trainer if job.is_streamed or NUM_RANKS > 1 else Normed
        parts = {"train_dataset": token_dataset(TEXTS)}
        trainer = language(side, folder / job.name, kind=kind, model=model, parts=parts, **changes)
    scaler = trainer.accelerator.scaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": LARGEST_SCALE})
    if job.kind == "full":
        with pytest.MonkeyPatch.context() as patch:
            fails_and_goes_on(trainer, patch)
    elif job.kind == "own":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OutcoreMixin, "_save", saves_its_own)
            trainer.train()
    else:
        trainer.train(resume_from_checkpoint=None if job.resume is None else str(folder / job.resume))
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    if RANK == 0:
        torch.save(state, folder / f"{job.name}.pt")
    if job.is_streamed:
        outcore.close(trainer.model, keep_weights=False)
    own = model.seen.item() if job.kind == "buffers" else 0.0
    scale = None if scaler is None else scaler.state_dict()["scale"]
    return {"own": own, "scale": scale, "logs": trainer.state.log_history, "best": trainer.state.best_model_checkpoint}


def main() -> None:
    folder, *jobs = sys.argv[1:]
    begin()
    for text in jobs:
        job = Job(*json.loads(text))
        Path(folder, f"{job.name}.{RANK}.json").write_text(json.dumps(run(job, Path(folder))))
    torch.distributed.destroy_process_group()
