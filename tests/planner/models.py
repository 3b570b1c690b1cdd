"""Small plain modules and invented specs for the tests of planning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import nn

from outcore.planner.forward.footprint import Footprint, SavedBytes, Step
from outcore.spec.model import ModelSpec, ParamSpec, UnitSpec


class Block(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain(nn.Module):
    """Any modules as attributes; it is never run."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def unit(name: str, trained: int, frozen: int = 0, *, precision: str = "bf16", buffers: int = 0) -> UnitSpec:
    """A unit with the given numbers of trained and frozen elements."""
    dtype = "float32" if precision == "fp32" else "bfloat16"
    update_dtype = "bfloat16" if precision == "pure_bf16" else "float32"
    sizes = [("weight", trained, True), ("frozen", frozen, False)]
    params = tuple(
        ParamSpec(name=f"{name}.{n}", shape=(numel,), dtype=dtype, update_dtype=update_dtype, requires_grad=grad)
        for n, numel, grad in sizes
        if numel
    )
    return UnitSpec(name=name, params=params, buffer_bytes=buffers)


def layered(num_layers: int = 12, *, root: int = 50_000, layer: int = 400_000, precision: str = "bf16") -> ModelSpec:
    """A root and equal layers, as in a language model."""
    names = ["", *(f"model.layers.{i}" for i in range(num_layers))]
    units = tuple(unit(n, layer if n else root, precision=precision) for n in names)
    return ModelSpec(units=units, state_names=("exp_avg", "exp_avg_sq"), precision=precision)


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    """Draw a model with few units of any size; some are frozen, some empty, some alike."""
    precision = draw(st.sampled_from(["fp32", "bf16", "pure_bf16"]))
    buffers = st.sampled_from([0, 4096])
    numel = st.sampled_from([0, 1, 199, 5_000, 5_000, 70_001, 2_000_003])
    names = ["", *(f"blocks.{i}" for i in range(draw(st.integers(0, 5))))]
    units = tuple(unit(name, draw(numel), draw(numel), precision=precision, buffers=draw(buffers)) for name in names)
    states = draw(st.sampled_from([(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq")]))
    return ModelSpec(units=units, state_names=states, precision=precision)


def even_footprint(names: Sequence[str], *, given: int, selected: int, kept: int) -> Footprint:
    """A footprint of equal units. Args: given: Bytes of arguments. selected, kept: Bytes that each policy saves."""

    def step(name: str, index: int, *, is_backward: bool) -> Step:
        begin = index * given
        most = {"peak_bytes": begin + kept, "select_bytes": begin + kept, "keep_bytes": begin + kept}
        made = kept if is_backward else 0
        return Step(unit=name, is_backward=is_backward, begin_bytes=begin, made_bytes=made, **most)

    saved = SavedBytes(keep=kept, select=selected, recompute=given, kept=kept, cast=0)
    steps = [step(name, i, is_backward=False) for i, name in enumerate(names)]
    steps += [step(name, i, is_backward=True) for i, name in reversed(list(enumerate(names)))]
    return Footprint(saved=dict.fromkeys(names, saved), steps=steps)
