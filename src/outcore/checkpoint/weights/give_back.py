"""Giving the weights of a closed model back, as ordinary parameters where they were before ``prepare``.

Everything that can fail happens before the engine is closed, or after each parameter has its value. So no error loses
a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from outcore.checkpoint.weights.state_names import places
from outcore.core.errors import MemoryBudgetError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.engine.engine import Engine
from outcore.engine.unit.unit import Beneath, Unit
from outcore.memory.limits import host_free_bytes
from outcore.model.quantized import give_back as give_back_parts
from outcore.model.quantized import is_quantized
from outcore.model.wrapped import is_wrapped, tensors_in


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
