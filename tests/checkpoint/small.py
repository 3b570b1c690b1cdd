"""Small models, and plans that put all their units on one tier."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from plans import forced
from torch import nn

import outcore
from outcore.checkpoint.find_checkpoints import found
from outcore.checkpoint.training_state import described_states, trained_params
from outcore.engine.unit.views import torch_dtype
from outcore.engine.values.access import shown_states
from outcore.engine.values.parameter_values import let_masters_follow
from outcore.memory.files.weights_file import write_safetensors
from outcore.spec.manifest import Manifest
from outcore.spec.plan import Plan

VOCAB = 131
DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
TIERS = ("device", "host", "disk")
NAMES = ("gpt2", "llama", "tied", "mixtral", "t5")


class Block(nn.Module):
    """A block with a frozen and an fp32 parameter, a norm with persistent buffers, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.norm = nn.BatchNorm1d(2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + self.dropout(self.down(torch.tanh(hidden))) * self.scale

    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)


class Plain(nn.Module):
    """A model that no library knows. Embedding and head are tied."""

    def __init__(self, width: int = 19, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return _Loss(nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten()))


class _Loss:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


def config(name: str, **more: Any) -> Any:
    """The configuration of a Transformers model; ``more`` replaces sizes."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 53,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if name == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_positions": 29, "n_embd": 44, "n_layer": 3, "n_head": 4, "use_cache": False}
        return transformers.GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **more})
    if name == "t5":
        sizes = {"vocab_size": VOCAB, "d_model": 40, "d_kv": 10, "d_ff": 67, "num_layers": 2, "num_heads": 4}
        return transformers.T5Config(**{**sizes, "use_cache": False, "decoder_start_token_id": 0, **more})
    if name == "mixtral":
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        return transformers.MixtralConfig(**{**sizes, **experts, **more})
    if name == "tied":
        return transformers.Qwen3Config(**{**sizes, "head_dim": 18, "tie_word_embeddings": True, **more})
    return transformers.LlamaConfig(**{**sizes, **more})


def build(name: str, *, dtype: torch.dtype = torch.float32, meta: bool = False, seed: int = 0, **more: Any) -> Any:
    """A model in training mode, with values or on the meta device."""
    torch.manual_seed(seed)
    if name == "plain":
        with torch.device("meta" if meta else "cpu"):
            return _placed(Plain(**more), dtype)
    import transformers

    kind = {"gpt2": "GPT2LMHeadModel", "mixtral": "MixtralForCausalLM", "t5": "T5ForConditionalGeneration"}.get(name)
    kind = kind or {"tied": "Qwen3ForCausalLM"}.get(name, "LlamaForCausalLM")
    with torch.device("meta" if meta else "cpu"):
        return _placed(getattr(transformers, kind)(config(name, **more)), dtype)


def _placed(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    on_meta = next(model.parameters()).is_meta
    return model.to("meta" if on_meta else DEVICE, dtype).train()


def with_adapters(model: nn.Module, **more: Any) -> Any:
    """Add LoRA to some layers."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for an attribute under its old name
        options = {"target_modules": ["q_proj", "down_proj"], **more}
        return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, **options))


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    """A batch; sizes differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (2 + step % 2, 13), generator=generator).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def plan_on(tier: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: Any = None) -> Plan:
    """A plan with everything on one tier, except the weights of the root unit, which are on the device."""
    return forced(model, optimizer, tier, precision=precision, depth=1)[1]


@contextmanager
def prepared(model: Any, folder: Path, tier: str = "host", **options: Any) -> Iterator[Any]:
    """A prepared model and its optimizer, with everything on ``tier``; closed at the end."""
    optimizer = options.pop("optimizer", None) or adamw(model)
    plan = plan_on(tier, model, optimizer, options.get("precision"))
    budget = outcore.Budget(disk=str(folder))
    with outcore.prepare(model, optimizer, plan=plan, budget=budget, device=DEVICE, **options) as (model, streamed):
        yield model, streamed


def find(directory: Path, **options: Any) -> tuple[Path, Manifest]:
    """Call ``found`` without holding the result."""
    with found(directory, **options) as pair:
        return pair


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range = range(1)) -> list[torch.Tensor]:
    """Train some steps, each with its own random numbers. Returns the losses."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def save_states(optimizer: Any, directory: Path) -> None:
    """Write what ``LibraryFiles.states`` writes beside training, but at once, through the accessors of states."""
    access, specs, places = optimizer.engine.access, [], []
    metadata = described_states(optimizer)
    for name, (unit, i) in trained_params(optimizer):
        let_masters_follow(unit, access)
        for state, dtype in shown_states(unit, i):
            shape = state.described(unit.spec.params[i], i).shape
            specs.append((f"{name}.{state.name}", torch_dtype(dtype), shape))
            places.append((unit, state.name, i))
    values = ((spec[0], access.read_state(*place)) for spec, place in zip(specs, places, strict=True))
    write_safetensors(directory, specs, values, stem="optimizer", metadata=metadata)


def same(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """Assert equal names in equal order, equal shapes and dtypes, and equal bits."""
    assert list(want) == list(got)
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype, name
        assert torch.equal(tensor.cpu(), got[name].cpu()), name
