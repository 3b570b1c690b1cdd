"""Attention with dropout, followed as accelerators compute it.

[Note: dropout] An accelerator's kernels of attention drop out as they go. On a CPU torch has no such kernel: with
dropout it computes attention by itself, over matrices of queries x keys. A plan for an accelerator may be made on a
machine that has none, whose own kernels are followed then. There attention with dropout is followed without dropout,
which takes as much time and memory as an accelerator's kernel. But the policy ``select`` has to know that it draws
random numbers: such results are not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.nn import functional

from outcore.torch_private import FakeTensor

_DRAWS: ContextVar[bool] = ContextVar("outcore_attention_draws", default=False)


def draws_as_fused() -> bool:
    """Return whether the attention that is followed right now would drop out."""
    return _DRAWS.get()


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Follow attention as an accelerator computes it: see [Note: dropout]. Real tensors are treated as ever."""
    attend = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, mask: Any = None, rate: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        mask, rate = more.pop("attn_mask", mask), more.pop("dropout_p", rate)
        if not (rate > 0.0 and isinstance(query, FakeTensor)):
            return attend(query, key, value, mask, rate, *rest, **more)
        before = _DRAWS.set(True)
        try:
            return attend(query, key, value, mask, 0.0, *rest, **more)
        finally:
            _DRAWS.reset(before)

    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attend
