"""Edits of weights that live on the device: changed in place, they are where the next update starts.

[Note: edits] A plain loop keeps an edit. Here the update of a unit may start from master weights elsewhere, so before
each step the masters of edited weights follow them: elements that still are the rounded master keep it, the others
become what the weight says. Edits are seen by version counter, by a changed address, and by ``p.data`` having been
asked for (which has a version counter of its own).
"""

from __future__ import annotations

import torch

from outcore.core.errors import UnsupportedError
from outcore.runtime.absent import requires_grad_refusal
from outcore.runtime.access import Access
from outcore.runtime.device import Device
from outcore.runtime.unit import Unit, torch_dtype
from outcore.spec.model import ParamSpec, row_major


@torch.no_grad()
def take_edits(unit: Unit, access: Access, device: Device) -> None:
    """Make what a user did to the weights of a resident unit count. Does nothing while they are absent or gathered.

    Raises:
        UnsupportedError: ``requires_grad``, shape or dtype of a parameter was changed.
    """
    buffer = unit.device_buffer()
    if not unit.is_resident or not unit.is_present or unit.is_gathered or unit.num_lent or buffer is None:
        return
    is_moved = False
    for i, (param, view) in enumerate(zip(unit.params, unit.weight_views(buffer), strict=True)):
        if param.requires_grad is not unit.spec.params[i].requires_grad:
            raise UnsupportedError(requires_grad_refusal(unit.spec.params[i].name, wanted=param.requires_grad))
        if param.data_ptr() != view.data_ptr():
            is_moved = True
            device.compute(f"edit of {unit.label}", writes=[buffer.region])
            refuse_other_form(unit.spec.params[i], param)
            refuse_other_strides(unit.spec.params[i], param)
            view.copy_(param)
        elif param._version == unit.versions[i] and i not in unit.touched:
            continue
        unit.weights_version += 1
        if unit.has_master and i < unit.num_trainable:
            access.write_master(unit, i, access.read_weight(unit, i))
    if is_moved:
        unit.point_at(buffer)
    unit.note_versions()


def refuse_other_form(spec: ParamSpec, tensor: torch.Tensor) -> None:
    """Raise if a parameter's data was replaced by something of another shape or dtype, as resizing embeddings does."""
    if tensor.shape != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
        raise UnsupportedError(
            f"expected '{spec.name}' to keep shape {spec.shape} and dtype {spec.dtype}, but its data was replaced by "
            f"{tuple(tensor.shape)} "
            f"{tensor.dtype}; resize embeddings and change the model before outcore.prepare()"
        )


def refuse_other_strides(spec: ParamSpec, tensor: torch.Tensor) -> None:
    """Raise if a parameter's data was replaced by something that lies in memory in another order."""
    expected = spec.strides or row_major(spec.shape)
    if any(n > 1 and a != b for n, a, b in zip(tensor.shape, tensor.stride(), expected, strict=True)):
        raise UnsupportedError(
            f"expected '{spec.name}' to keep strides {expected}, by which kernels are chosen, but its data was "
            f"replaced by a tensor with {tensor.stride()}; copy the values in (param.data.copy_(value)), or "
            "change its memory format before outcore.prepare()"
        )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits; a NaN equals itself."""
    return not a.numel() or torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
