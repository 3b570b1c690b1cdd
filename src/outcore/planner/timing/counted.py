"""Counts how much a model computes, kernel by kernel, in a forward on shapes alone, for any model and any sample.

Matrix products take the FLOP of torch's own table. Causal attention counts half, as in the probe's measurement.
Everything else is taken to be bound by the bytes that it reads and writes. A lookup in a table reads no more of the
table than it returns. Before a product with a matrix of 4 bits, an accelerator unpacks that to the dtype of the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from outcore.model.equal_calls import Shape, arguments_of, kind_of, stand_in
from outcore.model.expensive_operations import attention_flops, flops_of, may_be_dear
from outcore.model.partition import Partition
from outcore.planner.forward.shapes import on_shapes
from outcore.planner.timing.profile import UnitWork
from outcore.torch_private import TorchDispatchMode, pytree

_Sums = defaultdict[str, float]
_VIEWS = {"_unsafe_view"}  # views that torch does not mark as such
_LOOKED_UP = {"embedding", "index", "index_select", "gather"}
_FROM_4_BITS = "gemm_4bit"
_ATTENTION, _OPERANDS = "scaled_dot_product", 3


def counted_work(cut: Partition, sample: Mapping[str, Any], device: torch.device) -> dict[str, UnitWork]:
    """Count the work of every unit, by name. What is outside of all units belongs to the root.

    Args:
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward: a micro-batch. Only shapes and dtypes count,
            and whether a mask hides anything.
        device: The device that will compute.

    Raises:
        ConfigError: The model cannot be run with these arguments, or not without values.

    Time: a forward in Python, 1 to 3 s for a large model. Memory: none.
    """
    counter = _Counter(cut.modules[0], may_be_causal=hasattr(cut.modules[0], "config") and _hides_nothing(sample))
    with on_shapes(cut, sample, device) as shapes, ExitStack() as undo:
        for unit, module in zip(cut.spec.units[1:], cut.modules[1:], strict=True):
            undo.callback(stand_in(module, _CountedUnit(unit.name, module, counter).call))
        with counter:
            shapes.forward(lambda _: None)
    return {unit.name: _work_of(counter.work[unit.name]) for unit in cut.spec.units}


def _work_of(sums: _Sums) -> UnitWork:
    return UnitWork(
        product_flops=sums["product_flops"],
        attention_flops=sums["attention_flops"],
        frozen_flops=sums["frozen_flops"],
        moved_bytes=sums["moved_bytes"],
        unpacked_bytes=sums["unpacked_bytes"],
        kernels=sums["kernels"],
    )


def _hides_nothing(sample: Mapping[str, Any]) -> bool:
    mask = sample.get("attention_mask")
    return mask is None or (isinstance(mask, torch.Tensor) and not mask.is_meta and bool(mask.all()))


class _CountedUnit:
    """Counts the calls of a unit. Of calls that do the same, only one is followed."""

    def __init__(self, name: str, module: nn.Module, counter: _Counter) -> None:
        self._name, self._module, self._counter, self._forward = name, module, counter, module.forward
        self._is_causal = _has_causal(module)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the module's forward."""
        known, (leaves, form) = self._counter.known, arguments_of(args, kwargs)
        kind = self._is_causal, kind_of(self._module, leaves, form)
        if kind in known:
            work, result = known[kind]
            self._counter.add(self._name, work)
            with self._counter.inside(is_causal=self._is_causal):  # making results is no work
                return pytree.tree_map_only(Shape, _again, result)
        values, named = pytree.tree_unflatten(leaves, form)
        with self._counter.inside(is_causal=self._is_causal) as work:
            result = self._forward(*values, **named)
        self._counter.add(self._name, work)
        if all(isinstance(part, torch.Tensor | bool | int | float | str | None) for part in pytree.tree_leaves(result)):
            known[kind] = work, pytree.tree_map_only(torch.Tensor, Shape, result)
        return result


def _again(shape: Shape) -> torch.Tensor:
    """Return a result, computed from something: what comes next may change it in place."""
    return shape.empty().requires_grad_(shape.requires_grad).clone()


class _Counter(TorchDispatchMode):
    """Adds up kernels by the unit that runs."""

    def __init__(self, model: nn.Module, *, may_be_causal: bool) -> None:
        """Args: may_be_causal: Masks are made by the model, and in a run the kernel makes them. Shapes do not tell."""
        super().__init__()
        self._may_be_causal, self._is_causal = may_be_causal, _has_causal(model)
        self.work: defaultdict[str, _Sums] = defaultdict(lambda: defaultdict(float))
        """Work by unit name."""
        self.known: dict[Hashable, tuple[_Sums, Any]] = {}
        """Kind of call -> its work and the shapes of its result."""
        self._running = [self.work[""]]

    @contextmanager
    def inside(self, *, is_causal: bool) -> Iterator[_Sums]:
        """Count what runs inside one call. Args: is_causal: Attention in it is causal."""
        self._running.append(defaultdict(float))
        outside, self._is_causal = self._is_causal, is_causal
        try:
            yield self._running[-1]
        finally:
            self._running.pop()
            self._is_causal = outside

    def add(self, name: str, work: _Sums) -> None:
        """Add the work of one call to that of its unit."""
        for what, number in work.items():
            self.work[name][what] += number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = self._running[-1]
        given, made = _tensors((args, kwargs)), _tensors(result)
        name = func.overloadpacket.__name__
        if func.is_view or name in _VIEWS or not (given and made):
            return result
        if _ATTENTION in name:
            by_mask = self._may_be_causal and self._is_causal and len(given) > _OPERANDS
            is_causal = by_mask or _is_causal(func, args, kwargs)
            work["attention_flops"] += attention_flops(*given[:_OPERANDS]) / (1 + is_causal)
        elif may_be_dear(func):
            flops = flops_of(func, args, kwargs, result)
            operands = [t for t in given if t.is_floating_point()][-2:]
            work["product_flops"] += flops
            work["frozen_flops"] += flops * max(2 - sum(t.requires_grad for t in operands), 0)
            if _FROM_4_BITS in name:
                work["unpacked_bytes"] += _unpacked_bytes(args[0], args[1], result)
        else:
            work["moved_bytes"] += sum(t.nbytes for t in (2 * made if name in _LOOKED_UP else [*made, *given]))
        work["kernels"] += 1
        return result


def _has_causal(module: nn.Module) -> bool:
    """Whether some attention in the module is causal, as attention modules of Transformers say."""
    return any(getattr(part, "is_causal", False) is True for part in module.modules())


def _unpacked_bytes(rows: torch.Tensor, packed: torch.Tensor, made: torch.Tensor) -> int:
    """Return what unpacking a matrix moves. Kernels that unpack as they multiply win for few rows only."""
    return packed.nbytes + rows.shape[-1] * made.shape[-1] * made.itemsize


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of attention says that it is causal, by name or by position."""
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))
