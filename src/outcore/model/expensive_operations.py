"""Results that are dear (expensive to compute for their size), which policy ``select`` saves.

[Note: select] Matrix products and attention take most of a block's work, and their results are a small part of what
autograd saves. Everything else (norms, activation functions, positions) is bound by memory: to compute it again takes
about as long as to read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from outcore.model.fused_dropout import draws_as_fused
from outcore.torch_private import OpOverload, pytree

DEAR_FLOP_PER_BYTE = 200
"""A result is dear if it takes at least this many operations per byte. An A100 computes as many for each byte that it
reads: 312 TFLOP/s in bf16 over 1.555 TB/s (NVIDIA, "A100 Tensor Core GPU Architecture"). Below that, computing takes no
longer than moving."""


_ATTENTION = "_scaled_dot_product"
"""Prefix of the names of attention kernels. Torch's table of operations leaves out those of the CPU, and the table of
torch 2.11 refuses queries that have more heads than keys."""


_PRODUCTS = ("grouped_mm", "gemm_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")
"""Parts of the names of products with one matrix per expert (from torch, and from Transformers), or with a quantised
matrix (from bitsandbytes). Torch's table has none of them."""


def may_be_dear(func: Any) -> bool:
    """Return whether an operation is one whose work is known."""
    packet = getattr(func, "overloadpacket", None)  # higher-order operations have none
    return packet in flop_registry or _is_attention(packet) or _is_product(packet)


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Count the operations of attention of all queries to all keys. Args: ``(batch, heads, length, features)``."""
    batch, heads, queries, features = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (features + value.shape[-1])


def _is_attention(packet: Any) -> bool:
    name = getattr(packet, "__name__", "")
    return name.startswith(_ATTENTION) and "backward" not in name


def _is_product(packet: Any) -> bool:
    return any(name in getattr(packet, "__name__", "") for name in _PRODUCTS)


def flops_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Count the operations. Args: func: One that ``may_be_dear``. result: What it returned for these arguments."""
    if _is_attention(func.overloadpacket):
        return float(attention_flops(*args[:3]))
    if _is_product(func.overloadpacket):  # a row of the first operand meets one matrix
        return 2.0 * args[0].shape[-1] * result.numel()
    return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))


def is_dear(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Tell whether to save a result. Args: func: One that ``may_be_dear``. result: What it returned for these args."""
    if _draws(func, args, kwargs):
        return False
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return flops_of(func, args, kwargs, result) >= DEAR_FLOP_PER_BYTE * sum(t.nbytes for t in tensors)


def _draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether it draws random numbers: if saved, it would not draw again, and later ones would draw others."""
    if draws_as_fused():
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return float(given.get("dropout_p", 0.0)) > 0.0
