"""Seconds of real blocks: one block of each kind runs forward and backward on this machine's device.

[Note: a real block] The time of a block can be computed from its operations and the machine's rates
(``planner.timing``). Real time differs: kernels have other shapes than the probe's, each step gets fresh memory, and
Python runs around the kernels. Steps of 59M parameters on two cores took 1.1 to 1.4 times as long. So one block of each
kind is run, with arbitrary values in parameters and arguments. Several of its forwards are alive at a time. As in a
step, they then find little memory that was used before. The rest of the model is run with blocks that do nothing.

[Note: one speed] Processors change their speed: they get warm, and virtual ones share cores with others. Where the host
computes, a matrix product and a small block of 768 channels are timed before and after each turn. The turn's seconds
are converted to the speed that both had when the machine was measured, in the geometric mean. Products alone feel less
of what else goes on than a block with its fresh memory and many kernels. On two cores of a virtual machine, all three
and blocks of 768 to 1792 channels with 64 to 512 tokens were timed in turn for two minutes. Means of four turns of a
block varied by 5 to 10%; divided by the speed of products by 3 to 7%, by that of the small block by 3 to 6%, by both by
3 to 5%.

[Note: slow moments] There are moments of up to a minute in which memory alone is slow. The product and the small block
hardly feel them, and large blocks do: one of 1792 channels took over twice as long as counted, where it usually takes
1.3 to 1.45 times. So where the host computes, a long part that takes twice as long as counted is measured again after
a pause, and the least counts.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import geometric_mean, median
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from outcore.checkpoint.small_state import random_states, restore_random_states
from outcore.device.device import Device
from outcore.model.casts import Autocast
from outcore.model.equal_calls import Shape, stand_in
from outcore.model.partition import Partition
from outcore.planner.forward.calls import Calls, ShapeCall
from outcore.planner.forward.saved_bytes import loss_of
from outcore.planner.forward.shapes import left_as_it_is
from outcore.planner.timing.profile import UnitTimes
from outcore.probe.compute_rates import blocks, products
from outcore.probe.loads import ProbeLoad, usual_speed
from outcore.spec.hardware import Hardware
from outcore.torch_private import pytree

_LEAST_TURNS, _LEAST_S, MOST_S = 3, 0.1, 1.0
"""Turns and seconds that a measurement takes at least, after a turn that is not counted; and the limit of a part.

A part whose counted time is above ``MOST_S`` is not run: it computes so much that counting is accurate enough.
"""
_SPEED_S = 0.05
"""Seconds for which the product and the small block are timed each; either takes three turns at least."""
_AT_A_TIME = 4
"""Forwards alive at once; fewer if one takes long or saves much."""
_OF_FREE = 4
"""Weights with gradients may take one part in this many of the free device memory, and what forwards save another."""
_LONG_S, _SLOW, _AGAIN, _PAUSE_S = 0.02, 2.0, 2, 2.0
"""See [Note: slow moments]: seconds of a long part, its time over the counted one, how often it is measured again at
most, and seconds before that. Blocks of 256 to 2560 channels took 1.04 to 1.5 times as long as counted in fp32, and
parts of other models in bf16 up to 1.74 times. A block of Mamba took 4.4 times, so it is measured three times."""
_SPREAD = 0.02
"""Standard deviation of the values, like that of initial weights."""


_T = TypeVar("_T")


class Speed:
    """Speed of this machine now over that at which it was measured: see [Note: one speed]. 1 on an accelerator."""

    def __init__(self, device: Device, hardware: Hardware) -> None:
        """Args: device: The device that computes. hardware: Its measurement."""
        self._autocast, part = Autocast.now(device.torch_device), hardware.device
        self._usual: list[tuple[ProbeLoad, float]] = []
        """Loads, and the speeds that they had when the machine was measured."""
        if device.computes_on_host:
            with self._autocast.off():  # those of the probe were in fp32
                self._usual.append((products(device, torch.float32), part.fp32_flops))
                if part.blocks_per_s:  # else the file was written by an earlier version
                    self._usual.append((blocks(device), part.blocks_per_s))

    def now(self) -> float:
        """Measure it, in a tenth of a second or more."""
        with self._autocast.off():
            found = [usual_speed(load, _SPEED_S) / usual for load, usual in self._usual]
        return geometric_mean(found) if found else 1.0


def measure_blocks(
    cut: Partition, calls: Calls, device: Device, counted_s: Mapping[str, float], speed: Speed
) -> list[UnitTimes | None]:
    """Measure one block of each kind; None for a block that does not run alone, or needs too much time or memory.

    Args:
        cut: The model; parts of it may be on the meta device. Nothing of it changes.
        calls: The calls of blocks in a forward over a micro-batch.
        device: The device that will compute.
        counted_s: Unit -> seconds of its forward and backward, computed from its operations.
        speed: The device's speed.

    Time: some 0.5 s for each kind, or four times the block's own time if that is more; where the host computes, up to
    three times as long and a few seconds. Device memory: a block with its gradients, and what some forwards save.
    """
    weights = {unit.name: unit.weight_bytes for unit in cut.spec.units if counted_s[unit.name] <= MOST_S}

    def measured(call: ShapeCall) -> UnitTimes | None:
        if call.unit not in weights:
            return None
        make, usual_s = partial(_TimedBlock, cut, call, device), counted_s[call.unit] / len(calls.of[call.unit])
        return _least(partial(_measured, make, weights[call.unit], device, speed), usual_s, device)

    return [measured(call) for call in calls.kinds.values()]


def measure_rest(
    cut: Partition,
    sample: Mapping[str, Any],
    calls: Calls,
    device: Device,
    counted_s: Mapping[str, float],
    speed: Speed,
) -> UnitTimes | None:
    """Measure what is in no block. Args: as for ``measure_blocks``. sample: Keyword arguments of the forward."""
    if counted_s[""] > MOST_S:
        return None
    make = partial(_Rest, cut, sample, calls, device)
    return _least(partial(_measured, make, cut.spec.units[0].weight_bytes, device, speed), counted_s[""], device)


class _RunnablePart(Protocol):
    """A part of the model that can run: its tensors have values."""

    @property
    def module(self) -> nn.Module:
        """The module that runs."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """Tensors that get gradients."""

    def forward(self) -> list[torch.Tensor]:
        """Run the part, inside ``ready``. Returns the tensors from which backward begins."""

    def ready(self, then: Callable[[], _T]) -> _T:
        """Call a function while the part's tensors are lent to the model, and return its result."""


class _LendingModule(nn.Module):
    """Calls a function while parameters are lent to a module."""

    def __init__(self, module: nn.Module, then: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self._then = module, then

    def forward(self) -> Any:
        return self._then()


def _lend(module: nn.Module, own: Mapping[str, torch.Tensor], then: Callable[[], _T]) -> _T:
    """Lend tensors for all turns at once: lending takes longer than launching the kernels of a small block."""
    with left_as_it_is(module):
        lent = {f"module.{name}": tensor for name, tensor in own.items()}
        result: _T = torch.func.functional_call(_LendingModule(module, then), lent, ())
        return result


class _TimedBlock:
    """One call of a unit."""

    def __init__(self, cut: Partition, call: ShapeCall, device: Device) -> None:
        names = [unit.name for unit in cut.spec.units]
        self.module = cut.modules[names.index(call.unit)]
        self._own = _own(cut, self.module, device.torch_device)
        given = [_value(leaf.empty()) if isinstance(leaf, Shape) else leaf for leaf in call.leaves]
        for shape, value in zip(call.leaves, given, strict=True):
            if isinstance(shape, Shape) and shape.requires_grad:
                value.requires_grad_()
        self._args, self._kwargs = pytree.tree_unflatten(given, call.form)
        self.leaves = _leaves([*self._own.values(), *given])

    def forward(self) -> list[torch.Tensor]:
        """Run the call, without the hooks of the module's own. Returns those of its results that require gradients."""
        return _leaves(pytree.tree_leaves(self.module.forward(*self._args, **self._kwargs)))

    def ready(self, then: Callable[[], _T]) -> _T:
        """Call a function while the block has its tensors."""
        return _lend(self.module, self._own, then)


class _Rest:
    """A model whose blocks compute nothing: each returns its arguments, or zeros of the right shapes."""

    def __init__(self, cut: Partition, sample: Mapping[str, Any], calls: Calls, device: Device) -> None:
        self._cut, self._calls, self.module, where = cut, calls, cut.modules[0], device.torch_device
        prefixes = tuple(f"{unit.name}." for unit in cut.spec.units[1:])
        self._own = _own(cut, self.module, where, but=prefixes)
        self.leaves = _leaves(self._own.values())
        self._batch = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.zeros_like(t, device=where) if t.is_meta else t.detach().to(where), sample
        )

    def forward(self) -> list[torch.Tensor]:
        """Run the model. Returns the loss, or nothing where there is none."""
        loss = loss_of(self.module.forward(**self._batch))
        return [] if loss is None else [loss]

    def ready(self, then: Callable[[], _T]) -> _T:
        """Call a function while the model has its tensors, and its blocks compute nothing."""
        with ExitStack() as undo:
            for unit, module in zip(self._cut.spec.units[1:], self._cut.modules[1:], strict=True):
                results = [self._calls.kinds[kind].result for kind in self._calls.of.get(unit.name, ())]
                undo.callback(stand_in(module, partial(_passed, itertools.cycle(results))))
            return _lend(self.module, self._own, then)


def _passed(results: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
    """Return a result of the right shapes at next to no cost: views of arguments where those fit, else zeros."""
    given = _leaves(pytree.tree_leaves((args, kwargs)))

    def like(shape: Shape) -> torch.Tensor:
        same = (t for t in given if (t.shape, t.dtype) == (shape.size, shape.dtype))
        found = next(same, None)
        return shape.empty().zero_().requires_grad_(shape.requires_grad) if found is None else found.view_as(found)

    return pytree.tree_map_only(Shape, like, next(results))


def _own(cut: Partition, module: nn.Module, device: torch.device, but: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Make parameters with arbitrary values, in the dtypes in which they will be trained, and copies of buffers.

    Everything that the module reaches is replaced, under all of its names, even if other parts of the model share it.
    So none of the user's own tensors is used. Args: but: Prefixes of names to leave out.
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
        if name.startswith(but):
            continue
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


def _least(measure: Callable[[], UnitTimes | None], counted_s: float, device: Device) -> UnitTimes | None:
    """Measure a part, and again in a slow moment: see [Note: slow moments]. Args: counted_s: Its counted time."""
    found = measure()
    for _ in range(_AGAIN if device.computes_on_host else 0):
        if found is None or found.seconds <= max(_LONG_S, _SLOW * counted_s):
            break
        time.sleep(_PAUSE_S)
        found = min((each for each in (found, measure()) if each is not None), key=lambda times: times.seconds)
    return found


def _measured(make: Callable[[], _RunnablePart], nbytes: int, device: Device, speed: Speed) -> UnitTimes | None:
    """Measure a part; None if it does not run alone or is too large. Args: nbytes: Size of its weights."""
    if 2 * nbytes > device.memory_bytes() // _OF_FREE:
        return None
    states = random_states(device)
    for at_a_time in (_AT_A_TIME, 1):  # a forward may change the module so that another one before backward fails
        try:
            with torch.enable_grad():
                return _Measurement(make(), device, speed, at_a_time).measured()
        except Exception:  # it cannot run alone, or not with such values: the caller counts its operations
            continue
        finally:
            torch.clear_autocast_cache()
            restore_random_states(states, device)
    return None


class _Measurement:
    """Takes turns of one part. A turn is some forwards, then their backwards."""

    def __init__(self, part: _RunnablePart, device: Device, speed: Speed, at_a_time: int) -> None:
        """Args: at_a_time: The most forwards in a turn."""
        self._part, self._device, self._speed, self._at_a_time = part, device, speed, at_a_time
        self._autocast = Autocast.now(device.torch_device)

    def measured(self) -> UnitTimes:
        """Return the median times of a turn, per forward and backward, at the probe's speed."""
        return self._part.ready(self._turns)

    def _turns(self) -> UnitTimes:
        start_s = time.perf_counter()
        with left_as_it_is(self._part.module):
            saved_bytes = self._saved_bytes()
        first_s = time.perf_counter() - start_s
        most = self._device.memory_bytes() // _OF_FREE // max(saved_bytes, 1)
        number = max(1, min(self._at_a_time, most, math.ceil(MOST_S / _LEAST_TURNS / first_s)))
        start_s, turns, before = time.perf_counter(), list[list[float]](), self._speed.now()
        while len(turns) < _LEAST_TURNS or time.perf_counter() - start_s < _LEAST_S:
            with left_as_it_is(self._part.module):
                turn = self._turn(number)
            after = self._speed.now()
            turns.append([(before + after) / 2 * seconds for seconds in turn])
            before = after
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
        torch.clear_autocast_cache()  # so that weights are cast in every visit
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
        found = [leaf.grad for leaf in self._part.leaves]
        for leaf in self._part.leaves:
            leaf.grad = None
        return found

    def _wait(self) -> None:
        self._device.mark("probe").wait()
