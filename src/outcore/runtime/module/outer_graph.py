"""How a block stands in the outer graph: one node, and what its backward needs to know of the forward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.runtime.activations.saved import version_of
from outcore.runtime.activations.saving import Graph, Saving
from outcore.runtime.module.checks import Summary
from outcore.runtime.module.replay import ForwardState
from outcore.runtime.module.structure import Structure


@dataclass(eq=False)
class Call:
    """What backward needs to know of one forward."""

    inputs: Structure
    wants_grad: list[bool]
    foreign: list[torch.Tensor]
    shapes: list[torch.Size]
    outputs: list[torch.Tensor]
    """Only until they were handed to the outer graph."""
    weights_version: int
    state: ForwardState | None = None
    graph: Graph | None = None
    watched: list[int] = field(default_factory=list)
    """Results that must not be changed in place outside."""
    returned: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Those, as they were handed out, and their versions then."""
    foreign_versions: list[int] = field(default_factory=list)
    recording: Mapping[str, Any] | None = None
    summary: Summary | None = None
    """Of all results, where recompute is to be held against them."""
    edited: list[int] = field(default_factory=list)
    """Parameters that forward itself may have changed, before a recompute."""
    flags: list[bool] = field(default_factory=list)
    """Which of the unit's parameters needed a gradient."""
    used: list[bool] = field(default_factory=list)
    """Which of the arguments get one: autograd would come to the others with None, where a plain loop does not."""
    saving: Saving | None = None
    """What has the activations that the graph needs."""
    kind: Hashable = None
    """Of the arguments, where a recompute may have to be counted."""

    @property
    def needs_arguments(self) -> bool:
        """Whether it is recomputed from arguments that autograd keeps."""
        return self.state is not None and (self.saving is None or not self.saving.has_arguments)

    def release(self) -> None:
        """Let go of what a backward needs: this object lives as long as the loss does."""
        if self.saving is not None:
            self.saving.release()
        self.graph = self.state = self.saving = None
        self.returned = []

    def refuse_changes(self, where: str) -> None:
        """Raise if a tensor that backward needs was changed in place outside."""
        if any(tensor._version != version for tensor, version in self.returned):
            raise UnsupportedError(f"a result of {where} was changed in place after the call; change a copy instead")
        if [version_of(t) for t in self.foreign] != self.foreign_versions:
            raise UnsupportedError(
                f"{where}: a tensor that it captured was changed in place after the call; change a copy instead"
            )


class UnitFunction(torch.autograd.Function):
    """Stands for a whole block in the outer graph."""

    @staticmethod
    def forward(
        ctx: Any, unit_call: Any, call: Call, saved: Sequence[torch.Tensor], anchor: torch.Tensor, *_: torch.Tensor
    ) -> Any:
        """Hand the results of the inner graph to the outer one."""
        ctx.unit_call, ctx.call = unit_call, call
        # An undefined gradient stays None: a zero would make the optimizer step unused parameters.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        # `.data`: no view relation, which would forbid later in-place changes of outputs of a multi-output function.
        results = tuple(t.data for t in call.outputs)
        # Detached: they share memory and version counter, and no node.
        returned = [(t.detach(), t._version) for t in (results[i] for i in call.watched)]
        call.returned = returned if call.saving is None else call.saving.returned(returned)
        call.outputs.clear()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the inner backward."""
        try:
            found = ctx.unit_call.backward(ctx, ctx.call, ctx.saved_tensors, grads)
        except BaseException:
            ctx.unit_call.break_off()
            raise
        return (None, None, None, None, *found)
