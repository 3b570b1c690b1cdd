"""Weights and states by parameter, for callers that know neither units nor homes; and edits by the user.

[Note: edits] A plain loop keeps an edit. Here the update of a unit may start from master weights elsewhere. So the
masters of edited weights follow them, wherever these live: elements that equal the rounded master keep their master,
and the master of any other becomes the weight's value. They follow before a step, a save of states or a read of a
master, and not at once: weights that are changed and then changed back must not round their masters. A compact master
needs the weight to which it was rounded, so that weight is kept in host memory until then.

On the device an edit shows in the version counter or in a changed address. ``p.data`` has a version counter of its
own, so a parameter whose ``data`` was read counts as edited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.strides import row_major
from outcore.engine.unit.absent import unfreezing_refusal
from outcore.engine.unit.unit import Beneath, Unit
from outcore.engine.unit.views import torch_dtype
from outcore.engine.values.access import ValueAccess
from outcore.optim.rule import SCALE
from outcore.spec.layout import CODES
from outcore.spec.model import ParamSpec


@torch.no_grad()
def take_edits(unit: Unit, access: ValueAccess) -> None:
    """Take over what a user changed in weights at home on the device. Masters follow later.

    Raises:
        UnsupportedError: A frozen parameter was unfrozen, or the shape or dtype of one was changed.
    """
    buffer = unit.device_buffer() if unit.presence.now is Beneath.AT_HOME else None
    if buffer is None:
        return
    is_moved, watch = False, unit.presence.watch
    for i, (param, view) in enumerate(zip(unit.params, unit.views.weights(buffer), strict=True)):
        if param.requires_grad and not unit.spec.params[i].requires_grad:
            raise UnsupportedError(unfreezing_refusal(unit.spec.params[i].name))
        if param.data_ptr() != view.data_ptr():
            is_moved = True
            access.device.compute(
                f"edit of {unit.label}", writes=[buffer.region], after=unit.ledger.weights.before_write()
            )
            refuse_other_form(unit.spec.params[i], param)
            refuse_other_strides(unit.spec.params[i], param)
            view.copy_(param)
        elif param._version == watch.versions[i] and i not in watch.touched:
            continue
        watch.is_shared = True
        unit.weights_version += 1
        access.note_edit(unit, i)
    if is_moved:
        unit.show()
    watch.note_versions()


def let_masters_follow(unit: Unit, access: ValueAccess) -> None:
    """Take over all edits, masters too. See [Note: edits]. Raises: UnsupportedError, as ``take_edits``."""
    take_edits(unit, access)
    if access.edited.get(unit.name):
        access.follow_edits(unit)


class OwnEdits:
    """What a unit does to its own parameters in forward: weight clipping, codebooks, projections onto a constraint.

    Where weights live on the device, the next update starts from such an edit. In a slot the edit would be lost, so it
    is written home as soon as the unit is unbound. Edits are recognised as in [Note: edits].
    """

    def __init__(self, unit: Unit, access: ValueAccess) -> None:
        self._unit, self._access, self._touched = unit, access, unit.presence.watch.touched
        self._versions: list[int] = []
        self.suspects: list[int] = []
        """Parameters that the last forward may have changed."""

    def begin(self) -> None:
        """Note the parameters' versions. Call it right before forward, when parameters are present."""
        if not self._unit.ledger.cut.is_resident:
            self._touched.clear()
        self._versions = [p._version for p in self._unit.params]

    @torch.no_grad()
    def end(self) -> dict[int, torch.Tensor]:
        """Find what forward changed. Returns the values to write home, by index of the parameter.

        Raises:
            UnsupportedError: A parameter got another shape, dtype or order in memory.
        """
        unit = self._unit
        moved = [i for i, p in enumerate(unit.params) if p._version != self._versions[i]]
        self.suspects = sorted({*moved, *self._touched}) if moved or self._touched else []
        return self._changed() if self.suspects and unit.presence.now is Beneath.BOUND else {}

    def _changed(self) -> dict[int, torch.Tensor]:
        unit, changed = self._unit, {}
        for i in self.suspects:
            value = unit.params[i].detach()
            refuse_other_form(unit.spec.params[i], value)
            refuse_other_strides(unit.spec.params[i], value)
            if not same_bytes(self._access.read_weight(unit, i), value.cpu()):
                changed[i] = value.clone()
        return changed

    def write_home(self, changed: dict[int, torch.Tensor]) -> None:
        """Write the values that ``end`` returned to their home. Call it when the unit is not bound any more."""
        for i, value in changed.items():
            self._access.write_weight(self._unit, i, value)

    @contextmanager
    def undone(self, suspects: Sequence[int]) -> Iterator[None]:
        """Undo what a recompute does to parameters that its forward changed: they have this edit already."""
        if not suspects:
            yield
            return
        tensors = [(self._unit.params[i], self._unit.params[i].data) for i in suspects]
        values = [tensor.clone() for _, tensor in tensors]
        try:
            yield
        finally:
            for (param, tensor), value in zip(tensors, values, strict=True):
                tensor.copy_(value)
                param.data = tensor


def refuse_other_form(spec: ParamSpec, tensor: torch.Tensor) -> None:
    """Raise if a parameter's data was replaced by a tensor of another shape or dtype, as resizing embeddings does."""
    if tensor.shape != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
        raise UnsupportedError(
            f"expected '{spec.name}' to keep shape {spec.shape} and dtype {spec.dtype}, "
            f"but its data was replaced by {tuple(tensor.shape)} {tensor.dtype}; "
            "resize embeddings and change the model before outcore.prepare()"
        )


def refuse_other_strides(spec: ParamSpec, tensor: torch.Tensor) -> None:
    """Raise if a parameter's data was replaced by a tensor that lies in memory in another order."""
    expected = spec.strides or row_major(spec.shape)
    if any(n > 1 and a != b for n, a, b in zip(tensor.shape, tensor.stride(), expected, strict=True)):
        raise UnsupportedError(
            f"expected '{spec.name}' to keep strides {expected}, by which kernels are chosen, "
            f"but its data was replaced by a tensor with {tensor.stride()}; "
            "copy the values in (param.data.copy_(value)), or change its memory format before outcore.prepare()"
        )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits; a NaN equals itself."""
    return not a.numel() or torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


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
