"""What one call does with what autograd saves: it keeps, drops or sends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.device.lanes import Handle
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.engine.activations.room import Lease
from outcore.engine.activations.saved import (
    KeptTensor,
    OffloadedArgument,
    drop_saved,
    free_values,
    save_weights_by_place,
    storage_of,
    without_values,
)
from outcore.engine.activations.selection import Selection
from outcore.engine.unit.unit import Unit
from outcore.order.activations import SavedCall

Graph = tuple[Sequence[torch.Tensor], Sequence[Any]]
"""The arguments inside of the block, and its results or their edges in the graph."""


class CallSaving:
    """What one call does with what autograd saves. Room that it has taken is given back with the object.

    There are three kinds: it is kept, dropped, or sent off the device. This base does what most of them do.
    """

    is_kept = True
    """Whether, as it looks now, backward walks the graph of forward; else it runs the block again."""
    may_drop = True
    """Whether the call may be recomputed."""
    has_arguments = False
    """Whether this object has the call's arguments in backward; else autograd keeps them. Known after forward."""

    @property
    def is_needed(self) -> bool:
        """Whether backward needs this object. Known after forward."""
        return True

    def hooks(self) -> Any:
        """Return the hooks to run the block under, with its weights bound."""
        raise NotImplementedError

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """End forward. Returns what backward begins with; None: the call is recomputed.

        Args:
            inner: The arguments inside of the block.
            made: Results with a gradient.
            owner: Lives as long as a backward may come.
        """
        return inner, edges_of(made)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results that must not be changed in place outside."""
        return ()

    def returned(
        self, watched: list[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Take results as they were handed out. Returns those that the call must watch.

        Args:
            watched: Watched ones, and their versions then.
            results: All.
        """
        return watched

    def begin_backward(self) -> None:
        """Begin a backward: the graph is walked now."""

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the arguments of a recomputed call. Args: saved: What autograd has kept of them."""
        return saved

    def recompute_hooks(self, hooks: Any) -> Any:
        """Return the context in which the block runs again. Args: hooks: A context that is entered, too."""
        return hooks

    def release(self) -> None:
        """Free what the graph is made from: it was made for the last time."""

    def end_backward(self, *, is_over: bool) -> None:
        """End a backward: the graph was walked. Args: is_over: Whether it will not be walked again."""


class KeepGraph(CallSaving):
    """Keeps the whole graph."""

    may_drop = False

    def __init__(self, unit: Unit, lease: Lease | None, saved: Sequence[bool] | None, where: str) -> None:
        """Keep the graph of one call, or of all calls without a lease.

        Args:
            unit: The unit.
            lease: The bytes that the graph takes; None: they are not counted.
            saved: Whether the graph of an earlier call of this kind has saved each of its results; None: not known.
            where: For errors.
        """
        self._unit, self._lease, self._saved, self._where = unit, lease, saved, where
        self._inside: list[torch.Tensor | None] = []
        """For each result that is not watched, its version inside of the block."""
        self._others: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Versions of these results, inside and outside, and the number outside when they were handed out."""

    def hooks(self) -> Any:
        """See ``CallSaving``."""
        return save_weights_by_place(self._unit, self._where)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results that the graph needs unchanged. All, if the earlier call had not as many."""
        saved = self._saved
        if saved is None or len(saved) != len(made):
            return range(len(made))
        self._inside = [None if is_saved else _counter_of(t) for t, is_saved in zip(made, saved, strict=True)]
        return [i for i, is_saved in enumerate(saved) if is_saved]

    def returned(
        self, watched: list[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Return what is watched without its memory, for versions alone: later calls may send the memory away."""
        pairs = zip(self._inside, results, strict=False)
        self._others = [(inside, _counter_of(t), t._version) for inside, t in pairs if inside is not None]
        return [(_counter_of(tensor), version) for tensor, version in watched]

    def begin_backward(self) -> None:
        """Let autograd know of results that were changed in place: unlike earlier calls, this one may have saved them.

        The results inside of the block have other version counters than those outside.
        """
        for inside, outside, version in self._others:
            if outside._version != version:
                torch.autograd.graph.increment_version(inside)


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that shares the version counter."""
    alias = tensor.detach()
    if storage_of(alias):
        free_values(alias)
    return alias


def edges_of(made: Sequence[torch.Tensor]) -> list[Any]:
    """Return where backward enters the graph, without the results themselves."""
    return [torch.autograd.graph.get_gradient_edge(t) for t in made]


class DropGraph(CallSaving):
    """Keeps nothing of the graph: the block runs again, from its arguments and from what was selected."""

    is_kept = False

    def __init__(
        self,
        where: str,
        tensors: Sequence[torch.Tensor] = (),
        selection: Selection | None = None,
        offloaded: OffloadedCall | None = None,
    ) -> None:
        """Drop what one call saves, or all calls for which nothing is saved.

        Args:
            where: For errors.
            tensors: The call's arguments.
            selection: Saves results; None: none.
            offloaded: Sends arguments and results off the device; None: they stay there.
        """
        self._where, self._tensors, self._selection, self._offloaded = where, tensors, selection, offloaded
        self._hooks = drop_saved(where)
        self._packed: Sequence[tuple[Any, bool]] = ()
        self._call: SavedCall[Handle] | None = None

    @property
    def is_needed(self) -> bool:
        """Whether it has saved something."""
        return self._selection is not None or self._offloaded is not None

    def hooks(self) -> Any:
        """See ``CallSaving``."""
        return self._hooks if self._selection is None else _NestedContexts(self._hooks, self._selection.forward())

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> None:
        """See ``CallSaving``."""
        tensors, self._tensors = self._tensors, ()
        offloaded = self._offloaded
        if self._selection is not None:
            is_whole = self._selection.end(made, _kept if offloaded is None else offloaded.packing.pack)
            self._selection = self._selection if is_whole else None
        if offloaded is None:
            return
        packing = offloaded.packing
        self._packed = [(packing.pack(tensor), tensor.is_leaf) for tensor in tensors]
        if not packing.fits:
            offloaded.say_too_large()
            self._selection = None
            packing.begin_again()
            self._packed = [(packing.pack(tensor), tensor.is_leaf) for tensor in tensors]
        if packing.fits:
            self.has_arguments = True
            self._call = offloaded.end_forward(owner)
        else:
            self._offloaded = None

    def begin_backward(self) -> None:
        """See ``CallSaving``."""
        if self._offloaded is not None:
            self._offloaded.begin_backward(self._call)

    def arguments(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """See ``CallSaving``."""
        return [self._argument(*packed) for packed in self._packed] if self.has_arguments else saved

    def recompute_hooks(self, hooks: Any) -> Any:
        """See ``CallSaving``."""
        return hooks if self._selection is None else _NestedContexts(hooks, self._selection.recompute(self._unpacked))

    def release(self) -> None:
        """See ``CallSaving``."""
        self._selection, self._packed = None, ()

    def end_backward(self, *, is_over: bool) -> None:
        """See ``CallSaving``."""
        if self._offloaded is not None:
            self._offloaded.end_backward(self._call, is_over=is_over)

    def _argument(self, packed: Any, was_leaf: bool) -> torch.Tensor:  # noqa: FBT001
        """Return an argument. It is a leaf only if it was one: autocast treats leaves differently."""
        tensor = self._unpacked(packed)
        if was_leaf or not tensor.is_leaf or tensor.layout is not torch.strided:  # torch makes no views of others
            return tensor
        with torch.enable_grad():
            return tensor.detach().requires_grad_().view_as(tensor)

    def _unpacked(self, packed: Any) -> torch.Tensor:
        return packed.unchanged(self._where) if self._offloaded is None else self._offloaded.packing.unpack(packed)


class SendGraph(CallSaving):
    """Sends what the graph has saved off the device, if it fits; else the call is recomputed."""

    def __init__(self, offloaded: OffloadedCall, learn: Callable[[], None], gone: type[OffloadedArgument]) -> None:
        """Args: learn: Called if it would never fit. gone: Class of arguments whose memory has left."""
        self._offloaded, self._learn, self._gone = offloaded, learn, gone
        self._call: SavedCall[Handle] | None = None

    @property
    def is_kept(self) -> bool:  # type: ignore[override]
        """Whether it fits, as far as forward has come."""
        return self._offloaded.packing.fits

    @property
    def is_needed(self) -> bool:
        """Whether it fits."""
        return self._offloaded.packing.fits

    def hooks(self) -> Any:
        """See ``CallSaving``."""
        return self._offloaded.packing.hooks()

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """See ``CallSaving``."""
        if not self._offloaded.packing.fits:
            if self._offloaded.say_too_large():
                self._learn()
            return None
        self._call = self._offloaded.end_forward(owner)
        without_values(inner, self._gone)
        return inner, edges_of(made)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results whose memory was saved."""
        return [i for i, t in enumerate(made) if storage_of(t) in self._offloaded.packing.storages]

    def returned(
        self, watched: list[tuple[torch.Tensor, int]], results: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, int]]:
        """Let what was sent watch them: it knows whether they are home."""
        self._offloaded.watch(self._call, watched)
        return []

    def begin_backward(self) -> None:
        """See ``CallSaving``."""
        self._offloaded.begin_backward(self._call)

    def end_backward(self, *, is_over: bool) -> None:
        """See ``CallSaving``."""
        self._offloaded.end_backward(self._call, is_over=is_over)


def _kept(tensor: torch.Tensor) -> KeptTensor:
    return KeptTensor(tensor.detach(), tensor._version)


class _NestedContexts:
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
