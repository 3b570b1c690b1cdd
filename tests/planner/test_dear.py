"""The work of operations: counted if torch's own table has no entry for them, or one that refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from outcore.model import expensive_operations as dear

BATCH, HEADS, LENGTH, FEATURES = 2, 8, 16, 4


class Counted(TorchDispatchMode):
    """Counts the work of every operation that ``select`` considers."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[float] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if dear.may_be_dear(func):
            self.flops.append(dear.flops_of(func, args, kwargs or {}, result))
        return result


@pytest.mark.parametrize("num_key_heads", [HEADS, 2, 1], ids=["as many", "grouped", "one"])
@pytest.mark.parametrize("is_in_table", [True, False])
def test_attention_counts_every_query_whoever_shares_keys(num_key_heads, is_in_table, monkeypatch):
    if not is_in_table:  # the CPU's kernel is in no version's table
        for packet in [packet for packet in flop_registry if packet.__name__.startswith(dear._ATTENTION)]:
            monkeypatch.delitem(flop_registry, packet)
    query = torch.randn(BATCH, HEADS, LENGTH, FEATURES)
    key, value = (torch.randn(BATCH, num_key_heads, LENGTH, FEATURES) for _ in range(2))
    with Counted() as counted:
        functional.scaled_dot_product_attention(query, key, value, enable_gqa=num_key_heads != HEADS)
    assert counted.flops == [4.0 * BATCH * HEADS * LENGTH * LENGTH * FEATURES]


def test_products_with_a_matrix_per_expert_count_each_row_once():
    rows, matrices = torch.randn(16, 8, dtype=torch.bfloat16), torch.randn(3, 8, 32, dtype=torch.bfloat16)
    with Counted() as counted:
        torch._grouped_mm(rows, matrices, offs=torch.tensor([4, 4, 16], dtype=torch.int32))
    assert counted.flops == [2.0 * 16 * 8 * 32]
