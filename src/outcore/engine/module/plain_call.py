"""A call of a unit in a plain plan. It does as little as the plain loop. See [Note: plain plans].

A call that keeps its activations is the module's own forward. One that finds no room for them is recomputed as in any
other plan, and gives its gradients to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from outcore.engine.module.call import UnitCall
from outcore.engine.recompute.structure import in_training, take_apart
from outcore.spec.schedule import Phase
from outcore.torch_private import as_it_is, is_packing, pytree


class PlainCall(UnitCall):
    """Stands in for ``module.forward`` of a unit whose bytes are always where autograd wants them."""

    _why_once = (
        "double backward through units that may be recomputed is not supported; give the units the policy keep in the "
        "plan, which follows it where everything lives on the device"
    )

    @as_it_is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as it is, if what it saves is known to fit."""
        # Saved-tensor hooks around the unit, such as those of a checkpoint, own what is saved.
        if self._policy.keeps_all or not torch.is_grad_enabled() or is_packing():
            return self._run_as_it_is(args, kwargs)
        if self._weights.has_steps:
            args, kwargs = in_training(args, kwargs, self._where)
        lease = self._policy.lease(args, kwargs)
        if lease is None:
            return super().__call__(*args, **kwargs)

        def in_backward(*_: object) -> None:
            self._refuse_always()  # as in a recomputed call: what is refused must not depend on room
            lease.give_back_in_backward()

        result = self._run_as_it_is(args, kwargs)
        tensors: Sequence[torch.Tensor] = (result,)
        given: Sequence[Any] = (*args, *kwargs.values())
        if not isinstance(result, torch.Tensor):
            tensors = take_apart(result, self._where, are_results=True)[0]
            given = pytree.tree_leaves(given)
        passed = set(map(id, given))  # arguments that the block returns: others have made their graph
        for tensor in tensors:  # the graph owns the lease
            if tensor.grad_fn is not None and id(tensor) not in passed:
                tensor.grad_fn.register_prehook(in_backward)
        return result

    def _run_as_it_is(self, args: Any, kwargs: Any) -> Any:
        if self._weights.run.refusal is not None:
            raise self._weights.run.refusal
        if not self._device.recorder.is_on and not self.unit.presence.is_taken:
            return self._forward(*args, **kwargs)
        with self._bound(Phase.FORWARD if torch.is_grad_enabled() else Phase.INFERENCE):
            return self._forward(*args, **kwargs)

    def _bound(self, phase: Phase) -> AbstractContextManager[None]:
        recorder = self._device.recorder
        timed = recorder.compute(f"{phase.value} {self.unit.label}") if recorder.is_on else nullcontext()
        return self._weights.saved.given_back(self.unit, timed) if self.unit.presence.is_taken else timed
