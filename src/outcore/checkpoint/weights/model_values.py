"""A model's values at both ends of a run: the first ones, given unit by unit, and those that it gets back at the end.

First values are the model's own, those of a checkpoint, or those of its initialisation. When the model is closed, they
come back as ordinary parameters where they were before ``prepare``. Everything that can fail happens before the engine
is closed, or after each parameter has its value. So no error loses a value.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import nn
from torch.nn import Parameter

from outcore.checkpoint.weights.conversions import StatePlace, places
from outcore.checkpoint.weights.initialise import Initialisation
from outcore.checkpoint.weights.load_plan import plan_loading
from outcore.core.errors import ConfigError, MemoryBudgetError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.engine.engine import Engine
from outcore.engine.opened import Values
from outcore.engine.unit.unit import Beneath, Unit
from outcore.engine.unit.views import nothing
from outcore.memory.machine import host_free_bytes
from outcore.model.quantized import FULL_CHECKSUM, Quantized, full_checksum, is_quantized
from outcore.model.quantized import give_back as give_back_parts
from outcore.model.wrapped import is_wrapped, tensors_in
from outcore.torch_private import subclassed


@final
class FirstValues:
    """The first value of every parameter and buffer of a model."""

    def __init__(
        self,
        model: nn.Module,
        weights: str | Path | None,
        *,
        later: Collection[str] = (),
        quantized: Sequence[Quantized] = (),
    ) -> None:
        """Settle where every value comes from.

        Args:
            model: Any part of it may be on the meta device.
            weights: A Hugging Face checkpoint directory; it overrides values that the model has.
            later: Names of tensors that get their values afterwards. On the meta device they begin as zeros.
            quantized: Weights of the model that are quantised already, or will be as they are read.

        Raises:
            ConfigError: The checkpoint does not fit, or nothing gives a tensor on the meta device its value.

        Memory: host, headers. The model stays as it is.
        """
        self._model = model
        everything = list(places(model))
        _refuse_hidden(model)
        for place in everything:
            _refuse_watched(place)
        self._loading = None if weights is None else plan_loading(model, weights)
        self._quantized = {id(weight.named[0][1]): weight for weight in quantized}
        _refuse_unread([w for w in quantized if w.param.is_meta and not self._is_loaded(w.param)])
        for weight in quantized:
            if self._is_loaded(weight.param):
                weight.refuse_unknown()
        empty = [p for p in everything if p.tensor.is_meta and not self._is_loaded(p.tensor)]
        self._later = {id(p.tensor) for p in empty if p.name in later}
        self._made_here = {id(p.tensor) for p in empty} - self._later
        self._initialisation = Initialisation(model, self._made_here) if self._made_here else None

    @torch.no_grad()
    def take_over(self, device: torch.device) -> None:
        """Take the model off the meta device. Buffers get their values; parameters have no bytes until they get theirs.

        Parameters stay the same objects, so the optimizer still holds them. Call it once, before ``of``.

        Memory: on ``device``, all buffers; host, buffers while they are made.
        """
        everything = list(places(self._model))
        made = self._initialise([p.tensor for p in everything if p.is_buffer])
        made |= {id(p.tensor): _zeros(p.tensor) for p in everything if p.is_buffer and id(p.tensor) in self._later}
        moved: dict[int, torch.Tensor] = {}
        for place in everything:
            key = id(place.tensor)
            if not place.is_buffer:
                if place.tensor.is_meta and not is_wrapped(place.tensor):
                    _leave_meta(place.tensor, device)
                continue
            if key not in moved:
                moved[key] = _placed(place.tensor, self._loaded(place.tensor, made.get(key)), device)
            place.module._buffers[place.key] = moved[key]
        for weight in self._quantized.values():
            for part in weight.parts:
                if part.is_meta:
                    _leave_meta(part, device)
        self._device = device
        if self._loading is not None:
            self._loading.remember_rules()

    def of(self, unit: Unit) -> Values:
        """The first values of a unit's parameters.

        Memory: host, all tensors that the unit's modules initialise; otherwise one tensor at a time.
        """
        made = self._initialise(unit.params)

        def value(index: int) -> torch.Tensor:
            param = unit.params[index]
            weight = self._quantized.get(id(param))
            asked = param if weight is None else weight.param
            if self._loading is not None and self._loading.holds(asked):
                read_all = partial(self._loading.read_finite, asked)
                if weight is None:
                    return read_all()
                if known := self._loading.read_parts(asked):
                    read, *parts = weight.unpack(read_all, known)
                else:
                    read = read_all()
                    setattr(asked, FULL_CHECKSUM, full_checksum(read))
                    read, *parts = weight.quantize(read, self._device)
                made.update(zip((id(part) for _, part in weight.named[1:]), parts, strict=True))
                return read
            if id(param) in self._later:
                return _zeros(param)
            found = made.pop(id(param), None)
            return param.data if found is None else found

        return value

    def _initialise(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        wanted = {id(t) for t in tensors} & self._made_here
        return self._initialisation.run(wanted) if self._initialisation is not None and wanted else {}

    def _is_loaded(self, tensor: torch.Tensor) -> bool:
        return self._loading is not None and self._loading.holds(tensor)

    def _loaded(self, tensor: torch.Tensor, otherwise: torch.Tensor | None) -> torch.Tensor | None:
        return self._loading.read(tensor) if self._loading and self._loading.holds(tensor) else otherwise


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _refuse_unread(weights: Sequence[Quantized]) -> None:
    if weights:
        raise ConfigError(
            f"expected weights= with a quantised model on the meta device, but nothing gives '{weights[0].name}' its "
            f"value ({len(weights)} in all); name the checkpoint that it is made from"
        )


def _refuse_hidden(model: nn.Module) -> None:
    """Refuse a tensor on the meta device that is neither parameter nor buffer: it would never get a value."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ConfigError(
                    f"expected parameters and buffers on the meta device, but '{name}.{key}' is a plain attribute of "
                    f"{type(module).__name__}, which neither a checkpoint nor an initialiser sets; register it as a "
                    "buffer, or build the model on the CPU"
                )


def _refuse_watched(place: StatePlace) -> None:
    """Refuse a parameter with hooks or weak references: they would be lost when it leaves the meta device."""
    tensor = place.tensor
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    if tensor.is_meta and not place.is_buffer and (hooks or weakref.getweakrefs(tensor)):
        raise ConfigError(
            f"expected parameters on the meta device without hooks and weak references, but '{place.name}' has some; "
            "register them after outcore.prepare()"
        )


def _leave_meta(param: torch.Tensor, device: torch.device) -> None:
    # ``param.data = ...`` raises here: a storage on meta cannot be replaced by one on another device.
    empty = nothing(param.dtype, device).as_strided(param.shape, (0,) * param.ndim)
    kind = type(param) if is_quantized(param) else Parameter
    stand_in = subclassed(kind, empty, param.requires_grad)
    stand_in.__dict__.update(param.__dict__)
    if getattr(param, "grad_dtype", param.dtype) != param.dtype:  # set by its unit; the default follows the dtype
        stand_in.grad_dtype = param.grad_dtype
    torch.utils.swap_tensors(param, stand_in)


def _placed(buffer: torch.Tensor, value: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if value is None:
        return buffer.to(device)
    if buffer.is_meta or buffer.device != device:
        return value.to(device=device, dtype=buffer.dtype)
    return buffer.copy_(value)


class Origin(NamedTuple):
    """What a tensor was before ``prepare``."""

    device: torch.device
    is_thawed: bool
    """Whether it required a gradient, and ``prepare`` without an optimizer froze it."""
    kind: type[torch.Tensor]


def origins_of(model: nn.Module, *, is_to_be_frozen: bool) -> dict[str, Origin]:
    """Origins of all parameters and buffers, by name. Tensors on the meta device will come back to the host."""
    host, everything = torch.device("cpu"), {p.name: p.tensor for p in places(model)}
    return {
        name: Origin(host if tensor.is_meta else tensor.device, is_to_be_frozen and tensor.requires_grad, type(tensor))
        for name, tensor in everything.items()
    }


def take_weights(engine: Engine) -> dict[int, torch.Tensor]:
    """The current weights in host memory, by the id of their parameter. Waits for updates.

    Raises:
        OutcoreError: There is no room for the weights, some are gathered, or they are not whole any more. Nothing was
            changed.

    Memory: host, all weights in addition to everything that the engine holds.
    """
    engine.refuse_if_closed()
    engine.device.check()
    gathered = next((u.label for u in engine.units if u.presence.now is Beneath.GATHERED), None)
    if gathered is not None:
        raise UnsupportedError(f"unit '{gathered}' is inside outcore.gathered(); leave the block first")
    need, free = sum(u.spec.weight_bytes for u in engine.units), host_free_bytes()
    if need > free:
        raise MemoryBudgetError(
            f"they take {format_bytes(need)} of host memory, of which {format_bytes(free)} are free"
        )
    return {id(p): _value(engine, unit, i) for unit in engine.units for i, p in enumerate(unit.params)}


def _value(engine: Engine, unit: Unit, index: int) -> torch.Tensor:
    if unit.presence.now is Beneath.AT_HOME:  # the user may have edited it there
        return unit.params[index].detach().to("cpu", copy=True)
    return engine.access.read_weight(unit, index)


@torch.no_grad()
def give_back(model: nn.Module, values: Mapping[int, torch.Tensor], origins: Mapping[str, Origin]) -> None:
    """Put weights into the parameters of a closed model; then move parameters and buffers back to their devices."""
    everything = list(places(model))
    known = [
        place
        for place in everything
        if place.name in origins and (place.is_buffer or all(id(t) in values for t in tensors_in(place.tensor)))
    ]
    moved: dict[tuple[int, torch.device], torch.Tensor] = {}
    for place in known:
        if not place.is_buffer and not is_wrapped(place.tensor):
            _restore(place.tensor, values[id(place.tensor)], origins[place.name])
    for place in known:
        device = origins[place.name].device
        if not place.is_buffer and not is_wrapped(place.tensor):
            place.tensor.data = moved[id(place.tensor), device] = place.tensor.data.to(device)
    for place in known:
        device, tensor = origins[place.name].device, place.tensor
        if place.is_buffer:
            place.module._buffers[place.key] = moved.setdefault((id(tensor), device), tensor.to(device))
        elif is_quantized(tensor):
            give_back_parts(place.module, tensor, values, device, moved)


def _restore(param: torch.Tensor, value: torch.Tensor, origin: Origin) -> None:
    param.__class__ = origin.kind
    param.__dict__.pop("place", None)  # an attribute of the class that watched it
    param.data = value
    param.requires_grad_(param.requires_grad or origin.is_thawed)
    if hasattr(param, "grad_dtype"):
        param.grad_dtype = param.dtype  # the unit allowed any dtype
