"""Llama shapes for benchmarks: any size, built on the meta device, with first values made at the speed of a copy.

Logits of a whole step would take more memory than the model (32768 tokens x 32000 words x 14 bytes are 15 GB), so the
loss is taken over pieces of the tokens, each computed again in backward, as fused losses do. All contestants run this.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

SHAPES: dict[str, dict[str, int]] = {
    "3b": {"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 24, "kv_heads": 8},  # 3.02e9 parameters
    "7b": {"layers": 32, "hidden": 4096, "intermediate": 11008, "heads": 32, "kv_heads": 32},  # 6.74e9
    "tiny": {"layers": 2, "hidden": 64, "intermediate": 160, "heads": 2, "kv_heads": 1},
}
VOCABULARY = 32000
LOSS_TOKENS = 4096
"""Tokens per piece of the loss."""
_NOISE_NUMEL = 2**24 - 3  # odd, so that rows of a matrix are not equal


class Llama(LlamaForCausalLM):
    """Llama with a loss in pieces, and with first values cut from one piece of noise."""

    _noise: torch.Tensor | None = None

    def __init__(self, config: LlamaConfig) -> None:
        """Args: config: Any configuration."""
        super().__init__(config)
        self.model._init_weights = self._init_weights  # the inner model has one of its own

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> CausalLMOutput:
        """The loss of predicting each next token."""
        hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        rows, wanted = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        pieces = zip(rows.split(LOSS_TOKENS), wanted.split(LOSS_TOKENS), strict=True)
        losses = [checkpoint(self._loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return CausalLMOutput(loss=torch.stack(losses).sum() / wanted.numel())

    def _loss(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.lm_head(rows).float(), wanted, reduction="sum")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Copy noise: 7 billion normal numbers take more than a minute; copies of 16 million take seconds."""
        if not isinstance(module, nn.Linear | nn.Embedding):
            super()._init_weights(module)
            return
        if Llama._noise is None:
            generator = torch.Generator().manual_seed(0)
            Llama._noise = torch.randn(_NOISE_NUMEL, generator=generator).mul_(0.02).to(torch.bfloat16)
        noise = Llama._noise
        flat = module.weight.view(-1)
        for start in range(0, flat.numel(), _NOISE_NUMEL):
            part = flat[start : start + _NOISE_NUMEL]
            part.copy_(noise[: part.numel()])


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for a shape by name, and for numbers that override it."""
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    for name in ("layers", "hidden", "intermediate", "heads", "kv-heads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)


def shape_name(args: argparse.Namespace) -> str:
    """The shape of the command line, or ``custom`` if a number overrides one of its own."""
    is_named = args.vocabulary == VOCABULARY and all(getattr(args, name) is None for name in SHAPES[args.shape])
    return args.shape if is_named else "custom"


def config_of(args: argparse.Namespace, layers: int | None = None) -> LlamaConfig:
    """Return the shape of the command line. Args: layers: Replaces its number of layers, if given."""
    given = {name: getattr(args, name) for name in SHAPES[args.shape]}
    sizes = SHAPES[args.shape] | {name: value for name, value in given.items() if value is not None}
    return LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"] if layers is None else layers,
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=args.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )


def on_meta(config: LlamaConfig) -> Llama:
    """Build the model without any bytes, in bf16 and training mode."""
    with torch.device("meta"):
        return Llama(config).to(torch.bfloat16).train()


def materialised(config: LlamaConfig, device: str) -> Llama:
    """Build the model with its first values on a device."""
    model = on_meta(config).to_empty(device=device)
    for module in model.modules():
        model._init_weights(module)
    return model
