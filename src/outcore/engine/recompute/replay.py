"""What a forward saw besides its arguments, so that recompute sees it too: random numbers, modes, flags, buffers.

Inside of an autograd function's backward torch has no default device, not even on the thread that set it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from outcore.device.device import Device
from outcore.engine.recompute.attributes import Attributes, Content, SavedTensor, mutable_in, saved_buffers
from outcore.engine.recompute.randomness import GlobalRandom
from outcore.torch_private import set_switches, switches


class CapturedState:
    """What a unit may see besides its arguments."""

    def __init__(self, modules: Sequence[nn.Module], device: Device, where: str) -> None:
        """Capture nothing yet. Args: where: Names the unit in errors."""
        self.modules, self.device, self.where = modules, device, where
        self.attributes = Attributes(modules)
        self.registered = [place for m in modules for place in (m._parameters, m._buffers)]
        self.kinds = dict.fromkeys(("cpu", device.torch_device.type))
        """Kinds of devices, each of which has an autocast mode."""
        self.draws_from_numpy = False
        self.changes_silently = device.computes_on_host
        """Whether buffers are compared by value after each forward.

        Always on the CPU, where nothing waits for it; elsewhere, as soon as one was seen to change silently.
        """


class ForwardState:
    """What a forward saw: captured before it, put back around its recompute."""

    def __init__(self, around: CapturedState, objects: Sequence[Any]) -> None:
        """Capture. Tensors are copied; ``drop_unchanged`` drops copies of large ones that forward left alone.

        Args:
            around: Surroundings of the unit.
            objects: Objects among the arguments that the block may change.
        """
        self._around, self._is_thorough = around, around.draws_from_numpy
        self._rng = around.device.rng_state()
        self._random = GlobalRandom(is_thorough=self._is_thorough)
        self._autocast = _autocast_modes(around.kinds)
        self.caches_casts = torch.is_autocast_cache_enabled()
        """Whether autocast caches casts for the unit's caller."""
        self._default_device, self._switches = _default_device(), switches()
        self._registered = _Registered(around.registered)
        self._attributes = around.attributes.take()
        mutable = [self._attributes.mutable, mutable_in(objects)] if objects else [self._attributes.mutable]
        self._mutable = [part for part in mutable if part.things]
        self._contents = [saved for part in self._mutable for saved in part.contents()]
        self._tensors = saved_buffers(around.modules) + [saved for part in self._mutable for saved in part.tensors()]
        self._retained: list[weakref.ref[torch.Tensor]] = []
        """Tensors that forward has left in attributes, and whose gradients are retained."""

    @property
    def flags(self) -> Hashable:
        """A value that is equal for two forwards whose modules are in the same modes (training or evaluation)."""
        return tuple([values[0] for values in self._attributes.values])

    def look_closely(self) -> None:
        """Capture also what is slow to capture."""
        if not self._is_thorough:
            self._is_thorough = True
            self._random = GlobalRandom(is_thorough=True)

    def drop_unchanged(self) -> None:
        """Drop copies of tensors that forward left alone, except small ones."""
        around = self._around
        for tensor in self._tensors:
            if tensor.drop_if_unchanged(by_value=around.changes_silently or self._is_thorough):
                around.changes_silently = True
        around.draws_from_numpy = around.draws_from_numpy or self._random.numpy_has_moved
        self._retained = list(map(weakref.ref, around.attributes.retained(self._attributes)))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Make everything as it was before forward, for the block; afterwards, make it as it is now."""
        around = self._around
        rng, randoms = around.device.rng_state(), GlobalRandom(is_thorough=self._is_thorough)
        registered = _Registered(around.registered)
        attributes = around.attributes.take()
        contents = [saved for part in (*self._mutable, attributes.mutable) for saved in part.contents()]
        tensors = [saved.again() for saved in self._tensors if not saved.is_dropped]
        try:
            around.device.set_rng_state(self._rng)
            self._random.put_back()
            self._registered.put_back()
            around.attributes.put_back(self._attributes)
            _put_back(self._contents, self._tensors, around.where)
            with (
                _autocast([] if self._autocast == _autocast_modes(around.kinds) else self._autocast),
                self._as_default(),
                nullcontext() if self._switches == switches() else _switched(self._switches),
            ):
                yield
            if self._retained:
                for left, again in zip(self._retained, around.attributes.retained(self._attributes), strict=False):
                    again.register_hook(partial(_retain, left))
        finally:
            around.device.set_rng_state(rng)
            randoms.put_back()
            registered.put_back()
            around.attributes.put_back(attributes)
            _put_back(contents, tensors, around.where)

    def _as_default(self) -> AbstractContextManager[object]:
        return nullcontext() if self._default_device == _default_device() else self._default_device


def _retain(left: weakref.ref[torch.Tensor], grad: torch.Tensor | None) -> None:
    """Give forward's tensor the gradient of the one that a recompute made in its place, as torch retains it."""
    tensor = left()
    if tensor is not None and grad is not None:
        form = torch.preserve_format if grad.is_sparse else torch.contiguous_format
        tensor.grad = grad.clone(memory_format=form) if tensor.grad is None else tensor.grad + grad


def _default_device() -> torch.device:
    return torch.empty(0).device  # a tenth of what torch.get_default_device() takes


def _put_back(contents: Sequence[Content], tensors: Sequence[SavedTensor], where: str) -> None:
    for content in contents:
        content.put_back()
    for tensor in tensors:
        tensor.put_back(where)


class _Registered:
    """Tensors that are registered in modules: ``functional_call`` lends others, and a block may replace its buffers."""

    def __init__(self, places: Sequence[dict[str, Any]]) -> None:
        self._places, self._tensors = places, list(map(dict.copy, places))

    def put_back(self) -> None:
        before, now = map(dict.values, self._tensors), map(dict.values, self._places)
        is_same = all(map(is_, chain.from_iterable(before), chain.from_iterable(now)))
        if is_same and list(map(len, self._places)) == list(map(len, self._tensors)):
            return
        for place, tensors in zip(self._places, self._tensors, strict=True):
            place.clear()
            place.update(tensors)


@contextmanager
def _switched(values: Sequence[Any]) -> Iterator[None]:
    now = switches()
    try:
        set_switches(values)
        yield
    finally:
        set_switches(now)


_AutocastMode = tuple[str, bool, torch.dtype]


def _autocast_modes(kinds: Iterable[str]) -> list[_AutocastMode]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def _autocast(modes: Sequence[_AutocastMode]) -> Iterator[None]:
    if not modes:
        yield
        return
    (kind, is_on, dtype), *rest = modes
    with torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False), _autocast(rest):
        yield
