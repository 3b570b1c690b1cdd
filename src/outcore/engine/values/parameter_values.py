"""Weights and states by parameter, for callers that know neither units nor homes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outcore.core.errors import ConfigError
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import torch_dtype
from outcore.engine.values.access import ValueAccess
from outcore.engine.values.edits import take_edits
from outcore.optim.rule import SCALE
from outcore.spec.layout import CODES
from outcore.spec.model import ParamSpec


class ParameterValues:
    """Weights and states of single parameters, by parameter: read and written wherever they live."""

    def __init__(self, places: Mapping[int, tuple[Unit, int]], access: ValueAccess, *, has_optimizer: bool) -> None:
        """Args: places: Unit and index of each parameter, by the parameter's id. access: Reads and writes by unit."""
        self.places, self.access, self._has_optimizer = places, access, has_optimizer

    def read(self, param: torch.Tensor) -> torch.Tensor:
        """Return the current weight, in host memory. Edits before are taken over."""
        unit, index = self.places[id(param)]
        take_edits(unit, self.access)
        return self.access.current_weight(unit, index)

    def write(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Replace a weight; its master follows. See ``ValueAccess.write_weight``."""
        self.access.write_weight(*self.places[id(param)], value)

    def place(self, param: torch.Tensor) -> tuple[Unit, int] | None:
        """Unit and index of a trained parameter; None for any other."""
        unit, index = self.places.get(id(param), (None, 0))
        return None if unit is None or index >= unit.num_trainable else (unit, index)

    def spec(self, param: torch.Tensor) -> ParamSpec | None:
        """Spec of a trained parameter; None for any other."""
        unit, index = self.place(param) or (None, 0)
        return None if unit is None else unit.spec.params[index]

    def names(self, param: torch.Tensor) -> list[str] | None:
        """Names of the states for which a parameter has memory; None if it is not trained."""
        unit, index = self.place(param) or (None, 0)
        if unit is None:
            return None
        return [s.name for s in unit.ledger.state_specs.values() if s.forms[index] and s.name != CODES]

    def check(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Raise if states of an optimizer do not fit a parameter.

        Raises:
            ConfigError: A tensor has another shape or format, or its scale is missing.
        """
        unit, index = self.place(param) or (None, 0)
        if unit is None:
            return
        spec = unit.spec.params[index]
        try:
            int(values.get("step", 0))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"optimizer state: expected step of '{spec.name}' to be a whole number, but got {values['step']!r}; "
                "load what an optimizer has saved"
            ) from error
        for state in unit.ledger.state_specs.values():
            value, form, shape = values.get(state.name), state.forms[index], state.described(spec, index).shape
            if value is None or form is None:
                continue
            if tuple(value.shape) != shape:
                raise ConfigError(
                    f"optimizer state: expected {state.name} of '{spec.name}' with shape {shape}, but got "
                    f"{tuple(value.shape)}; it was saved for another model or optimizer"
                )
            if form.format == "8bit" and values.get(state.name + SCALE) is None:
                raise ConfigError(
                    f"optimizer state: expected {state.name + SCALE} beside {state.name} of '{spec.name}', whose codes "
                    "it scales, but it is missing; give all states of the parameter together"
                )
            stored = torch.float32 if form.format == "compact" else torch_dtype(form.dtype)
            if value.dtype != stored and (form.format != "fp32" or value.dtype == torch.uint8):
                raise ConfigError(
                    f"optimizer state: expected {state.name} of '{spec.name}' in {stored}, as this run stores it "
                    f"(state_format '{form.format}'), but got {value.dtype}; states of another format are not "
                    "converted: load those of the same state_format into the optimizer that prepare returned"
                )

    def load(self, param: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace a parameter's states by ``values``. Missing states begin anew, except masters, which stay."""
        unit, index = self.place(param) or (None, 0)
        if unit is None or not self._has_optimizer:
            return
        states = unit.ledger.state_specs
        has_states = any(values.get(name) is not None for name in states if name != "master")
        unit.steps[index] = int(values["step"]) if "step" in values else int(has_states)  # SGD keeps no step
        for name, state in states.items():
            value, form = values.get(name), state.forms[index]
            if form is None or name == CODES:
                continue
            if value is None and name != "master":
                shape = state.described(unit.spec.params[index], index).shape
                value = torch.full(shape, form.initial, dtype=torch_dtype(form.dtype), device="cpu")
            if value is not None:
                self.access.write_state(unit, name, index, value)
