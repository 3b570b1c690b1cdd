"""Tensors over the bytes of a unit, in the layouts that its spec describes, and the dtypes of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import Parameter

from outcore.core.strides import row_major
from outcore.memory.arena import TEMPORARY, Buffer, Region
from outcore.optim.formats import codes_of, updated_in
from outcore.spec.layout import StateSpec, WeightsHome
from outcore.spec.model import ParamSpec, Part, UnitSpec
from outcore.torch_private import without_torch_function


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a spec's dtype name."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no dtype '{name}'")
    return dtype


def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with one NaN, or with the largest value of a dtype that has no NaN."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max
    return torch.full((1,), value, dtype=dtype, device=device)


class Views:
    """Views of a unit's buffers. They are made once per buffer, since buffers live as long as the unit."""

    def __init__(self, spec: UnitSpec, states: Mapping[str, StateSpec], cut: WeightsHome) -> None:
        """Args: states: States in the states home, by name. cut: Weights that rest with this rank."""
        self._own_parts = cut.own_parts
        self._spec, self._states, self._num_trainable = spec, states, len(spec.trainable)
        self._made: dict[tuple[str, Region], list[torch.Tensor]] = {}
        forms = [[s.forms[i] for s in states.values()] for i in range(len(spec.trainable))]
        named = [
            [form for form in own if form is not None and (form.name != "master" or form.format != "fp32")]
            for own in forms
        ]
        self.state_names = [tuple(form.name for form in own) for own in named]
        """Names of the states of every trainable parameter, without an fp32 master."""
        self.numbers = [
            tuple(form.name for form in own if form.is_number and not param.is_whole)
            for own, param in zip(named, spec.trainable, strict=True)
        ]
        """Names of states that are a single number, which a step reads before it begins.
        Empty for a parameter that is updated as a whole."""
        self.dtypes = [
            {name: torch_dtype(dtype) for name, dtype in updated_in(param).items()} if numbers else {}
            for param, numbers in zip(spec.trainable, self.numbers, strict=True)
        ]
        """Dtypes in which a parameter ("") and its states are updated. Empty for a parameter without ``numbers``."""
        self.codes = [codes_of(own, param.name) for own, param in zip(forms, spec.trainable, strict=True)]
        self.is_compact = [codes is not None and "master" in codes.formats for codes in self.codes]
        """Whether the master of a parameter stores only what its weight lacks."""

    def weights(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return views of all parameters over a buffer in the weights layout."""
        return self._once("weights", buffer, lambda: _shaped_views(self._spec, self._spec.weight_parts, buffer))

    def native(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return views of the trainable parameters' gradients over a bucket, or over another buffer in native form."""
        parts = self._spec.bucket_parts
        return self._once("native", buffer, lambda: _shaped_views(self._spec, parts, buffer))

    def flat(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return flat views (1D, in memory order) of the trainable parameters over a buffer in the weights layout."""
        parts = self._spec.weight_parts[: self._num_trainable]
        return self._once("flat", buffer, lambda: _flat_views(parts, buffer))

    def own(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return flat views (1D) of the elements that this rank updates, over the bytes that an update makes new."""
        return self._once("own", buffer, lambda: _flat_views(self._own_parts, buffer))

    def received(self, buffer: Buffer, sender: int) -> list[torch.Tensor]:
        """Return flat views (1D) of one sender's gradients of the same elements, over the gradients of all senders."""
        parts = self._spec.received_parts(sender)
        return self._once(f"received {sender}", buffer, lambda: _flat_views(parts, buffer))

    def bucket(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return the views of ``native`` as flat tensors (1D), in memory order."""
        return self.update(buffer) if self._spec.is_cut else self.flat(buffer)

    def update(self, buffer: Buffer) -> list[torch.Tensor]:
        """Return flat views (1D) of the trainable parameters over a buffer in the update layout."""
        return self._once("update", buffer, lambda: _flat_views(self._spec.update_parts, buffer))

    def state(self, buffer: Buffer, name: str) -> list[torch.Tensor]:
        """Return flat views (1D) of one state of the trainable parameters, over the states home or a copy of it."""
        state = self._states[name]
        return self._once(name, buffer, lambda: _flat_views(state.parts, buffer.part(state.start, state.stop)))

    def close(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self._made.clear()

    def _once(self, kind: str, buffer: Buffer, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        if buffer.region.arena == TEMPORARY:
            return make()
        key = (kind, buffer.region)
        views = self._made.get(key)
        if views is None:
            with torch.inference_mode(mode=False):  # the views outlive the mode in which they are first asked for
                views = self._made[key] = make()
        return views


def _shaped_views(spec: UnitSpec, parts: Sequence[Part], buffer: Buffer) -> list[torch.Tensor]:
    pairs = zip(spec.params, parts, strict=False)  # gradients have fewer parts than there are parameters
    return [buffer.tensor(torch_dtype(part.dtype), p.shape, part.offset, p.strides) for p, part in pairs]


def _flat_views(parts: Sequence[Part], buffer: Buffer) -> list[torch.Tensor]:
    return [buffer.tensor(torch_dtype(part.dtype), (part.numel,), part.offset) for part in parts]


def outermost_first(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Permute a tensor of the parameter's shape so that its dimensions are in the parameter's memory order."""
    return tensor if spec.strides is None else tensor.permute(spec.order)


def flat(spec: ParamSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape as a flat one (1D), in memory order. See [Note: strides]."""
    return outermost_first(spec, tensor).reshape(-1)


def own_slice(spec: UnitSpec, index: int, values: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank updates, of a whole trainable parameter (1D)."""
    first, numel = spec.own_ranges[index]
    return values[first : first + numel]


def shaped(spec: ParamSpec, flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor that ``flat`` made with the parameter's shape and strides."""
    return flat.view(spec.shape) if spec.strides is None else flat.as_strided(spec.shape, spec.strides)


class GradientForm:
    """Dtypes and shapes of the gradients of one unit's trainable parameters."""

    def __init__(self, params: Sequence[Parameter], specs: Sequence[ParamSpec], *, is_cut: bool) -> None:
        """Args: params, specs: The trainable parameters and their specs. is_cut: See ``UnitSpec``."""
        self._native_dtypes = [torch_dtype(spec.dtype) for spec in specs]
        self.update_dtypes = [torch_dtype(spec.update_dtype) for spec in specs]
        self._given = [(param, param.grad_dtype) for param in params if hasattr(param, "grad_dtype")]
        # p.grad has the dtype of the accumulated gradient. So clipping takes the norms of a mixed model together, as it
        # does over fp32 accumulators. A torch version without grad_dtype insists on the parameter's own dtype.
        dtypes = [_grad_dtype(param, spec) for param, spec in zip(params, specs, strict=True)]
        self.likes = [
            torch.empty_strided(spec.shape, spec.strides or row_major(spec.shape), dtype=dtype, device="meta")
            for spec, dtype in zip(specs, dtypes, strict=True)
        ]
        self._is_exact = self._native_dtypes == self.update_dtypes
        # Gradients in native and in update form are the same bytes.
        self.is_one = self._is_exact or is_cut

    def native(self, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Cast gradients to the parameters' dtypes if needed: torch's RMSNorm gives fp32 gradients for bf16 weights."""
        return grads if self._is_exact else {i: g.to(self._native_dtypes[i]) for i, g in grads.items()}

    def give_back(self) -> None:
        """Let gradients have the dtypes again that autograd gave them before."""
        with without_torch_function():
            for param, dtype in self._given:
                param.grad_dtype = dtype


def _grad_dtype(param: Parameter, spec: ParamSpec) -> torch.dtype:
    if spec.dtype == spec.update_dtype or not hasattr(param, "grad_dtype"):
        return torch_dtype(spec.dtype)
    param.grad_dtype = None  # any dtype: autograd no longer rounds to the parameter's, see GradientForm.native
    return torch_dtype(spec.update_dtype)
