"""What a forward saw besides its arguments, so that recompute sees it too: random numbers, modes, flags, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from outcore.runtime.device import Device


class AutocastCacheOff:
    """Keep autocast from caching casts of weights: its cache is keyed by the parameter, whose bytes change under it."""

    def __enter__(self) -> None:
        self._was = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._was)


class ForwardState:
    """Taken before a forward, put back around its recompute."""

    def __init__(self, modules: Sequence[nn.Module], device: Device) -> None:
        """Capture. Buffers are copied; ``drop_unchanged`` lets go of those that forward left alone."""
        self._modules, self._device = modules, device
        self._rng = device.rng_state()
        self._training = [m.training for m in modules]
        self._kinds = dict.fromkeys(("cpu", device.torch_device.type))
        self._autocast = _autocast_modes(self._kinds)
        self._tensors = [(m, dict(m._parameters), dict(m._buffers)) for m in modules if m._parameters or m._buffers]
        self._buffers = [_SavedBuffer(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]

    def drop_unchanged(self) -> None:
        """Keep only buffers that forward changed or replaced."""
        self._buffers = [b for b in self._buffers if b.may_have_changed()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Make everything as it was before forward, and afterwards as it is now."""
        rng, training = self._device.rng_state(), [m.training for m in self._modules]
        exchanged = self._exchange_tensors()
        now = [
            _SavedBuffer(b.module, b.name, buffer)
            for b in self._buffers
            if (buffer := b.module._buffers[b.name]) is not None
        ]
        try:
            self._device.set_rng_state(self._rng)
            _set_training(self._modules, self._training)
            for saved in self._buffers:
                saved.put_back()
            with _autocast([] if self._autocast == _autocast_modes(self._kinds) else self._autocast):
                yield
        finally:
            self._device.set_rng_state(rng)
            _set_training(self._modules, training)
            for saved in now:
                saved.put_back()
            for registered, name, tensor in exchanged:
                registered[name] = tensor

    def _exchange_tensors(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Register the tensors that forward used: ``functional_call`` lends a module others for a while.

        Returns how to undo it.
        """
        undo: list[tuple[dict[str, Any], str, Any]] = []
        for module, params, buffers in self._tensors:
            for registered, then in ((module._parameters, params), (module._buffers, buffers)):
                for name, tensor in then.items():
                    if registered.get(name) is not tensor:
                        undo.append((registered, name, registered.get(name)))
                        registered[name] = tensor  # type: ignore[assignment]
        return undo


class _SavedBuffer:
    """A buffer of a module: which tensor it was, and what it held."""

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        self.module, self.name, self._tensor = module, name, tensor
        self._version = 0 if tensor.is_inference() else tensor._version
        self._value = tensor.detach().clone()

    def may_have_changed(self) -> bool:
        # Batch norm kernels write running statistics without telling the version counter.
        if isinstance(self.module, _NormBase) or self.module._buffers.get(self.name) is not self._tensor:
            return True
        return not self._tensor.is_inference() and self._tensor._version != self._version

    def put_back(self) -> None:
        self.module._buffers[self.name] = self._tensor
        self._tensor.data.copy_(
            self._value
        )  # `.data`: the graph of a recompute may have saved the buffer, and needs no other value


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training != flag:
            module.training = flag


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
