"""What a forward saw besides its arguments, so that recompute sees it too: random numbers, modes, flags, buffers.

Inside of an autograd function's backward torch has no default device, not even on the thread that set it.

Asking Python's and numpy's global generators for their states takes 10 and 60 us. Reading their words in memory takes
less than 1 us. Autocast has one cache of casts for all units, whose keys are parameters, and their bytes change under
it.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import Parameter

from outcore.device.device import Device
from outcore.engine.recompute.attributes import Attributes, Content, SavedTensor, mutable_in, saved_buffers
from outcore.torch_private import set_switches, switches

_WORDS = 624
_VERSION = 3  # of what random.getstate returns
_PYTHON = cast("Any", random.random).__self__


class GlobalRandom:
    """The states of both generators at the time when this object was made."""

    def __init__(self, *, is_thorough: bool) -> None:
        """Capture. Args: is_thorough: Also read the normal number that numpy keeps for the next call; slow."""
        self._python = _look_at_python()
        self._numpy = _numpy.look()
        self._numpy_all = _numpy.state() if is_thorough or not _numpy.has_words else None

    @property
    def numpy_has_moved(self) -> bool:
        """Whether numpy's generator was drawn from since."""
        if self._numpy_all is not None and not _same_normal(self._numpy_all, _numpy.state()):
            return True
        return _numpy.look() != self._numpy

    def put_back(self) -> None:
        """Set both generators back to these states."""
        if _look_at_python() != self._python:
            words, normal = self._python
            random.setstate(words if _python_words is None else _python_state(words, normal))
        if self.numpy_has_moved:
            _numpy.put_back(self._numpy, self._numpy_all)


def _find_python_words() -> Any:
    """A view of the memory with the generator's position and words; None if this Python keeps them differently."""
    base = random.Random.__base__
    nbytes = 4 * (_WORDS + 1)
    room = 0 if base is None else base.__basicsize__ - object.__basicsize__
    if sys.implementation.name != "cpython" or not nbytes <= room < nbytes + 8:
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(_PYTHON) + object.__basicsize__)
    return words if _python_state(bytes(words), _PYTHON.gauss_next) == random.getstate() else None


def _python_state(words: bytes, normal: float | None) -> tuple[Any, ...]:
    position, *rest = struct.unpack(f"{_WORDS + 1}I", words)
    return _VERSION, (*rest, position), normal


def _look_at_python() -> tuple[Any, Any]:
    return (random.getstate() if _python_words is None else bytes(_python_words)), _PYTHON.gauss_next


class _Numpy:
    """Numpy's global generator, whose words are at a public address."""

    def __init__(self) -> None:
        self._source: Any = None
        self._words: Any = None

    def look(self) -> bytes:
        """Read its position and words."""
        source = cast("Any", np.random).get_bit_generator()
        if source is not self._source:
            self._source = source
            address = source.ctypes.state_address
            kind = ctypes.c_uint32 * (_WORDS + 1)
            self._words = kind.from_address(address) if type(source).__name__ == "MT19937" else None
        return repr(source.state).encode() if self._words is None else bytes(self._words)

    @property
    def has_words(self) -> bool:
        """Whether it is numpy's usual generator, whose words can be read; a user may have set another one."""
        return self._words is not None

    def state(self) -> Any:
        """Get its whole state, with the second of two normal numbers that are drawn together."""
        return np.random.get_state(legacy=False)  # noqa: NPY002  (what users' legacy calls draw from)

    def put_back(self, look: bytes, state: Any) -> None:
        """Set it back. Args: look: What ``look`` returned. state: What ``state`` returned then, or None."""
        if not self.has_words:
            self._source.state = state
            return
        if state is None:
            *key, position = struct.unpack(f"{_WORDS + 1}I", look)
            state = ("MT19937", np.array(key, dtype=np.uint32), position)
        np.random.set_state(state)  # noqa: NPY002


def _same_normal(a: Any, b: Any) -> bool:
    return bool((a["has_gauss"], a["gauss"]) == (b["has_gauss"], b["gauss"]))


_python_words = _find_python_words()
_numpy = _Numpy()


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


class AutocastCacheOff:
    """Keeps autocast from caching casts of weights: its keys are parameters, whose bytes change under it."""

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._was)


class OwnAutocastCache:
    """A cache of casts for one run of a unit. A weight that the unit uses twice is cast once, as in a plain loop.

    So the gradients of both uses are added in the lower precision, before they are cast back. Autocast has one cache
    for all units. It is emptied before and after the run, so cached casts of other weights are made again.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(self._is_on)
        torch.clear_autocast_cache()

    def __exit__(self, *_: object) -> None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._was)


class CastsOfUnit:
    """Chooses the cache for the runs of a unit. The first run under autocast tells whether a cache is of use."""

    def __init__(self, params: Sequence[Parameter], device: torch.device) -> None:
        self._params, self._device_type = params, device.type
        self._is_shared: bool | None = None

    def cache(self, *, is_kept: bool) -> AbstractContextManager[None]:
        """The cache for a forward. Args: is_kept: Whether backward walks its graph."""
        is_on = is_kept and torch.is_autocast_cache_enabled() and self._is_shared is not False
        return OwnAutocastCache(is_on=True) if is_on else AutocastCacheOff()

    def cache_again(self, *, was_on: bool) -> AbstractContextManager[None]:
        """The cache for a recompute. Args: was_on: Whether autocast cached casts for the caller of forward."""
        return OwnAutocastCache(is_on=was_on)

    def learn(self, made: Sequence[torch.Tensor]) -> None:
        """Look at the graph that a forward has made, to learn whether a cache is of use."""
        if self._is_shared is None and torch.is_autocast_enabled(self._device_type):
            self._is_shared = uses_cast_twice(made, self._params)


class CastsOfCompiled(CastsOfUnit):
    """No cache for a compiled unit, whose code casts by itself. Without autocast, nothing is switched."""

    def cache(self, *, is_kept: bool) -> AbstractContextManager[None]:
        """The same for all runs: in another mode torch would compile the code again."""
        return AutocastCacheOff() if torch.is_autocast_enabled(self._device_type) else nullcontext()

    def cache_again(self, *, was_on: bool) -> AbstractContextManager[None]:
        """The same as in forward."""
        return self.cache(is_kept=False)

    def learn(self, made: Sequence[torch.Tensor]) -> None:
        """Do nothing: there is nothing to learn."""


def uses_cast_twice(outputs: Sequence[torch.Tensor], params: Sequence[Parameter]) -> bool:
    """Whether one cast of a parameter, made and cached by autocast, goes into more than one operation."""
    own = {id(p) for p in params}
    seen: set[Any] = {None}
    stack: list[Any] = [t.grad_fn for t in outputs]
    casts: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge, _ in node.next_functions:
            if edge is not None and edge.name() == "ToCopyBackward0" and _leaf_of(edge) in own:
                if edge in casts:
                    return True
                casts.add(edge)
            stack.append(edge)
    return False


def _leaf_of(cast: Any) -> int:
    return id(getattr(cast.next_functions[0][0], "variable", None))
