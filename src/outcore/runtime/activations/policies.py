"""What calls do with what autograd saves: an object per policy, and one per call. See [Note: keep what fits]."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from outcore.core.errors import UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.order.activations import ActivationOrder, SavedCall
from outcore.runtime.activations.away import Away, without_values
from outcore.runtime.activations.room import Lease, Room
from outcore.runtime.activations.saved import by_place, drop_saved, escaped, save_weights_by_place, storage_of
from outcore.runtime.unit.unit import Unit

_MOST_KNOWN = 4096  # kinds of arguments that are remembered

Graph = tuple[Sequence[torch.Tensor], Sequence[Any]]
"""The arguments inside of the block, and its results or their edges in the graph."""


class Saving(Protocol):
    """What one call does with what autograd saves. Room that it has taken goes back with the object."""

    may_drop: bool
    """Whether it may come to a recompute."""

    @property
    def is_kept(self) -> bool:
        """Backward walks the graph of forward, as it looks now; else it runs the block again."""

    def hooks(self) -> Any:
        """To run the block under, with its weights bound."""

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """Forward is over. Returns what backward begins with; None: it is recomputed.

        Args:
            inner: The arguments inside of the block.
            made: Results with a gradient.
            owner: Lives as long as a backward may come.
        """

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that must not be changed in place outside."""

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Watched results as they were handed out, with their versions then: those that somebody else has to watch."""

    def begin_backward(self) -> None:
        """The graph is walked now."""

    def end_backward(self, *, is_over: bool) -> None:
        """It was walked. Args: is_over: And will not be again."""


class Policy:
    """What the calls of one unit do: this one keeps all on the device, uncounted."""

    keeps_all = True
    has_kinds = False
    """Whether it asks what kind of arguments a call has."""

    def __init__(self, unit: Unit, where: str) -> None:
        """Args: where: For errors."""
        self._unit, self._where = unit, where
        self._kept = Kept(unit, None, None, where)

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """What the bytes of a call depend on."""
        return None

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> Saving:
        """Decide for a call.

        Args:
            kind: Of its arguments; None: all such calls must do the same.
            tensors: Its arguments.
        """
        return self._kept

    def lease(self, args: Any, kwargs: Any) -> Lease | None:
        """Take room for a call of which it is known what it takes."""
        return None

    def count(self, kind: Hashable) -> Count | None:
        """What counts in a recompute, where nobody knows yet what the call would have saved."""
        return None

    def learn(self, kind: Hashable, count: Count, made: Sequence[torch.Tensor]) -> None:
        """Remember what calls take."""


class _Saving:
    """What most do."""

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """All."""
        return results

    def begin_backward(self) -> None:
        """All is where it is wanted."""

    def end_backward(self, *, is_over: bool) -> None:
        """Nothing to do."""


class Kept(_Saving):
    """All is kept."""

    is_kept, may_drop = True, False

    def __init__(self, unit: Unit, lease: Lease | None, saved: Sequence[int] | None, where: str) -> None:
        """Args: lease: The bytes that it takes; None: they are not counted. saved: See ``watched``; None: all."""
        self._unit, self._lease, self._saved, self._where = unit, lease, saved, where

    def hooks(self) -> Any:
        """See ``Saving``."""
        return save_weights_by_place(self._unit, self._where)

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph:
        """See ``Saving``."""
        return inner, list(made)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that the graph needs unchanged."""
        return range(len(made)) if self._saved is None else self._saved


class Dropped(_Saving):
    """Nothing is kept."""

    is_kept, may_drop = False, True

    def __init__(self, where: str) -> None:
        """Args: where: For errors."""
        self._hooks = drop_saved(where)

    def hooks(self) -> Any:
        """See ``Saving``."""
        return self._hooks

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> None:
        """See ``Saving``."""

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """None: recompute makes them again."""
        return ()


class Count:
    """Counts what is saved while a block runs, each storage once, weights left out."""

    nbytes = 0

    def __init__(self, unit: Unit, where: str) -> None:
        """Args: where: For errors."""
        self._unit, self._where = unit, where

    def hooks(self) -> Any:
        """To run the block under, with its weights bound."""
        self._counted = {0, *map(storage_of, self._unit.params)}
        pack, unpack = by_place(self._unit, self._where)
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: pack(self._counting(tensor)), unpack)

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that the graph needs unchanged."""
        return [i for i, t in enumerate(made) if storage_of(t) in self._counted]

    def add(self, tensor: torch.Tensor) -> int:
        """Bytes that a saved tensor adds."""
        place = storage_of(tensor)
        if place in self._counted:
            return 0
        self._counted.add(place)
        nbytes = tensor.untyped_storage().nbytes()
        self.nbytes += nbytes
        return nbytes

    def _counting(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add(tensor)
        return tensor


class Trial(_Saving, Count):
    """Keeps what is saved as well, until there is no room; then nothing is kept."""

    may_drop = True

    def __init__(self, policy: WhatFits, kind: Hashable, unit: Unit, lease: Lease, where: str) -> None:
        """Args: policy: Learns from it. lease: Empty; grows with what is kept."""
        super().__init__(unit, where)
        self._policy, self._kind, self._lease, self.is_kept = policy, kind, lease, True
        self._saved: list[_Saved] = []

    def hooks(self) -> Any:
        """See ``Saving``."""
        super().hooks()
        self._pack, self._unpack = by_place(self._unit, self._where)
        return torch.autograd.graph.saved_tensors_hooks(self._keep, self._give)

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """From here on the graph owns what was kept."""
        self._saved.clear()
        if not self.is_kept:
            return None
        self._policy.learn(self._kind, self, made)
        return inner, list(made)

    def _keep(self, tensor: torch.Tensor) -> _Saved:
        if self.is_kept and not self._lease.grow(self.add(tensor)):
            self.is_kept = False
            self._lease.release()
            for saved in self._saved:
                saved.content = None
        saved = _Saved(self._pack(tensor) if self.is_kept else None)
        self._saved.append(saved)
        return saved

    def _give(self, saved: _Saved) -> torch.Tensor:
        if saved.content is None:
            raise UnsupportedError(escaped(self._where))
        return self._unpack(saved.content)


class _Saved:
    """One saved tensor."""

    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class WhatFits(Policy):
    """Recomputes, or keeps where there is room, and remembers what calls take."""

    keeps_all = False

    def __init__(self, unit: Unit, room: Room, device_kind: str, where: str) -> None:
        """Args: room: Shared by all units."""
        super().__init__(unit, where)
        self._room, self._device_kind, self.has_kinds = room, device_kind, room.nbytes > 0
        self._trainable = unit.params[: unit.num_trainable]
        self._known: dict[Hashable, tuple[int, Sequence[int]]] = {}
        self._dropped = Dropped(where)

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """See ``Policy``."""
        device = self._device_kind
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        flags = tuple([p.requires_grad for p in self._trainable])
        return self._unit.module.training, autocast, flags, _signature(args), _signature(kwargs)

    def lease(self, args: Any, kwargs: Any) -> Lease | None:
        """See ``Policy``."""
        known = self._known.get(self.kind_of(args, kwargs)) if self.has_kinds else None
        return None if known is None else self._room.lease(known[0])

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> Saving:
        """See ``Policy``."""
        if kind is None:
            return self._dropped
        known = self._known.get(kind)
        if known is None:
            self._room.expect(sum(t.nbytes for t in tensors))
        if self._shares_casts() or self._room.free_bytes <= 0:
            return self._dropped
        if known is None:
            return Trial(self, kind, self._unit, Lease(self._room), self._where)
        lease = self._room.lease(known[0])
        return self._dropped if lease is None else Kept(self._unit, lease, known[1], self._where)

    def _shares_casts(self) -> bool:
        """Whether a kept graph needs a cache of casts of its own, which would empty that of the whole model."""
        return torch.is_autocast_enabled(self._device_kind) and torch.is_autocast_cache_enabled()

    def count(self, kind: Hashable) -> Count | None:
        """See ``Policy``."""
        return None if kind in self._known else Count(self._unit, self._where)

    def learn(self, kind: Hashable, count: Count, made: Sequence[torch.Tensor]) -> None:
        """See ``Policy``."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[kind] = count.nbytes, count.watched(made)


class _SentAway(_Saving):
    """One call whose activations leave the device, if they fit."""

    may_drop = True

    def __init__(self, away: Away) -> None:
        self._away = away
        self._call: SavedCall[Handle] | None = None

    @property
    def is_kept(self) -> bool:
        return self._away.fits

    def hooks(self) -> Any:
        return self._away.hooks()

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        if not self._away.fits:
            warnings.warn(  # the same words for all units, so that Python says it once
                "a call saves more than the plan has room for on host or disk, and is recomputed in backward, which "
                "changes no result; give outcore.prepare() the largest batch as sample=",
                stacklevel=2,
            )
            return None
        self._call = self._away.end_forward(owner)
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in made]
        without_values(inner)
        return inner, edges

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        return self._away.among(made)

    def returned(self, results: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        self._away.watch(results)
        return []

    def begin_backward(self) -> None:
        self._away.begin_backward(self._call)

    def end_backward(self, *, is_over: bool) -> None:
        self._away.end_backward(self._call, is_over=is_over)


class SendAway(Policy):
    """What is saved leaves the device; a call that does not fit its home is recomputed."""

    keeps_all, has_kinds = False, True

    def __init__(self, unit: Unit, order: ActivationOrder[Handle], device: Device, where: str) -> None:
        """Args: order: Of all units. device: That compute uses."""
        super().__init__(unit, where)
        self._order, self._device, self._dropped = order, device, Dropped(where)
        self._buffers = [buffer for module in unit.modules for buffer in module.buffers(recurse=False)]

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """One for all: what a call takes is known when it has run."""
        return True

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> Saving:
        """See ``Policy``."""
        if kind is None:
            return self._kept
        if not self._order.is_free(self._unit.ledger):
            return self._dropped
        staying = [*self._buffers, *(t for t in tensors if not t.requires_grad)]
        return _SentAway(Away(self._unit, self._order, self._device, staying, self._where))


def policy_of(unit: Unit, room: Room, order: ActivationOrder[Handle], device: Device, where: str) -> Policy:
    """The policy that the plan gives to a unit."""
    if unit.plan.policy == "recompute":
        return WhatFits(unit, room, device.torch_device.type, where)
    return Policy(unit, where) if unit.plan.activations == "device" else SendAway(unit, order, device, where)


def _signature(value: Any) -> Any:
    """What the form of arguments is: shapes, not values, of tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple([_signature(part) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _signature(part)) for name, part in value.items()])
    return value if isinstance(value, bool | int | str | None) else type(value)
