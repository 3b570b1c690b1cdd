"""Seconds of real blocks: one of each kind runs on the device that is here, forward and backward.

[Note: a real block] What a block takes can be worked out from its operations and the rates of the machine
(``planning.timing``). Kernels of other shapes than the probe's, memory that is fresh in every step and the Python
around kernels make it differ: steps of 59M parameters on two cores took 1.1 to 1.4 times as long. So one block of each
kind is run, with values of no meaning in parameters and arguments. Several of its forwards are alive at a time, as in a
step, so that they find as little memory as there that was used before. The rest of the model is run with blocks that do
nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from outcore.device.device import Device
from outcore.planning.forward.activations import loss_of
from outcore.planning.forward.alike import Shape, stand_in
from outcore.planning.forward.calls import Call, Calls
from outcore.planning.forward.casts import Autocast
from outcore.planning.forward.shapes import left_as_it_is
from outcore.planning.timing.profile import UnitTimes
from outcore.planning.units.partition import Partition
from outcore.probe.samples import usual_s
from outcore.saving.small_state import random_states, restore_random_states
from outcore.torch_private import pytree

_LEAST_TURNS, _LEAST_S, MOST_S = 3, 0.1, 1.0
"""Of one measurement, behind a turn that is not counted; what takes longer computes so much that counting tells it."""
_AT_A_TIME = 4
"""Forwards that are alive; fewer where they take long or much."""
_OF_FREE = 4
"""No measurement takes more than this part of the free memory."""
_SPREAD = 0.02
"""Of values, as weights begin."""


def measure_blocks(
    cut: Partition, calls: Calls, device: Device, counted_s: Mapping[str, float]
) -> list[UnitTimes | None]:
    """Seconds of one block of each kind; None where it does not run alone, or takes too long or too much memory.

    Args:
        cut: The model; parts of it may be on the meta device. Nothing of it changes.
        calls: Of its forward over a micro-batch.
        device: That will compute.
        counted_s: Unit -> seconds of its forward and backward, as far as operations tell.

    Time: some 0.2 s for each kind, and four times as long as it takes where that is more. Memory of the device: a block
    with its gradients, and what some forwards save.
    """
    weights = {unit.name: unit.weight_bytes for unit in cut.spec.units if counted_s[unit.name] <= MOST_S}
    calling = ((partial(_Block, cut, call, device), weights.get(call.unit)) for call in calls.kinds.values())
    return [None if nbytes is None else _measured(make, nbytes, device) for make, nbytes in calling]


def measure_rest(
    cut: Partition, sample: Mapping[str, Any], calls: Calls, device: Device, counted_s: Mapping[str, float]
) -> UnitTimes | None:
    """Seconds of what is in no block. Args: as for ``measure_blocks``. sample: Keyword arguments of the forward."""
    if counted_s[""] > MOST_S:
        return None
    return _measured(partial(_Rest, cut, sample, calls, device), cut.spec.units[0].weight_bytes, device)


class _Part(Protocol):
    """Of a model, with values."""

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """That get gradients."""

    def forward(self) -> list[torch.Tensor]:
        """What backward begins with."""


class _Lent(nn.Module):
    """A module whose parameters are lent, without what hangs on its own call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _run(module: nn.Module, own: Mapping[str, torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    lent = {f"module.{name}": tensor for name, tensor in own.items()}
    with left_as_it_is(module):
        return torch.func.functional_call(_Lent(module), lent, tuple(args), dict(kwargs))


class _Block:
    """One call of a unit."""

    def __init__(self, cut: Partition, call: Call, device: Device) -> None:
        names = [unit.name for unit in cut.spec.units]
        self._module = cut.modules[names.index(call.unit)]
        self.own = _own(cut, self._module, device.torch_device)
        given = [_value(leaf.empty()) if isinstance(leaf, Shape) else leaf for leaf in call.leaves]
        for shape, value in zip(call.leaves, given, strict=True):
            if isinstance(shape, Shape) and shape.requires_grad:
                value.requires_grad_()
        self._args, self._kwargs = pytree.tree_unflatten(given, call.form)
        self.leaves = _leaves([*self.own.values(), *given])

    def forward(self) -> list[torch.Tensor]:
        """Its results."""
        return _leaves(pytree.tree_leaves(_run(self._module, self.own, self._args, self._kwargs)))


class _Rest:
    """A model whose blocks give what they are given, or something as large."""

    def __init__(self, cut: Partition, sample: Mapping[str, Any], calls: Calls, device: Device) -> None:
        self._cut, self._calls, where = cut, calls, device.torch_device
        prefixes = tuple(f"{unit.name}." for unit in cut.spec.units[1:])
        self.own = _own(cut, cut.modules[0], where, but=prefixes)
        self.leaves = _leaves(self.own.values())
        self._batch = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.zeros_like(t, device=where) if t.is_meta else t.detach().to(where), sample
        )

    def forward(self) -> list[torch.Tensor]:
        """The loss."""
        with ExitStack() as undo:
            for unit, module in zip(self._cut.spec.units[1:], self._cut.modules[1:], strict=True):
                results = iter([self._calls.kinds[kind].result for kind in self._calls.of.get(unit.name, ())])
                undo.callback(stand_in(module, partial(_passed, results)))
            loss = loss_of(_run(self._cut.modules[0], self.own, (), self._batch))
        return [] if loss is None else [loss]


def _passed(results: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
    """A result of the right shapes that takes no time: of the arguments where they have these."""
    given = _leaves(pytree.tree_leaves((args, kwargs)))

    def like(shape: Shape) -> torch.Tensor:
        same = (t for t in given if (t.shape, t.dtype) == (shape.size, shape.dtype))
        found = next(same, None)
        return shape.empty().zero_().requires_grad_(shape.requires_grad) if found is None else found.view_as(found)

    return pytree.tree_map_only(Shape, like, next(results))


def _own(cut: Partition, module: nn.Module, device: torch.device, but: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Parameters with values of no meaning, in the dtypes in which they will be trained, and copies of buffers.

    Whatever the module reaches, by all of its names: also what other parts of the model have, too, so that nothing of
    the user's is run. Args: but: Beginnings of names that are left out.
    """
    specs = {param.name: param for unit in cut.spec.units for param in unit.params}
    trained = {id(p): specs[name] for name, p in cut.modules[0].named_parameters() if name in specs}
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if name.startswith(but):
            continue
        if id(p) not in made:
            spec = trained.get(id(p))
            dtype = p.dtype if spec is None else getattr(torch, spec.dtype)
            made[id(p)] = _value(torch.empty(p.shape, dtype=dtype, device=device)).requires_grad_(p.requires_grad)
        found[name] = made[id(p)]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if not name.startswith(but):
            is_there = not buffer.is_meta
            found[name] = buffer.to(device, copy=True) if is_there else torch.zeros_like(buffer, device=device)
    return found


def _value(tensor: torch.Tensor) -> torch.Tensor:
    """Floats get small ones, truths are true, and integers 0, which every table has."""
    with torch.no_grad():
        if tensor.is_floating_point():
            return tensor.normal_(0.0, _SPREAD)
        return tensor.fill_(tensor.dtype == torch.bool)


def _leaves(values: Any) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _measured(make: Callable[[], _Part], nbytes: int, device: Device) -> UnitTimes | None:
    """Args: nbytes: Of weights."""
    if 2 * nbytes > device.memory_bytes() // _OF_FREE:
        return None
    states = random_states(device)
    try:
        with torch.enable_grad():
            return _Measurement(make(), device).measured()
    except Exception:  # it cannot run alone, or not with such values: its operations are counted
        return None
    finally:
        torch.clear_autocast_cache()
        restore_random_states(states, device)


class _Measurement:
    """Turns of one part: some forwards, then their backwards."""

    def __init__(self, part: _Part, device: Device) -> None:
        self._part, self._device = part, device
        self._autocast = Autocast.now(device.torch_device)

    def measured(self) -> UnitTimes:
        """The usual turn."""
        start_s, saved_bytes = time.perf_counter(), self._saved_bytes()
        first_s = time.perf_counter() - start_s
        most = self._device.memory_bytes() // _OF_FREE // max(saved_bytes, 1)
        number = max(1, min(_AT_A_TIME, most, math.ceil(MOST_S / _LEAST_TURNS / first_s)))
        start_s, turns = time.perf_counter(), list[UnitTimes]()
        while len(turns) < _LEAST_TURNS or time.perf_counter() - start_s < _LEAST_S:
            turns.append(self._turn(number))
        return UnitTimes(*(usual_s(column) for column in zip(*turns, strict=True)))

    def _saved_bytes(self) -> int:
        """What autograd keeps of a forward. Kernels are chosen, and memory is touched."""
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
        torch.clear_autocast_cache()  # weights are cast in every visit
        return self._part.forward()

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
        del gradients  # they were alive together, as those of all blocks are
        return UnitTimes(
            forward_s=(middle_s - start_s) / number,
            backward_s=(end_s - middle_s) / number,
            launch_s=(launched_s - start_s) / number,
        )

    def _backward(self, results: list[torch.Tensor]) -> list[torch.Tensor | None]:
        with self._autocast.off():
            if results:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        found = [leaf.grad for leaf in self._part.leaves]
        for leaf in self._part.leaves:
            leaf.grad = None
        return found

    def _wait(self) -> None:
        self._device.mark("probe").wait()
