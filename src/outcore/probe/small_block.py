"""A block of a language model. With next to nothing to compute, it shows the cost of launching kernels, with Python.

A wider one stands for compute beside links, where the host computes.

[Note: launching] In a plain loop, launching a kernel takes a few microseconds. In a model, more happens between two
kernels: modules are called, views are made, and autograd records the operations. On one processor, the launching thread
took 1.7 us for a call in a loop, 7.5 us for a kernel of this block, and 11 us for one of a small Llama. Backward walks
a graph without any Python: about two of its kernels go with each one of forward, and together they took 1.03 to 1.07
times as long as that one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def _linear(width: int, device: torch.device) -> nn.Linear:
    """Make a layer in fp32 whatever the default is, without drawing random numbers, which would change a training."""
    made = nn.utils.skip_init(nn.Linear, width, width, bias=False, device=device, dtype=torch.float32)
    nn.init.constant_(made.weight, 1 / width)
    return made


class _Norm(nn.Module):
    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class SmallBlock(nn.Module):
    """Norm, attention with rotary positions, norm, gated products, as in a Llama."""

    kernels = 37
    """Number of kernels in a forward, as ``planner.timing.counted`` counts them."""

    def __init__(self, device: torch.device, width: int = 16, tokens: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Norm(width, device) for _ in range(2))
        self.products = nn.ModuleList(_linear(width, device) for _ in range(7))
        self.cos, self.sin = (torch.ones(tokens, width // heads, dtype=torch.float32, device=device) for _ in range(2))
        self._heads, self._example = heads, (1, tokens, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block. Args: x: See ``example``."""
        queries, keys, values, out, gate, up, down = self.products
        normed, shape = self.norms[0](x), (*x.shape[:-1], self._heads, -1)
        q, k, v = (f(normed).view(shape).transpose(1, 2) for f in (queries, keys, values))
        q, k = (each * self.cos + self._turned(each) * self.sin for each in (q, k))
        scores = functional.softmax(q @ k.transpose(-1, -2), dim=-1)
        x = x + out((scores @ v).transpose(1, 2).reshape(x.shape))
        normed = self.norms[1](x)
        return x + down(functional.silu(gate(normed)) * up(normed))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    def example(self) -> torch.Tensor:
        """Return an argument for the block."""
        return self.cos.new_ones(self._example)
