"""Optimizer states by parameter: what fits one, and what replaces all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from outcore.core.errors import ConfigError
from outcore.runtime.unit.unit import Unit
from outcore.runtime.unit.views import torch_dtype
from outcore.runtime.values.access import Access
from outcore.spec.layout import StateSpec


def own_states(unit: Unit, index: int) -> list[StateSpec]:
    """States that a parameter has besides its weight.

    A master of the weight's own dtype is none, whether or not the plan has a copy: the weight itself says the same.
    """
    dtype = unit.spec.params[index].dtype
    return [s for s in unit.ledger.state_specs.values() if s.name != "master" or s.parts[index].dtype != dtype]


class States:
    """Checks and replaces the states of single parameters."""

    def __init__(
        self, places: Mapping[int, tuple[Unit, int]], access: Access, initial: Callable[[str], float] | None
    ) -> None:
        """Args: places: By the id of a parameter. initial: What a state begins with; None without an optimizer."""
        self._places, self._access, self._initial = places, access, initial

    def initial_value(self, name: str) -> float:
        """What every element of a state begins with."""
        return 0.0 if self._initial is None else self._initial(name)

    def place(self, param: torch.Tensor) -> tuple[Unit, int] | None:
        """Unit and index of a trained parameter."""
        unit, index = self._places.get(id(param), (None, 0))
        return None if unit is None or index >= unit.num_trainable else (unit, index)

    def check(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Raise if states of an optimizer do not fit a parameter.

        Raises:
            ConfigError: A tensor of another shape.
        """
        unit, index = self.place(param) or (None, 0)
        if unit is None:
            return
        spec = unit.spec.params[index]
        for name in unit.ledger.state_specs:
            value = values.get(name)
            if value is not None and tuple(value.shape) != spec.shape:
                raise ConfigError(
                    f"optimizer state: expected {name} of '{spec.name}' with shape {spec.shape}, but got "
                    f"{tuple(value.shape)}; it was saved for another model"
                )

    def load(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace a parameter's states by ``values``; what is missing begins anew, masters apart."""
        unit, index = self.place(param) or (None, 0)
        if unit is None or self._initial is None:
            return
        states = unit.ledger.state_specs
        has_states = any(values.get(name) is not None for name in states if name != "master")
        unit.steps[index] = int(values["step"]) if "step" in values else int(has_states)  # SGD keeps no step
        for name, state in states.items():
            value = values.get(name)
            if value is None and name != "master":
                shape, dtype = unit.spec.params[index].shape, torch_dtype(state.parts[index].dtype)
                value = torch.full(shape, self._initial(name), dtype=dtype, device="cpu")
            if value is not None:
                self._access.write_state(unit, name, index, value)
