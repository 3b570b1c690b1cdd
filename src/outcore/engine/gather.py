"""Whole parameters for the length of a block: read them, or change them and have them written home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from outcore.engine.activations.saved import KeptTensor, version_of
from outcore.engine.streamed_weights import StreamedWeights
from outcore.engine.unit.unit import Beneath, Unit
from outcore.engine.unit.views import torch_dtype
from outcore.engine.values.access import ValueAccess
from outcore.engine.values.parameter_values import refuse_other_form, refuse_other_strides, same_bytes, take_edits
from outcore.torch_private import is_packing


@contextmanager
def gathered_units(
    access: ValueAccess, weights: StreamedWeights, units: Sequence[Unit], *, write: bool
) -> Iterator[None]:
    """Give all parameters of ``units`` their values on the device.

    Args:
        access: Reads and writes single weights.
        weights: Let units rest at the end.
        units: Those that are gathered already stay so after the block.
        write: Write changed parameters home at the end, masters too; else changes are lost.

    Memory: device, all weights of the units, outside of the arena, until the end.
    """
    weights.run.refuse_if_closed()
    mine = [u for u in units if u.presence.now is not Beneath.GATHERED]
    try:
        for unit in mine:
            take_edits(unit, access)
            device = access.device.torch_device
            unit.presence.gather([access.current_weight(unit, i).to(device) for i in range(len(unit.params))])
        with _values_are_saved(units):
            yield
        if write:
            for unit in units:
                _write_changed(access, unit)
    finally:
        for unit in mine:
            if unit.presence.now is Beneath.GATHERED:  # else it was cut short, or closed
                edited = unit.presence.watch.edited()
                weights.rest(unit)
                for index in edited:  # a graph made inside must not be walked with the weights that come back
                    unit.presence.watch.note_change(index)


def _values_are_saved(units: Sequence[Unit]) -> AbstractContextManager[Any]:
    """Return hooks under which graphs save tensors that keep their values after the block.

    Autograd would save a parameter itself, and its data is a view of a NaN then. No hooks are needed if all weights
    live on the device. Active hooks (of a unit's call, a checkpoint, an outer block) own what is saved, and stay so.
    """
    if is_packing() or all(unit.ledger.cut.is_resident for unit in units):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: KeptTensor(tensor.detach(), version_of(tensor)), lambda kept: kept.unchanged("gathered")
    )


@torch.no_grad()
def _write_changed(access: ValueAccess, unit: Unit) -> None:
    for i, param in enumerate(unit.params):
        spec = unit.spec.params[i]
        refuse_other_form(spec, param.data.to(torch_dtype(spec.dtype)))
        refuse_other_strides(spec, param)
        if not same_bytes(access.read_weight(unit, i), param.data.to("cpu")):
            access.write_weight(unit, i, param.data)
