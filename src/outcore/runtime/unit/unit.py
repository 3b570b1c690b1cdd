"""A unit at run time: its module and parameters, the homes of its bytes, and what has been submitted for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from outcore.device.lanes import Handle
from outcore.memory.arena import TEMPORARY, Buffer, Region
from outcore.order.ledger import Ledger
from outcore.runtime.unit.absent import AbsentParameter, Owner, absent_class, watched_class
from outcore.spec.model import ParamSpec, Part, UnitSpec, row_major


def _grad_dtype(param: Parameter, spec: ParamSpec) -> torch.dtype:
    if spec.dtype == spec.update_dtype or not hasattr(param, "grad_dtype"):
        return torch_dtype(spec.dtype)
    param.grad_dtype = None  # any: autograd no longer rounds to the parameter's dtype, see Unit.in_own_dtype
    return torch_dtype(spec.update_dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a spec's dtype name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no dtype '{name}'")
    return dtype


class Unit:
    """State of one unit. Bookkeeping only; the bytes are moved by ``Weights``, ``Gradients`` and ``Updates``.

    Attributes:
        ledger: Where its bytes live, and which operations wrote and read them last.
    """

    def __init__(self, ledger: Ledger[Handle], module: nn.Module, params: list[Parameter], owner: Owner) -> None:
        """Args: params: In the spec's order. owner: Answers for absent parameters."""
        self.ledger, self.module, self.params = ledger, module, params
        spec = self.spec = ledger.spec
        self.plan = ledger.plan
        self.name = spec.name  # of the module, fully qualified; "" for the root
        self.label = spec.name or "root"  # for people
        self.num_trainable = len(spec.trainable)  # they come first in ``params``
        self.modules = list(module.modules()) if spec.name else []
        self.absent_class: type[AbsentParameter] = absent_class(owner)
        self.steps = [0] * len(spec.trainable)
        self.weights_version = 0  # counts changes, so that a backward notices that these are not its forward's weights
        self.states_version = 0  # counts changes by anybody but an update
        self.num_bound = 0
        self.is_gathered = False
        self.num_lent = 0  # parameters that have values of their own for a moment, for a state dict
        # What a user may have done to present parameters, see [Note: edits].
        self.is_present = False
        self.versions: list[int] = []
        self.touched: set[int] = set()
        self._present_class = Parameter if ledger.is_resident and not ledger.has_master else watched_class(self.touched)
        # Views are made once per buffer; buffers live as long as the unit.
        self._absent_views: dict[torch.device, list[torch.Tensor]] = {}
        self._views: dict[tuple[str, Region], list[torch.Tensor]] = {}
        self._native_dtypes = [torch_dtype(p.dtype) for p in spec.trainable]
        self.update_dtypes = [torch_dtype(p.update_dtype) for p in spec.trainable]
        # What p.grad says: the dtype of the accumulated gradient. So clipping takes the norms of a mixed model
        # together, as it does over fp32 accumulators. A torch without grad_dtype insists on the parameter's own.
        self.grad_dtypes = [_grad_dtype(p, s) for p, s in zip(params, spec.trainable, strict=False)]
        self.grad_likes = [
            torch.empty_strided(s.shape, s.strides or row_major(s.shape), dtype=d, device="meta")
            for s, d in zip(spec.trainable, self.grad_dtypes, strict=True)
        ]
        # Native and update form of gradients are the same bytes.
        self.has_one_layout = all(p.dtype == p.update_dtype for p in spec.trainable)

    def in_own_dtype(self, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients as autograd makes them for parameters of these dtypes: torch's RMSNorm gives fp32 for bf16."""
        return grads if self.has_one_layout else {i: g.to(self._native_dtypes[i]) for i, g in grads.items()}

    @property
    def is_updated_on_host(self) -> bool:
        """Whether worker threads update it."""
        return self.plan.states != "device" and self.plan.update == "host"

    def device_buffer(self) -> Buffer | None:
        """Where the weights are on the device now, if they are."""
        ledger = self.ledger
        place = ledger.weights if ledger.is_resident else ledger.slot
        return None if place is None else place.memory

    def weight_views(self, buffer: Buffer) -> list[torch.Tensor]:
        """All parameters over a buffer in the weights layout."""
        return self._cached("weights", buffer, lambda: weight_views(self.spec, buffer, len(self.params)))

    def native_views(self, buffer: Buffer) -> list[torch.Tensor]:
        """Gradients of the trainable parameters over a bucket, or another buffer in native form."""
        return self._cached("native", buffer, lambda: weight_views(self.spec, buffer, self.num_trainable))

    def flat_views(self, buffer: Buffer) -> list[torch.Tensor]:
        """``native_views`` as flat tensors (1D), in the order in which elements lie in memory."""
        return self._cached("flat", buffer, lambda: flat_views(self.spec.weight_parts[: self.num_trainable], buffer))

    def update_views(self, buffer: Buffer) -> list[torch.Tensor]:
        """Trainable parameters as flat tensors (1D) over a buffer in the update layout."""
        return self._cached("update", buffer, lambda: flat_views(self.spec.update_parts, buffer))

    def state_views(self, buffer: Buffer, name: str) -> list[torch.Tensor]:
        """One state of the trainable parameters (1D each) over the states home or a copy of it."""
        state = self.ledger.state_specs[name]
        return self._cached(name, buffer, lambda: flat_views(state.parts, buffer.part(state.start, state.stop)))

    def _cached(self, kind: str, buffer: Buffer, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        if buffer.region.arena == TEMPORARY:
            return make()
        key = (kind, buffer.region)
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(mode=False):  # they outlive the mode in which they are asked for first
                views = self._views[key] = make()
        return views

    def point_at(self, buffer: Buffer | None) -> None:
        """Make the parameters present: views into ``buffer`` (None: the unit has no bytes at all)."""
        if buffer is None:
            views = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.params]
        else:
            views = self.weight_views(buffer)
        for param, view in zip(self.params, views, strict=True):
            param.__class__ = Parameter
            param.data = view
        if self._present_class is not Parameter:
            for i, param in enumerate(self.params):
                param.__class__ = self._present_class
                param.place = i  # type: ignore[attr-defined]
        self.is_present = True
        self.note_versions()

    def note_versions(self) -> None:
        """Edits up to here are known."""
        self.touched.clear()
        self.versions = [p._version for p in self.params] if self.ledger.is_resident else []

    def edited_since_noted(self) -> list[int]:
        """Parameters of a resident unit that were changed in place since ``note_versions``."""
        return [i for i, version in enumerate(self.versions) if self.params[i]._version != version]

    def note_change(self, index: int) -> None:
        """A parameter's bytes were changed under it: autograd is told, and it is no edit of the user's."""
        torch.autograd.graph.increment_version(self.params[index])
        if self.versions:
            self.versions[index] = self.params[index]._version

    def mark_absent(self, *, device: torch.device | None = None) -> None:
        """Make the parameters absent. With ``device`` their bytes are replaced by a NaN there, else left in place."""
        self.is_present = False
        if device is not None:
            if device not in self._absent_views:
                self._absent_views[device] = [absent_view(spec, device) for spec in self.spec.params]
            for param, view in zip(self.params, self._absent_views[device], strict=True):
                param.__class__ = Parameter
                param.data = view
        for param in self.params:
            param.__class__ = self.absent_class

    def forget(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self._views.clear()
        self._absent_views.clear()
        self.ledger.let_go()


def absent_view(spec: ParamSpec, device: torch.device) -> torch.Tensor:
    """A view of one NaN with the parameter's shape and no strides: a few bytes whatever the shape."""
    with torch.inference_mode(mode=False):
        nan = torch.full((1,), float("nan"), dtype=torch_dtype(spec.dtype), device=device)
        return nan.as_strided(spec.shape, (0,) * len(spec.shape))


def weight_views(spec: UnitSpec, buffer: Buffer, count: int) -> list[torch.Tensor]:
    """The first ``count`` parameters as tensors over a buffer in the weights layout."""
    pairs = list(zip(spec.params, spec.weight_parts, strict=True))[:count]
    return [buffer.tensor(torch_dtype(part.dtype), p.shape, part.offset, p.strides) for p, part in pairs]


def flat_views(parts: Sequence[Part], buffer: Buffer) -> list[torch.Tensor]:
    """The parts of a layout as flat tensors (1D) over a buffer."""
    return [buffer.tensor(torch_dtype(part.dtype), (part.numel,), part.offset) for part in parts]


def outermost_first(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, its dimensions in the order in which the parameter's lie in memory."""
    return tensor if spec.strides is None else tensor.permute(spec.order)


def flat(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape as a flat one (1D), in the order of memory. See [Note: strides]."""
    return outermost_first(spec, tensor).reshape(-1)


def shaped(spec: ParamSpec, flat: torch.Tensor) -> torch.Tensor:
    """What ``flat`` made, with the parameter's shape and strides."""
    return flat.view(spec.shape) if spec.strides is None else flat.as_strided(spec.shape, spec.strides)
