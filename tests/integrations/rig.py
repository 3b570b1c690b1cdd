"""One job run twice, by a plain Trainer and by the same one with the mixin: logs and results must be equal.

A job is a function ``job(side, folder, **changes)`` that builds a Trainer with ``side.trainer``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import outcore
from outcore.api import plan_for, prepare_in_loop
from outcore.engine.engine import attachment_of
from outcore.integrations import transformers as integration
from outcore.integrations.transformers import OutcoreMixin
from outcore.model.wrapped import tensors_in
from outcore.preparation.prepare_options import Options

ON_CPU = os.environ.get("OUTCORE_TEST_DEVICE", "cpu") == "cpu"
CHECKPOINTING = next(n for n in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, n))
"""The setting's name: Transformers 5.23 renamed it."""
ALL_TIERS = {"device", "host", "disk"}

WARNINGS = [
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
    "ignore:the model is in bf16 and is updated in bf16:UserWarning",
]

_BOOKKEEPING = ("runtime", "_per_second", "_time", "moved_bytes", "exposed_s")


class Plain:
    """Builds the library's own Trainer."""

    def trainer(self, kind: type[Trainer], **options: Any) -> Trainer:
        return kind(**options)

    def reference(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


class Streamed(Plain):
    """Builds the Trainer with the mixin."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options, self.has_budget = folder, options, False
        self.models: list[Callable[[], torch.nn.Module]] = []

    def trainer(self, kind: type[Trainer], **options: Any) -> Trainer:
        self.has_budget = "budget" in options | self.options
        made = type(kind.__name__, (OutcoreMixin, kind), {})(**options, **self.options)
        self.models.append(lambda: made.model)
        return made

    def reference(self, model: torch.nn.Module) -> torch.nn.Module:
        self.models.append(lambda: model)
        return self.prepare(model, None, Options()).model

    def prepare(self, model: torch.nn.Module, optimizer: Any, options: Options) -> Any:
        """Prepare with a budget so tight that all tiers are used."""
        if not self.has_budget:
            options = dataclasses.replace(options, budget=tight(model, optimizer, self.folder, options))
        self.budget = options.budget
        return prepare_in_loop(model, optimizer, options)


_TIGHT: dict[str, tuple[int, int]] = {}


def tight(model: torch.nn.Module, optimizer: Any, folder: Path, options: Options) -> outcore.Budget:
    """The least possible device memory, and so much host memory that a part of the rest goes to disk."""
    params = [
        (name, p.requires_grad, [(t.shape, t.dtype) for t in tensors_in(p)]) for name, p in model.named_parameters()
    ]
    groups = [] if optimizer is None else optimizer.param_groups
    names = {p: name for name, p in model.named_parameters()}
    settings = [
        {**group, "params": [*map(names.get, group["params"])]} for group in groups
    ]  # the settings of groups, such as formats of states
    key = repr((type(optimizer), settings, params, options))
    if key not in _TIGHT:
        found = _tight(model, optimizer, folder, options)
        _TIGHT[key] = found.device, found.host
    device, host = _TIGHT[key]
    return outcore.Budget(device=device, host=host, disk=folder)


def _tight(model: torch.nn.Module, optimizer: Any, folder: Path, options: Options) -> outcore.Budget:
    options = dataclasses.replace(options, budget=outcore.Budget(device=1, host=1, disk=folder))
    with pytest.raises(outcore.PlanInfeasibleError) as refusal:
        plan_for(model, optimizer, options)
    need = refusal.value.required_bytes
    for share in (0.5, 0.35, 0.65, 0.8, 0.1, 0.2, 0.15, 0.12, 0.18, 0.05):
        host = need["host"] + int(need["disk"] * share)
        budget = outcore.Budget(device=need["device"], host=host, disk=folder)
        options = dataclasses.replace(options, budget=budget)
        if tiers_of(plan_for(model, optimizer, options)[1]) == ALL_TIERS:
            return budget
    raise AssertionError("no budget found that uses all tiers")


@contextmanager
def streamed(folder: Path, **options: Any) -> Iterator[Streamed]:
    """Yield the mixin side with these options; close what it prepared. Without ``budget``, a tight one is used."""
    side = Streamed(folder, options)
    whole_files = AssertionError("a whole file in host memory")
    with (
        patch.object(integration, "prepare_in_loop", side.prepare),
        patch("safetensors.torch.load_file", side_effect=whole_files),
    ):
        try:
            yield side
        finally:
            for model in side.models:
                if attachment_of(model()) is not None:
                    outcore.close(model(), keep_weights=False)


def train(trainer: Trainer) -> None:
    trainer.train()


def same(job: Callable[..., Trainer], folder: Path, *, drive: Callable[[Trainer], Any] = train, **changes: Any) -> None:
    """Run a job both ways; the result of ``drive``, the logs and the weights must be equal bit for bit."""
    want = seen(job(Plain(), folder / "plain", **changes), drive)
    with streamed(folder) as side:
        trainer = job(side, folder / "streamed", **changes)
        got = seen(trainer, drive)
        assert tiers(trainer.model) == ALL_TIERS
    exactly(got, want)


def exactly(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def seen(trainer: Trainer, drive: Callable[[Trainer], Any]) -> dict[str, Any]:
    return {"result": drive(trainer), "logs": logs(trainer), "weights": weights(trainer.model)}


def logs(trainer: Trainer) -> list[dict[str, Any]]:
    """All that was logged, except times."""
    history = trainer.state.log_history
    return [{k: v for k, v in entry.items() if not k.endswith(_BOOKKEEPING)} for entry in history]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights on the host; those of a prepared model are brought there."""
    return {
        name if inner is tensor else f"{name} {i}": inner.detach().to("cpu", copy=True)
        for name, tensor in model.state_dict().items()
        for i, inner in enumerate(tensors_in(tensor))
    }


def tiers(model: torch.nn.Module) -> set[str]:
    """The tiers that a prepared model's plan uses."""
    return tiers_of(attachment_of(model).engine.opened.plan)


def tiers_of(plan: outcore.Plan) -> set[str]:
    return {tier for unit in plan.units for tier in (unit.weights, unit.gradients, unit.states)}


# Models, data and jobs.


def llama(dtype: torch.dtype = torch.float32, seed: int = 3, attention_dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=attention_dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).to(dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<pad>", "<s>", "</s>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def saved_model(folder: Path) -> str:
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM", **changes
    )


# Four steps. An epoch has four micro-batches, so accumulation 3 leaves one for every second step. Norms are clipped.
ARGUMENTS = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": ON_CPU,
}
TEXTS = [f"line {i} " + "abc " * (i % 5 + 1) for i in range(8)]
EVAL_TEXTS = [f"unseen {i} " + "ab " * i for i in range(4)]


def token_dataset(texts: list[str]) -> Dataset:
    rows = tokenizer()(texts, padding=True)["input_ids"]
    labels = [[token if token else -100 for token in row] for row in rows]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def language(
    side: Plain,
    folder: Path,
    *,
    kind: type[Trainer] = Trainer,
    model: Any = None,
    parts: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    """Transformers' own Trainer."""
    options = {"train_dataset": token_dataset(TEXTS), "eval_dataset": token_dataset(EVAL_TEXTS), **(parts or {})}
    if "model_init" not in options:
        options["model"] = model if model is not None else llama()
    arguments = TrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **changes})
    return side.trainer(kind, args=arguments, processing_class=tokenizer(), **options)


def sft(
    side: Plain, folder: Path, *, model: Any = None, parts: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    """TRL's supervised fine-tuning."""
    options = {
        "train_dataset": Dataset.from_dict({"text": TEXTS}),
        "eval_dataset": Dataset.from_dict({"text": EVAL_TEXTS}),
    }
    arguments = SFTConfig(output_dir=str(folder), **{**ARGUMENTS, "bf16": False, **changes})
    model = model if model is not None else llama()
    return side.trainer(
        SFTTrainer, model=model, args=arguments, processing_class=tokenizer(), **{**options, **(parts or {})}
    )


def dpo(
    side: Plain, folder: Path, *, model: Any = None, parts: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    """TRL's preference optimisation."""
    arguments = DPOConfig(output_dir=str(folder), **{**ARGUMENTS, "bf16": False, **changes})
    options = {"train_dataset": preferences(8), "eval_dataset": preferences(4), **(parts or {})}
    model = model if model is not None else llama()
    return side.trainer(DPOTrainer, model=model, args=arguments, processing_class=tokenizer(), **options)


def preferences(count: int) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [f"question {i}" for i in range(count)],
            "chosen": [f" yes {i}" for i in range(count)],
            "rejected": [f" no, never {i}" for i in range(count)],
        }
    )
