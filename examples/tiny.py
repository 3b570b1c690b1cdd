"""A model and a tokenizer built from nothing, so that the examples run anywhere. Put your own in their place."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Tokenizer, LlamaConfig, LlamaForCausalLM


def tiny_llama() -> LlamaForCausalLM:
    """Make a Llama of four layers with random weights that are the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(Path(__file__).parent / "data" / "config.json"))


def tiny_tokenizer() -> GPT2Tokenizer:
    """Make a tokenizer of the 256 bytes and an end-of-text token."""
    return GPT2Tokenizer(pad_token="<|endoftext|>").train_new_from_iterator([""], 257, show_progress=False)
