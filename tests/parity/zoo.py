"""Tiny models on which streamed training is compared with the plain loop.

Every size is odd or no power of two, so that padding, vector tails and slots of unequal size are all in use. Dropout is
on, so that a random number drawn once too often or too seldom shows in the loss.
"""

from __future__ import annotations

import functools
import os
import warnings
import zlib
from typing import Any

import torch
from torch import nn

VOCAB = 131
LENGTH = 17
STEPS = 3  # the patchwork has skipped and moved its blocks by then
MODELS = ("gpt2", "llama", "qwen3", "mixtral", "lora", "patchwork")
"""Models that are bitwise equal under every plan."""

DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
"""Where the loops compute. With ``cuda``, an update on the host has the plain loop's bits only on a simulated GPU."""

Batch = dict[str, Any]


def make(name: str, precision: str = "fp32", seed: int = 0) -> nn.Module:
    """Build a model in training mode; equal arguments give equal models."""
    torch.manual_seed(seed + zlib.crc32(name.encode()) % 1000)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    return _BUILDERS[name](dtype).train()


def batches(name: str, *, seed: int = 0, steps: int = STEPS, micro_batches: int = 1) -> list[Batch]:
    """Return ``steps * micro_batches`` batches in order; sizes differ from one to the next."""
    generator = torch.Generator().manual_seed(seed)
    return [_batch(name, step, micro, generator) for step in range(steps) for micro in range(micro_batches)]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of one micro-batch."""
    if "labels" in batch:
        return model(**batch).loss
    out = model(batch["inputs"], order=batch["order"])
    entropy = nn.functional.cross_entropy(out["logits"].float(), batch["targets"])
    return 0.6 * entropy + 0.125 * out["gate"].float().square().mean()


def _batch(name: str, step: int, micro: int, generator: torch.Generator) -> Batch:
    rows = 2 + (step + micro) % 2
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator).to(DEVICE)
    if name == "patchwork":
        targets = torch.randint(0, VOCAB, (rows * LENGTH,), generator=generator).to(DEVICE)
        return {"inputs": {"tokens": ids, "weight": 0.5}, "order": call_order(step, micro), "targets": targets}
    batch: Batch = {"input_ids": ids, "labels": ids.clone()}
    if name in ("llama", "qwen3"):
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, LENGTH - 4 :] = 0
    return batch


def call_order(step: int, micro: int) -> tuple[int, ...]:
    """Return the blocks that run: block 1 twice; others are moved, or skipped for a step or micro-batch."""
    order: tuple[int, ...] = (0, 1, 1, 2, 3, 4)
    if step % 3 == 1:
        order = (0, 1, 1, 2, 4)
    if step % 3 == 2:
        order = (2, 0, 1, 1, 4, 3)
    if micro == 1 and step % 2 == 0:
        order = tuple(i for i in order if i != 0)
    return order


class Piece(nn.Module):
    """A block with all that is awkward: dicts, buffers, frozen, unused, scalar and fp32 parameters."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)  # its running statistics show a forward too many
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.up = nn.Linear(width, inner)
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.down = nn.Linear(inner, width, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.scale = nn.Parameter(torch.rand(width) + 0.5)  # stays fp32 in a bf16 model
        self.dropout = nn.Dropout(0.1)

    def forward(self, state: dict[str, Any], *, weight: float) -> dict[str, Any]:
        h = state["hidden"]
        x = self.norm(h.flatten(0, 1)).view_as(h) + self.frozen
        y = self.down(self.dropout(nn.functional.gelu(self.up(x)))) * self.temperature
        y = (y.float() * self.scale).to(h.dtype)
        gate = torch.tanh(y) * weight
        return {
            "hidden": h + y + state["gate"],
            "gate": gate,
            "ignored": y.sum(),
            "positions": state["positions"],
            "calls": state["calls"] + 1,
            "nothing": None,
        }


class Patchwork(nn.Module):
    """A model that no library knows: blocks are called twice, skipped and re-ordered as the caller says."""

    def __init__(self, width: int = 19, inner: int = 37, num_blocks: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.pieces = nn.ModuleList(Piece(width, inner) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, inputs: dict[str, Any], *, order: tuple[int, ...]) -> dict[str, torch.Tensor]:
        hidden = self.embed(inputs["tokens"])
        positions = torch.arange(hidden.shape[1])
        state: dict[str, Any] = {"hidden": hidden, "gate": torch.zeros_like(hidden), "positions": positions, "calls": 0}
        for i in order:
            state = self.pieces[i](state, weight=inputs["weight"])
        if state["calls"] != len(order):
            raise AssertionError(f"{state['calls']} calls, expected {len(order)}")
        return {"logits": self.head(state["hidden"]).flatten(0, 1), "gate": state["gate"]}


def _patchwork(dtype: torch.dtype) -> nn.Module:
    model = Patchwork().to(dtype)
    for piece in model.pieces:
        piece.scale.data = piece.scale.data.float()
    return model


def _gpt2(dtype: torch.dtype) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=29,
        n_embd=44,
        n_layer=3,
        n_head=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config).to(dtype)


@functools.cache
def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _llama(dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=40, intermediate_size=107, num_hidden_layers=4, attention_bias=True, **_sizes())
    return LlamaForCausalLM(config).to(dtype)


def _qwen3(dtype: torch.dtype) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=72, intermediate_size=83, num_hidden_layers=3, head_dim=18, tie_word_embeddings=True, **_sizes()
    )
    return Qwen3ForCausalLM(config).to(dtype)


def _mixtral(dtype: torch.dtype) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=40,
        intermediate_size=53,
        num_hidden_layers=3,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
        experts_implementation="eager",  # the grouped kernel needs rows of 16 bytes
        **_sizes(),
    )
    return MixtralForCausalLM(config).to(dtype)


def _lora(dtype: torch.dtype) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3, lora_alpha=6, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for an attribute by its old name
        return get_peft_model(_llama(dtype), config)  # adapters of a bf16 model stay in fp32


def _t5(dtype: torch.dtype) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=40,
        d_kv=10,
        d_ff=67,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.1,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).to(dtype)


_BUILDERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "lora": _lora,
    "patchwork": _patchwork,
    "t5": _t5,
}
