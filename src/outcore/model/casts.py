"""Casts that autocast makes of weights. They need not be kept, since the weight is there when backward comes."""

from __future__ import annotations

from typing import NamedTuple

import torch


def cast_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf of which a tensor is a cast, or a view of one; None if it is neither, or needs no gradient."""
    whole = tensor if tensor._base is None else tensor._base
    node = whole.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf: torch.Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    is_like = leaf is not None and (leaf.device, leaf.stride()) == (whole.device, whole.stride())
    return leaf if is_like else None


class Autocast(NamedTuple):
    """The state of autocast on one kind of device."""

    device_type: str
    dtype: torch.dtype
    is_on: bool

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """Return the state around the caller."""
        kind = device.type
        return cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def again(self) -> torch.autocast:
        """Return a context in which autocast is as it was."""
        return torch.autocast(self.device_type, self.dtype, enabled=self.is_on)

    def off(self) -> torch.autocast:
        """Return a context in which nothing is cast."""
        return torch.autocast(self.device_type, enabled=False)
