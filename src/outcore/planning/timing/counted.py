"""How much a model computes, counted: its forward on shapes alone, kernel by kernel, for any model and any sample.

A matrix product takes what torch's own table says; of causal attention half counts, as a measured machine counts it.
Everything else is taken to be bound by the bytes that it reads and writes. What is looked up in a table reads no more
of it than it gives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from outcore.planning.timing.profile import UnitWork
from outcore.planning.units.partition import Partition
from outcore.planning.units.shapes import on_shapes

_VIEWS = {"_unsafe_view"}  # that torch does not call so
_LOOKED_UP = {"embedding", "index", "index_select", "gather"}
_ATTENTION = "scaled_dot_product"


def counted_work(cut: Partition, sample: Mapping[str, Any], device: torch.device) -> dict[str, UnitWork]:
    """Work of every unit, by name; what is outside of all of them is the root's.

    Args:
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward: a micro-batch. Only shapes and dtypes count.
        device: That will compute.

    Raises:
        ConfigError: The model cannot be run with these arguments, or not without values.

    Time: a forward in Python, 1 to 3 s for a large model. Memory: none.
    """
    counter = _Counter()
    with on_shapes(cut, sample, device) as shapes, ExitStack() as hooks:
        for unit, module in zip(cut.spec.units[1:], cut.modules[1:], strict=True):
            hooks.callback(module.register_forward_pre_hook(counter.enter(unit.name)).remove)
            hooks.callback(module.register_forward_hook(counter.leave, always_call=True).remove)
        with counter:
            shapes.forward(lambda _: None)
    return {unit.name: UnitWork(**counter.work[unit.name]) for unit in cut.spec.units}


class _Counter(TorchDispatchMode):
    """Adds up kernels by the unit that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.work: defaultdict[str, dict[str, float]] = defaultdict(_nothing)
        self._running = [""]

    def enter(self, name: str) -> Any:
        """Hook before the forward of a unit."""

        def hook(*_: Any) -> None:
            self._running.append(name)

        return hook

    def leave(self, *_: Any) -> None:
        """Hook behind it."""
        self._running.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = self.work[self._running[-1]]
        given, made = _tensors((args, kwargs)), _tensors(result)
        packet = func.overloadpacket
        name = packet.__name__
        if func.is_view or name in _VIEWS or not (given and made):
            return result
        if _ATTENTION in name:
            work["attention_flops"] += sdpa_flop_count(*(t.shape for t in given[:3])) / (1 + _is_causal(args, kwargs))
        elif packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
            work["product_flops"] += flops
            work["frozen_flops"] += flops * max(2 - sum(t.requires_grad for t in given[-2:]), 0)
        else:
            work["moved_bytes"] += sum(t.nbytes for t in (2 * made if name in _LOOKED_UP else [*made, *given]))
        work["kernels"] += 1
        return result


def _nothing() -> dict[str, float]:
    names = ("product_flops", "attention_flops", "frozen_flops", "moved_bytes", "kernels")
    return dict.fromkeys(names, 0.0)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _is_causal(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The only switches of attention are whether it is causal, and what a backward or a test wants besides."""
    return kwargs.get("is_causal", any(arg is True for arg in args))
