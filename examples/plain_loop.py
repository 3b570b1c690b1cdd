"""Plain PyTorch with everything in memory: the loop that outcore must equal, bit for bit.

It has bf16 weights, and gradients, masters and moments in fp32; on a CPU that is slow with bf16, all are in fp32.
``python examples/plain_loop.py`` runs it alone.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

Batch = dict[str, torch.Tensor]
VOCABULARY, HIDDEN, LAYERS, BATCH_SIZE, SEQUENCE, WARMUP_STEPS, LR, MAX_NORM = 256, 192, 8, 8, 64, 20, 3e-3, 1.0
# Without AVX-512 a CPU multiplies bf16 matrices some thirty times as slowly as fp32 ones.
DTYPE = torch.bfloat16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else torch.float32


def corpus() -> torch.Tensor:
    """Read the standard library's own source; every byte is a token."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def batches(text: torch.Tensor, seed: int) -> Iterator[Batch]:
    """Cut random windows from the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - SEQUENCE, (BATCH_SIZE, 1), generator=generator)
        tokens = text[starts + torch.arange(SEQUENCE)]
        yield {"input_ids": tokens, "labels": tokens}


def build(seed: int, **sizes: int) -> LlamaForCausalLM:
    """Make a small Llama with random weights. Args: sizes: Values of its configuration that replace the usual ones."""
    torch.manual_seed(seed)
    usual = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.06, use_cache=False, **{**usual, **heads, **sizes})).to(
        DTYPE
    )


def warm_up_and_decay(steps: int) -> Callable[[int], float]:
    """Return the learning rate as a fraction of LR: it rises, then decays to almost nothing."""
    return lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / (steps + 1))


def train(
    model: LlamaForCausalLM, data: Iterator[Batch], steps: int, micro_batches: int = 1
) -> Iterator[tuple[float, float]]:
    """Train in place; yield loss and gradient norm of every step."""
    weights = list(model.parameters())
    masters = [w.detach().float() for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_decay(steps))
    for _ in range(steps):
        total_loss = 0.0
        sums = [torch.zeros_like(master) for master in masters]
        for _ in range(micro_batches):
            loss = model(**next(data)).loss / micro_batches
            loss.backward()
            total_loss += loss.item()
            for weight, total in zip(weights, sums, strict=True):
                total += weight.grad.float()
                weight.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        norm = clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        yield total_loss, norm.item()


if __name__ == "__main__":
    for step, (loss, norm) in enumerate(train(build(seed=0), batches(corpus(), seed=0), steps=100)):
        print(f"step {step} loss {loss:.3f} norm {norm:.3f}")
