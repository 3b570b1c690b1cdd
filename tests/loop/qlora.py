"""For tests of quantised bases: a small Llama in bf16, adapters on it, and a loop that uses its slots twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from plans import forced
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.checkpoint.save_and_load import load_checkpoint, save_checkpoint
from outcore.model.wrapped import tensors_in

from . import test_in_pieces
from .rig import DEVICE, assert_same, prepared
from .test_transformers import ids

LORA = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
WHERE = ("device", "plain", "host", "host keep", "disk", "disk keep")
ELSEWHERE = [
    # homes, policy, activations
    ("host", "keep", "disk"),
    ("host", "select", "host"),
]
COMPILED = [("host", "recompute", "device"), ("disk", "keep", "host")]
TRACED = {"backend": "aot_eager"}
PIECES: list[dict[str, Any]] = [{"homes": "disk"}, {"homes": "host", "policy": "keep"}]


def sizable(**more: Any) -> LlamaForCausalLM:
    """Return a Llama whose width is one block of 64 weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=3, attention_dropout=0.1, **sizes, **more))


def saved(folder: Path, **more: Any) -> Path:
    """Save a Llama as a checkpoint in bf16; return the folder."""
    with torch.device("cpu"):
        torch.manual_seed(11)
        sizable(**more).to(torch.bfloat16).save_pretrained(folder)
    return folder


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(12)
    return get_peft_model(model, copy.deepcopy(LORA)).train()  # type: ignore[arg-type]


def trained(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def drive(model: nn.Module, optimizer: Any, *, evaluates: bool = True) -> list[torch.Tensor]:
    """Args: evaluates: Whether an evaluation passes through the slots between forward and backward."""
    seen = []
    for i in range(2):
        loss = model(input_ids=ids(i), labels=ids(i)).loss
        if evaluates:
            with torch.no_grad():
                model(input_ids=ids(i + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def base_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if "lora_" not in k}


def is_the_plain_loop(
    load: Callable[[], Any], where: str, policy: str, activations: str, disk: Path, traced: Any = None
) -> None:
    """Args: traced: How to compile the blocks, then without evaluation and cache, which need codes of their own."""
    model = load().to(DEVICE)
    model.config.use_cache = not traced
    for block in model.base_model.model.model.layers if traced else ():
        block.compile(**traced)
    torch.manual_seed(5)
    want, state = drive(model, trained(model, fused=True), evaluates=not traced), inside(model)
    if traced:
        torch._dynamo.reset()
    model = load()
    model.config.use_cache = not traced
    optimizer = trained(model)
    _, plan = forced(model, optimizer, where, policy=policy, activations=activations)
    options = {"compile": traced or False, "budget": outcore.Budget(disk=str(disk))}
    with outcore.prepare(model, optimizer, plan=plan, device=DEVICE, **options) as (model, optimizer):
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer, evaluates=not traced))
        assert_same(list(state.values()), list(inside(model).values()))
    if traced:
        torch._dynamo.reset()


def goes_on(load: Callable[[], Any], base: Callable[[], Any], folder: Path) -> None:
    """Resume on another tier, and load the adapters in PEFT. Args: base: Makes the model without adapters."""
    model = load()
    with prepared(model, trained(model), "host", folder) as (model, optimizer):
        drive(model, optimizer)
        save_checkpoint(model, optimizer, folder / "saved", step=2, wait=True)
        outcore.save_pretrained(model, folder / "adapters")
        want, state = drive(model, optimizer), inside(model)
    model = load()
    with prepared(model, trained(model), "disk", folder, policy="keep") as (model, optimizer):
        load_checkpoint(model, optimizer, folder / "saved")
        adapters = {k: v for k, v in model.state_dict().items() if "lora_" in k}
        assert_same(want, drive(model, optimizer))
        assert_same(state, inside(model))
    again = PeftModel.from_pretrained(base(), folder / "adapters").state_dict()
    assert_same(adapters, {k: v for k, v in again.items() if "lora_" in k})


def inside(model: Any) -> dict[str, torch.Tensor]:
    """Return a state dict with the tensors inside of wrappers."""
    state = model if isinstance(model, dict) else model.state_dict()
    parts = {f"{name} {i}": t for name, tensor in state.items() for i, t in enumerate(tensors_in(tensor))}
    return {name: t.view(torch.uint8) if "float8" in str(t.dtype) else t for name, t in parts.items()}


class Logits(nn.Module):
    """Returns logits without random numbers, from token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        return logits


def same_in_pieces(plain: nn.Module, model: nn.Module, folder: Path, **how: Any) -> None:
    """Compare batches in pieces with accumulation over the pieces as micro-batches. Args: how: See ``PIECES``."""
    batches, plain, model = test_in_pieces.batches_of(2), Logits(plain), Logits(model)
    norms = test_in_pieces.accumulated(plain, batches)
    with test_in_pieces.prepared(model, folder, **how) as (model, optimizer):
        assert_same(norms, test_in_pieces.in_pieces(model, optimizer, batches))
        state = model.state_dict()
        want = {name: param for name, param in plain.named_parameters() if param.requires_grad}
        assert_same(want, {name: state[name] for name in want})
