"""Blocks of which random models are made: small versions of common layers, with everything that can go wrong."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
LENGTHS = (5, 7, 9)
VOCAB = 29


class Trip:
    """Raises once at a given place: in forward, in backward, or in the recompute."""

    def __init__(self) -> None:
        self.where: str | None = None
        self.error: BaseException | None = None

    def arm(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def reached(self, where: str) -> None:
        if self.where == where:
            self.where = None
            assert self.error is not None
            raise self.error


class _Tripwire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        ctx.set_materialize_grads(False)  # a hook on the block makes autograd fill in zeros: see exceptions.md
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.trip.reached("backward")
        return grad, None


@dataclasses.dataclass
class Carried:
    """A result as a dataclass."""

    hidden: torch.Tensor
    aux: torch.Tensor | None
    note: str = "carried"


class Pair(NamedTuple):
    """A result as a named tuple."""

    hidden: torch.Tensor
    aux: torch.Tensor | None


STYLES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tensor": (lambda h, a: h if a is None else (h, a), lambda r: r if isinstance(r, tuple) else (r, None)),
    "tuple": (lambda h, a: (h, None, a), lambda r: (r[0], r[2])),
    "list": (lambda h, a: [h, {"aux": a}], lambda r: (r[0], r[1]["aux"])),
    "dict": (lambda h, a: {"hidden": h, "aux": a, "n": 3}, lambda r: (r["hidden"], r["aux"])),
    "dataclass": (Carried, lambda r: (r.hidden, r.aux)),
    "named": (Pair, tuple),
}
CALLS = ("position", "keyword", "state")


class Block(nn.Module):
    """A unit around ``inner``; how it is called and what it returns varies."""

    def __init__(self, inner: nn.Module, *, style: str, call: str, trips: bool, ends: bool) -> None:
        """Args: ends: Whether backward needs the result itself."""
        super().__init__()
        self.inner, self.style, self.call, self.trips, self.ends = inner, style, call, trips, ends
        self.trip = Trip()

    def forward(self, x: Any = None, *, hidden: torch.Tensor | None = None) -> Any:
        if isinstance(x, dict):
            x = x["hidden"]
        x = hidden if x is None else x
        self.trip.reached("forward")
        if torch._C._current_graph_task_id() != -1:
            self.trip.reached("again")
        y, aux = self.inner(x)
        if self.ends:
            y = torch.tanh(y)
        if self.trips:
            y = _Tripwire.apply(y, self.trip)
        return STYLES[self.style][0](y, aux)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the block in its own style."""
        if self.call == "position":
            result = self(x)
        elif self.call == "keyword":
            result = self(hidden=x)
        else:
            result = self({"hidden": x, "depth": 1})
        return STYLES[self.style][1](result)


class Mlp(nn.Module):
    """LayerNorm, GELU, dropout."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        inner = rng.choice((2 * width, 2 * width + 3, width))
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(rng.choice((0.0, 0.1)))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x))))), None


class Attention(nn.Module):
    """Scaled dot-product attention, with a projection for each role or one for all."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.heads, self.drop, self.causal = rng.choice((1, 2, 4)), rng.choice((0.0, 0.1)), rng.random() < 0.5
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        drop = self.drop if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2)), None


class Multihead(nn.Module):
    """torch's own attention, which reads the weights of a projection without calling it."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=rng.choice((0.0, 0.1)), batch_first=True)
        self.needs = rng.random() < 0.5

    def forward(self, x: torch.Tensor) -> Any:
        y, weights = self.attention(x, x, x, need_weights=self.needs)
        return x + y, None if weights is None else weights.float().square().mean()


class Encoder(nn.Module):
    """torch's own encoder layer."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, 0.1, batch_first=True, norm_first=rng.random() < 0.5
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), None


class Convolution(nn.Module):
    """A convolution along time, with a norm over groups or batches."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=rng.choice((1, 2)))
        self.norm = (
            nn.BatchNorm1d(width, momentum=rng.choice((0.1, None))) if rng.random() < 0.5 else nn.GroupNorm(2, width)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return x + functional.silu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2), None


class Image(nn.Module):
    """A convolution in two dimensions, with channels of its own."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.conv, self.back = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.back(functional.relu(self.norm(self.conv(x[:, None])), inplace=True))[:, 0], None


class Running(nn.Module):
    """Buffers that forward changes: a mean, a counter, and one that is replaced."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(width), persistent=rng.random() < 0.5)
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x - self.mean)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
                self.count += 1
                self.last = y.detach().amax((0, 1)).to(self.mean.dtype)
        return x + torch.tanh(y) * (1 + 0.01 * self.count), None


class Recurrent(nn.Module):
    """An LSTM or GRU with one or two layers."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        layers = rng.choice((1, 2))
        kind = rng.choice((nn.LSTM, nn.GRU, nn.RNN))
        self.norm = nn.LayerNorm(width)
        self.rnn = kind(width, width, layers, batch_first=True, dropout=0.1 if layers == 2 else 0.0)

    def forward(self, x: torch.Tensor) -> Any:
        # oneDNN has no bf16 LSTM for some CPUs. The simulated GPU reads the flag late, when it may affect other work.
        with torch.backends.mkldnn.flags(enabled=x.is_cuda):
            return x + self.rnn(self.norm(x))[0], None


class Experts(nn.Module):
    """Routing by token: an expert without tokens has no gradient; the router's logits are a second result."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.top = rng.choice((1, 2))
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.flatten(0, 1)
        logits = self.router(flat).float()
        weights, chosen = logits.softmax(-1).topk(self.top)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == i)
            if len(rows):
                y = y.index_add(0, rows, (expert(flat[rows]) * weights[rows, which, None]).to(y.dtype))
        return x + y.view_as(x), logits.logsumexp(-1).square().mean()


class Checkpointed(nn.Module):
    """A layer that checkpoints its activations by itself."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.first, self.second = Mlp(width, rng), Mlp(width, rng)

    def forward(self, x: torch.Tensor) -> Any:
        x, _ = checkpoint(self.first, x, use_reentrant=False)
        return self.second(x)[0], None


class Twice(nn.Module):
    """A weight that is used twice, once transposed, and a submodule that is called twice."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        y = functional.linear(torch.tanh(functional.linear(x, self.weight)), self.weight.t())
        return x + self.linear(torch.tanh(self.linear(y))), None


class Bare(nn.Module):
    """Parameters of all shapes: a number, a vector, lists, slices, and one that is not used."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(width) * 0.1)
        self.some = nn.ParameterList(
            [nn.Parameter(torch.randn(width, 3) * 0.2), nn.Parameter(torch.randn(3, width) * 0.2)]
        )
        self.unused = nn.Linear(3, 2)
        self.empty = nn.Parameter(torch.zeros(0, 4)) if rng.random() < 0.3 else None
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        half = x.shape[-1] // 2
        y = self.linear(x)[..., :half] @ self.linear.weight[:half]
        return x + self.gain * (y + self.bias + x @ self.some[0] @ self.some[1]), None


class Noise(nn.Module):
    """Random numbers of its own, besides dropout's."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = nn.FeatureAlphaDropout(0.1) if rng.random() < 0.3 else nn.Dropout1d(0.2)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.drop(self.linear(x) + 0.1 * torch.randn_like(x) * torch.rand(()).item()), None


class Either(nn.Module):
    """One of two layers, depending on the batch."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh((self.odd if len(x) % 2 else self.even)(x)), None


class Own(nn.Module):
    """Makes its own position embedding, stops gradients and leaves autocast."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.positions = nn.Embedding(max(LENGTHS), width)
        self.register_buffer("order", torch.arange(max(LENGTHS)), persistent=False)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        y = x.detach() + self.positions(self.order[: x.shape[1]])
        with torch.autocast(DEVICE, enabled=False):
            y = self.linear(y.to(self.linear.weight.dtype))
        return x + torch.sigmoid(y).to(x.dtype), None


class Normed(nn.Module):
    """Computed weights: normalised, or divided by their largest singular value with a buffer that tracks it."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        how = rng.choice((parametrizations.weight_norm, parametrizations.spectral_norm))
        self.linear = how(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.linear(x)), None


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.base(x) + 2.0 * self.b(self.a(x))), None


KINDS: dict[str, type[nn.Module]] = {
    "mlp": Mlp,
    "attention": Attention,
    "multihead": Multihead,
    "encoder": Encoder,
    "convolution": Convolution,
    "image": Image,
    "running": Running,
    "recurrent": Recurrent,
    "experts": Experts,
    "checkpointed": Checkpointed,
    "twice": Twice,
    "bare": Bare,
    "noise": Noise,
    "either": Either,
    "own": Own,
    "normed": Normed,
    "adapted": Adapted,
}
