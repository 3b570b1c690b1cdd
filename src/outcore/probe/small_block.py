"""A block of a language model with next to nothing to compute: what launching its kernels takes, Python included.

[Note: launching] A kernel that is called in a loop is launched in a few microseconds. In a model modules are called,
views are made and autograd writes down what was done between two kernels. On one processor a call in a loop took 1.7 us
of the thread that launches, a kernel of this block 7.5, one of a small Llama 11. Backward walks a graph without any
Python: the two kernels or so for each one of forward took 1.03 to 1.07 times as long as that one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_WIDTH, _TOKENS, _HEADS = 16, 4, 2


class _Norm(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Attention(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], _HEADS, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        q, k = (each * cos + self._turned(each) * sin for each in (q, k))
        scores = functional.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.out((scores @ v).transpose(1, 2).reshape(x.shape))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class _Gated(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class SmallBlock(nn.Module):
    """Norm, attention with rotary positions, norm, gated products, as in a Llama."""

    kernels = 37
    """Of a forward, as ``planning.timing.counted`` counts them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.attention, self.second, self.gated = (
            _Norm(device),
            _Attention(device),
            _Norm(device),
            _Gated(device),
        )
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.ones(_TOKENS, _WIDTH // _HEADS, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: See ``example``."""
        x = x + self.attention(self.first(x), self.cos, self.sin)
        return x + self.gated(self.second(x))

    @staticmethod
    def example(device: torch.device) -> torch.Tensor:
        """What it can be called with."""
        return torch.ones(1, _TOKENS, _WIDTH, device=device)
