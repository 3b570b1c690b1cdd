"""Where a model's first values come from: itself, a checkpoint, or its own initialisation; asked for unit by unit."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.nn import Parameter

from outcore.core.errors import ConfigError
from outcore.runtime.fill import Values
from outcore.runtime.initialise import Initialisation
from outcore.runtime.load_plan import LoadPlan, plan_loading
from outcore.runtime.state_names import places
from outcore.runtime.unit import Unit


@final
class FirstValues:
    """The first value of every parameter and buffer. Buffers get theirs with the unit that they belong to."""

    def __init__(self, model: nn.Module, weights: str | Path | None) -> None:
        """Settle where everything comes from.

        Args:
            model: Any part of it may be on the meta device.
            weights: A Hugging Face checkpoint directory; overrides values that the model has.

        Raises:
            ConfigError: The checkpoint does not fit, or nothing gives a tensor on the meta device its value.

        Memory: host, headers; nothing is changed.
        """
        self._model = model
        _refuse_hidden(model)
        self._loading: LoadPlan | None = None if weights is None else plan_loading(model, weights)
        self._buffers = {id(p.tensor): p.tensor for p in places(model) if p.is_buffer}
        on_meta = {id(p.tensor): p.tensor for p in places(model) if p.tensor.is_meta}
        self._to_initialise = {key for key, tensor in on_meta.items() if not self._is_loaded(tensor)}
        self._initialisation = Initialisation(model, self._to_initialise)

    def take_over(self, device: torch.device) -> None:
        """Move parameters from the meta device to ``device``, without bytes: from now on they wait for their values.

        They stay the same objects, so the optimizer goes on knowing them. Called once, just before ``of``.
        """
        for place in places(self._model):
            if not place.is_buffer and place.tensor.is_meta:
                _leave_meta(place.tensor, device)
        self._device = device

    def of(self, unit: Unit) -> Values:
        """The first values of a unit's parameters. Its buffers are given theirs, on the device, at once.

        Memory: host, what the unit's modules initialise; else one tensor at a time.
        """
        buffers = _buffers_of(unit)
        ids = {id(p) for p in unit.params} | {id(b) for b in buffers}
        made = self._initialisation.run(ids & self._to_initialise)
        for buffer in buffers:
            self._place_buffer(buffer, made)
        if self._loading is not None and unit.name == "":
            self._loading.finish()

        def value(index: int) -> torch.Tensor:
            param = unit.params[index]
            if self._is_loaded(param):
                return self._loading.read(param)
            return made.pop(id(param)) if id(param) in made else param.data

        return value

    def _is_loaded(self, tensor: torch.Tensor) -> bool:
        return self._loading is not None and self._loading.holds(tensor)
