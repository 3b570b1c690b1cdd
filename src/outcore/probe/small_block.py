"""A block of a language model. With next to nothing to compute, it shows the cost of launching kernels, with Python.

A wider one stands for the blocks of a model that the host trains.

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


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, device: torch.device) -> None:
        super().__init__()
        self._heads = heads
        self.queries, self.keys, self.values, self.out = (_linear(width, device) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self._heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        q, k = (each * cos + self._turned(each) * sin for each in (q, k))
        scores = functional.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.out((scores @ v).transpose(1, 2).reshape(x.shape))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class _Gated(nn.Module):
    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.gate, self.up, self.down = (_linear(width, device) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class SmallBlock(nn.Module):
    """Norm, attention with rotary positions, norm, gated products, as in a Llama."""

    kernels = 37
    """Number of kernels in a forward, as ``planner.timing.counted`` counts them."""

    def __init__(self, device: torch.device, width: int = 16, tokens: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.first, self.second = _Norm(width, device), _Norm(width, device)
        self.attention, self.gated = _Attention(width, heads, device), _Gated(width, device)
        for name in ("cos", "sin"):
            angles = torch.ones(tokens, width // heads, dtype=torch.float32, device=device)
            self.register_buffer(name, angles, persistent=False)
        self._example = (1, tokens, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block. Args: x: See ``example``."""
        return self.gate(self.attend(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Run the first half."""
        return x + self.attention(self.first(x), self.cos, self.sin)

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Run the second half."""
        return x + self.gated(self.second(x))

    def example(self) -> torch.Tensor:
        """Return an argument for the block."""
        return self.first.weight.new_ones(self._example)
