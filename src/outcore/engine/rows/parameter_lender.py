"""The root's parameters, lent to pieces of a batch: the gradient of each piece is a micro-batch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.unit.absent import AbsentParameter
from outcore.engine.unit.unit import Unit
from outcore.torch_private import is_executed


class ParameterLender:
    """Lends parameters of the root. Without it autograd would sum over pieces, in the dtype of the parameter."""

    def __init__(self, unit: Unit, gradients: BackwardGradients | None) -> None:
        """Args: unit: The root. gradients: Takes the gradient of each piece; None: autograd takes it."""
        self._unit, self._gradients = unit, gradients
        self._trainable = unit.params[: unit.num_trainable]
        self._indices = {id(p): i for i, p in enumerate(self._trainable)}
        # Tells an ordinary backward() from one for chosen inputs.
        self._anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node

    def lent_to(self, modules: Sequence[nn.Module]) -> Callable[[], Any]:
        """Return what opens a context in which the modules have stand-ins for their trainable parameters."""
        places = [
            (module._parameters, name, self._indices[id(param)])
            for module in modules
            for name, param in module._parameters.items()
            if id(param) in self._indices
        ]

        @contextmanager
        def lent() -> Iterator[None]:
            own = [slots[name] for slots, name, _ in places]
            try:
                for slots, name, index in places:
                    param = self._trainable[index]
                    if isinstance(param, AbsentParameter):
                        param.owner.make_present()  # not inside of ``apply``, where it would count as evaluation
                    if param.requires_grad:
                        slots[name] = _LentParameter.apply(self, index, self._anchor, param)
                yield
            finally:
                for (slots, name, _), before in zip(places, own, strict=True):
                    slots[name] = before

        return lent

    def take(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of one piece. Returns what autograd itself must accumulate."""
        param = self._trainable[index]
        if not param.requires_grad:  # frozen since forward
            return None
        if self._gradients is None or not is_executed(self._anchor_node) or param._backward_hooks:
            return grad
        self._gradients.deposit(self._unit, self._unit.gradient_form.native({index: grad}))
        return None


class _LentParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lender: ParameterLender, index: int, _: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        ctx.lender, ctx.index = lender, index
        ctx.set_materialize_grads(False)
        return param.detach()  # shares the version counter: an edit before backward is noticed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None, None, None, None if grad is None else ctx.lender.take(ctx.index, grad)
