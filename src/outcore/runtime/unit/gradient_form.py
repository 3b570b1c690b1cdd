"""Which dtypes the gradients of a unit have: as autograd makes them, and as they are accumulated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from outcore.runtime.unit.views import torch_dtype
from outcore.spec.model import ParamSpec, row_major


class GradientForm:
    """Of the trainable parameters of one unit."""

    def __init__(self, params: Sequence[Parameter], specs: Sequence[ParamSpec]) -> None:
        """Args: params, specs: Of the trainable parameters."""
        self._native_dtypes = [torch_dtype(spec.dtype) for spec in specs]
        self.update_dtypes = [torch_dtype(spec.update_dtype) for spec in specs]
        # What p.grad says: the dtype of the accumulated gradient. So clipping takes the norms of a mixed model
        # together, as it does over fp32 accumulators. A torch without grad_dtype insists on the parameter's own.
        dtypes = [_grad_dtype(param, spec) for param, spec in zip(params, specs, strict=True)]
        self.likes = [
            torch.empty_strided(spec.shape, spec.strides or row_major(spec.shape), dtype=dtype, device="meta")
            for spec, dtype in zip(specs, dtypes, strict=True)
        ]
        # Native and update form are the same bytes.
        self.is_one = self._native_dtypes == self.update_dtypes

    def native(self, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients as autograd makes them for parameters of these dtypes: torch's RMSNorm gives fp32 for bf16."""
        return grads if self.is_one else {i: g.to(self._native_dtypes[i]) for i, g in grads.items()}


def _grad_dtype(param: Parameter, spec: ParamSpec) -> torch.dtype:
    if spec.dtype == spec.update_dtype or not hasattr(param, "grad_dtype"):
        return torch_dtype(spec.dtype)
    param.grad_dtype = None  # any: autograd no longer rounds to the parameter's dtype, see GradientForm.native
    return torch_dtype(spec.update_dtype)
