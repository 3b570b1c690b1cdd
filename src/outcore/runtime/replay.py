"""What a unit's forward saw besides its arguments, so that recompute sees the same: random numbers, autocast, flags, buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from outcore.runtime.device import Device


@contextmanager
def autocast_cache_off() -> Iterator[None]:
    """Keep autocast from caching casts of weights: its cache is keyed by the parameter, whose bytes change under it."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


class ForwardState:
    """Taken before a forward, put back around its recompute."""

    def __init__(self, modules: Sequence[nn.Module], device: Device) -> None:
        """Capture. Buffers are copied; ``drop_unchanged`` lets go of those that forward left alone."""
        self._modules, self._device = modules, device
        self._rng = device.rng_state()
        self._training = [m.training for m in modules]
        kinds = dict.fromkeys(("cpu", device.torch_device.type))
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        buffers = [b for m in modules for b in m.buffers(recurse=False)]
        self._buffers = [(b, b._version, b.detach().clone()) for b in buffers]

    def drop_unchanged(self) -> None:
        """Keep only buffers that forward changed in place."""
        self._buffers = [(b, v, saved) for b, v, saved in self._buffers if b._version != v]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Make everything as it was before forward, and afterwards as it is now."""
        rng, training = self._device.rng_state(), [m.training for m in self._modules]
        buffers = [(b, b.detach().clone()) for b, _, _ in self._buffers]
        try:
            self._device.set_rng_state(self._rng)
            _set_training(self._modules, self._training)
            _copy_back([(b, saved) for b, _, saved in self._buffers])
            with _autocast(self._autocast):
                yield
        finally:
            self._device.set_rng_state(rng)
            _set_training(self._modules, training)
            _copy_back(buffers)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training != flag:
            module.training = flag


def _copy_back(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


@contextmanager
def _autocast(modes: Sequence[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    if not modes:
        with autocast_cache_off():
            yield
        return
    (kind, is_on, dtype), *rest = modes
    with torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False), _autocast(rest):
        yield
