"""A call that is recomputed from more than what autograd keeps: from arguments that left, and selected results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.device.lanes import Handle
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.engine.activations.saved import KeptTensor, drop_saved
from outcore.engine.activations.saving import SavingBase
from outcore.engine.activations.selection import Selection
from outcore.order.activations import SavedCall


class RecomputeWithSaved(SavingBase):
    """Keeps nothing of the graph: the block runs again, from its arguments and from what was selected."""

    is_kept, may_drop = False, True

    def __init__(
        self, tensors: Sequence[torch.Tensor], selection: Selection | None, away: OffloadedCall | None, where: str
    ) -> None:
        """Args: tensors: The call's arguments. away: Sends what is saved; None: it stays on the device."""
        self._tensors, self._selection, self._away, self._where = tensors, selection, away, where
        self._packed: Sequence[tuple[Any, bool]] = ()
        self._call: SavedCall[Handle] | None = None
        self.has_arguments = False

    @property
    def is_needed(self) -> bool:
        """Whether it has saved something."""
        return self._selection is not None or self._away is not None

    def hooks(self) -> Any:
        """See ``Saving``."""
        hooks = drop_saved(self._where)
        return hooks if self._selection is None else _Both(hooks, self._selection.forward())

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> None:
        """See ``Saving``."""
        tensors, self._tensors = self._tensors, ()
        away = self._away
        if self._selection is not None:
            is_whole = self._selection.end(made, self._kept if away is None else away.put)
            self._selection = self._selection if is_whole else None
        if away is None:
            return
        self._packed = [(away.put(tensor), tensor.is_leaf) for tensor in tensors]
        if not away.fits:
            away.say_too_large()
            self._selection = None
            away.begin_again()
            self._packed = [(away.put(tensor), tensor.is_leaf) for tensor in tensors]
        if away.fits:
            self.has_arguments = True
            self._call = away.end_forward(owner)
        else:
            self._away = None

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return no results: recompute makes them again."""
        return ()

    def begin_backward(self) -> None:
        """See ``Saving``."""
        if self._away is not None:
            self._away.begin_backward(self._call)

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See ``Saving``."""
        return [self._argument(*packed) for packed in self._packed] if self.has_arguments else saved

    def again(self, hooks: Any) -> Any:
        """See ``Saving``."""
        return hooks if self._selection is None else _Both(hooks, self._selection.again(self._give))

    def release(self) -> None:
        """See ``Saving``."""
        self._selection, self._packed = None, ()

    def end_backward(self, *, is_over: bool) -> None:
        """See ``Saving``."""
        if self._away is not None:
            self._away.end_backward(self._call, is_over=is_over)

    def _argument(self, packed: Any, was_leaf: bool) -> torch.Tensor:  # noqa: FBT001
        """Return an argument. It is a leaf only if it was one: autocast treats leaves differently."""
        tensor = self._give(packed)
        if was_leaf or not tensor.is_leaf or tensor.layout is not torch.strided:  # torch makes no views of others
            return tensor
        with torch.enable_grad():
            return tensor.detach().requires_grad_().view_as(tensor)

    def _kept(self, tensor: torch.Tensor) -> KeptTensor:
        return KeptTensor(tensor.detach(), tensor._version)

    def _give(self, packed: Any) -> torch.Tensor:
        if self._away is not None:
            return self._away.give(packed)
        return packed.unchanged(self._where)


class _Both:
    """Two contexts as one, entered where this one is."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._outer.__exit__(*error)
