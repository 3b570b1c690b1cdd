"""Whole parameters for a while: read them, or change them and have them written home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from outcore.runtime.unit.unit import Unit, torch_dtype
from outcore.runtime.values.edits import refuse_other_form, refuse_other_strides, same_bytes, take_edits

if TYPE_CHECKING:
    from outcore.runtime.engine import Engine


@contextmanager
def gathered_units(engine: Engine, units: Sequence[Unit], *, write: bool) -> Iterator[None]:
    """Give all parameters of ``units`` their values on the device.

    Args:
        engine: Of the units.
        units: Not yet gathered, not being called.
        write: Write changed parameters home at the end, masters too. Without, changes are lost.

    Memory: device, all weights of the units, outside of the arena, until the end.
    """
    engine.refuse_if_closed()
    mine = [u for u in units if not u.is_gathered]
    try:
        for unit in mine:
            take_edits(unit, engine.access)
            for i, param in enumerate(unit.params):
                value = engine.access.read_weight(unit, i).to(engine.device.torch_device)
                param.__class__ = Parameter
                param.data = value
            unit.is_gathered = True
        yield
        if write:
            for unit in units:
                _write_changed(engine, unit)
    finally:
        for unit in mine:
            edited = unit.edited_since_noted()
            unit.is_gathered = False
            engine.weights.rest(unit)
            for index in edited:  # a graph made inside must not be walked with the weights that come back
                unit.note_change(index)


@torch.no_grad()
def _write_changed(engine: Engine, unit: Unit) -> None:
    for i, param in enumerate(unit.params):
        spec = unit.spec.params[i]
        refuse_other_form(spec, param.to(torch_dtype(spec.dtype)))
        refuse_other_strides(spec, param)
        if not same_bytes(engine.access.read_weight(unit, i), param.data.to("cpu")):
            engine.access.write_weight(unit, i, param.data)
