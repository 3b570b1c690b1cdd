"""Seconds of real blocks: one block of each kind runs forward and backward on this machine's device.

[Note: a real block] The time of a block can be computed from its operations and the machine's rates
(``planner.timing``). Real time differs: kernels have other shapes than the probe's, each step gets fresh memory, and
Python runs around the kernels. Steps of 59M parameters on two cores took 1.1 to 1.4 times as long. So one block of each
kind is run, with arbitrary values in parameters and arguments. Several of its forwards are alive at a time. As in a
step, they then find little memory that was used before. What is in no block, such as embeddings and the loss, is
counted: it is mostly one large product, which counting knows well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.small_state import random_states, restore_random_states
from outcore.device.device import Device
from outcore.model.casts import Autocast
from outcore.model.equal_calls import Shape
from outcore.model.partition import Partition
from outcore.planner.forward.calls import Calls, ShapeCall
from outcore.planner.forward.shapes import left_as_it_is
from outcore.planner.timing.profile import UnitTimes
from outcore.torch_private import pytree

_LEAST_TURNS, _LEAST_S, MOST_S = 3, 0.1, 1.0
"""Turns and seconds that a measurement takes at least, after a turn that is not counted; and the limit of a block.

A block whose counted time is above ``MOST_S`` is not run: it computes so much that counting is accurate enough.
"""
_AT_A_TIME = 4
"""Forwards alive at once; fewer if one takes long or saves much."""
_OF_FREE = 4
"""Weights with gradients may take one part in this many of the free device memory, and what forwards save another."""
_SPREAD = 0.02
"""Standard deviation of the values, like that of initial weights."""


def measure_blocks(
    cut: Partition, calls: Calls, device: Device, counted_s: Mapping[str, float]
) -> list[UnitTimes | None]:
    """Measure one block of each kind; None for a block that does not run alone, or needs too much time or memory.

    Args:
        cut: The model; parts of it may be on the meta device. Nothing of it changes.
        calls: The calls of blocks in a forward over a micro-batch.
        device: The device that will compute.
        counted_s: Unit -> seconds of its forward and backward, computed from its operations.

    Time: some 0.2 s for each kind, or four times the block's own time if that is more. Device memory: a block with its
    gradients, and what some forwards save.
    """
    most = device.memory_bytes() // _OF_FREE // 2
    small = {unit.name for unit in cut.spec.units if counted_s[unit.name] <= MOST_S and unit.weight_bytes <= most}
    return [_measured(cut, call, device) if call.unit in small else None for call in calls.kinds.values()]


def _measured(cut: Partition, call: ShapeCall, device: Device) -> UnitTimes | None:
    """Measure one call of a block; None if it does not run alone."""
    states = random_states(device)
    for at_a_time in (_AT_A_TIME, 1):  # a forward may change the module so that another one before backward fails
        try:
            with torch.enable_grad():
                return _BlockTurns(cut, call, device, at_a_time).measured()
        except Exception:  # it cannot run alone, or not with such values: the caller counts its operations
            continue
        finally:
            torch.clear_autocast_cache()
            restore_random_states(states, device)
    return None


class _ParameterSwap(nn.Module):
    """A module that calls a function while its parameters are others: see ``torch.func.functional_call``."""

    def __init__(self, module: nn.Module, then: Any) -> None:
        super().__init__()
        self.module, self._then = module, then

    def forward(self) -> Any:
        return self._then()


class _BlockTurns:
    """Takes turns of one call of a block. A turn is some forwards, then their backwards."""

    def __init__(self, cut: Partition, call: ShapeCall, device: Device, at_a_time: int) -> None:
        """Args: at_a_time: The most forwards in a turn."""
        names = [unit.name for unit in cut.spec.units]
        self._module, self._device, self._at_a_time = cut.modules[names.index(call.unit)], device, at_a_time
        self._autocast = Autocast.now(device.torch_device)
        self._own = _own(cut, self._module, device.torch_device)
        given = [_value(leaf.empty()) if isinstance(leaf, Shape) else leaf for leaf in call.leaves]
        for shape, value in zip(call.leaves, given, strict=True):
            if isinstance(shape, Shape) and shape.requires_grad:
                value.requires_grad_()
        self._args, self._kwargs = pytree.tree_unflatten(given, call.form)
        self._leaves = _leaves([*self._own.values(), *given])

    def measured(self) -> UnitTimes:
        """Return the median times of a turn, per forward and backward.

        The block gets its tensors once for all turns: swapping them takes longer than launching its kernels.
        """
        with left_as_it_is(self._module):
            own = {f"module.{name}": tensor for name, tensor in self._own.items()}
            found: UnitTimes = torch.func.functional_call(_ParameterSwap(self._module, self._turns), own, ())
        return found

    def _turns(self) -> UnitTimes:
        start_s = time.perf_counter()
        with left_as_it_is(self._module):
            saved_bytes = self._saved_bytes()
        first_s = time.perf_counter() - start_s
        most = self._device.memory_bytes() // _OF_FREE // max(saved_bytes, 1)
        number = max(1, min(self._at_a_time, most, math.ceil(MOST_S / _LEAST_TURNS / first_s)))
        start_s, turns = time.perf_counter(), list[UnitTimes]()
        while len(turns) < _LEAST_TURNS or time.perf_counter() - start_s < _LEAST_S:
            with left_as_it_is(self._module):
                turns.append(self._turn(number))
        return UnitTimes(*(median(column) for column in zip(*turns, strict=True)))

    def _saved_bytes(self) -> int:
        """Return the bytes that autograd saves in one forward.

        This first run also makes torch choose its kernels, and touches memory.
        """
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = self._forward()
        self._backward(results)
        self._wait()
        return sum(found.values())

    def _forward(self) -> list[torch.Tensor]:
        """Run the call, without the hooks of the module's own. Returns those of its results that require gradients."""
        torch.clear_autocast_cache()  # so that weights are cast in every visit
        return _leaves(pytree.tree_leaves(self._module.forward(*self._args, **self._kwargs)))

    def _turn(self, number: int) -> UnitTimes:
        self._wait()
        start_s = time.perf_counter()
        made = [self._forward() for _ in range(number)]
        launched_s = time.perf_counter()
        self._wait()
        middle_s = time.perf_counter()
        gradients = [self._backward(made.pop()) for _ in range(number)]
        self._wait()
        end_s = time.perf_counter()
        del gradients  # they were alive together, as the gradients of all blocks are
        return UnitTimes(
            forward_s=(middle_s - start_s) / number,
            backward_s=(end_s - middle_s) / number,
            launch_s=(launched_s - start_s) / number,
        )

    def _backward(self, results: list[torch.Tensor]) -> list[torch.Tensor | None]:
        with self._autocast.off():
            if results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        found = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        return found

    def _wait(self) -> None:
        self._device.mark("probe").wait()


def _own(cut: Partition, module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Make parameters with arbitrary values, in the dtypes in which they will be trained, and copies of buffers.

    Everything that the module reaches is replaced, under all of its names, even if other parts of the model share it.
    So none of the user's own tensors is used.
    """
    specs = {param.name: param for unit in cut.spec.units for param in unit.params}
    trained = {id(p): specs[name] for name, p in cut.modules[0].named_parameters() if name in specs}
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if id(p) not in made:
            spec = trained.get(id(p))
            dtype = p.dtype if spec is None else getattr(torch, spec.dtype)
            made[id(p)] = _value(torch.empty(p.shape, dtype=dtype, device=device)).requires_grad_(p.requires_grad)
        found[name] = made[id(p)]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if id(buffer) not in made:
            is_there = not buffer.is_meta
            made[id(buffer)] = buffer.to(device, copy=True) if is_there else torch.zeros_like(buffer, device=device)
        found[name] = made[id(buffer)]
    return found


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with small random floats, with True, or with the integer 0, which is an index of every table."""
    with torch.no_grad():
        if tensor.is_floating_point():
            return tensor.normal_(0.0, _SPREAD)
        return tensor.fill_(tensor.dtype == torch.bool)


def _leaves(values: Any) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
