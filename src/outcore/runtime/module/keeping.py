"""Whether a call keeps what autograd saves or drops it, to be recomputed. See [Note: keep what fits]."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.runtime.module.inner_graph import by_place, drop_saved, escaped, save_weights_by_place
from outcore.runtime.module.room import Lease, Room
from outcore.runtime.module.structure import storage_of
from outcore.runtime.unit.unit import Unit

_MOST_KNOWN = 4096  # kinds of arguments that are remembered


class Kept:
    """All is kept."""

    is_kept, may_drop = True, False

    def __init__(self, unit: Unit, lease: Lease | None, saved: Sequence[int] | None, where: str) -> None:
        """Args: lease: The bytes that it takes; None: they are not counted. saved: See ``saved_among``; None: all."""
        self._unit, self.lease, self._saved, self._where = unit, lease, saved, where

    def hooks(self) -> Any:
        """To run the block under."""
        return save_weights_by_place(self._unit, self._where)

    def saved_among(self, results: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that the graph needs unchanged."""
        return range(len(results)) if self._saved is None else self._saved


class Dropped:
    """Nothing is kept."""

    is_kept, may_drop = False, True

    def __init__(self, where: str) -> None:
        """Args: where: For errors."""
        self._hooks = drop_saved(where)

    def hooks(self) -> Any:
        """To run the block under."""
        return self._hooks


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

    def saved_among(self, results: Sequence[torch.Tensor]) -> Sequence[int]:
        """Results that the graph needs unchanged."""
        return [i for i, t in enumerate(results) if storage_of(t) in self._counted]

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


class Trial(Count):
    """Keeps what is saved as well, until there is no room; then nothing is kept."""

    may_drop = True

    def __init__(self, unit: Unit, lease: Lease, where: str) -> None:
        """Args: lease: Empty; grows with what is kept."""
        super().__init__(unit, where)
        self.lease, self.is_kept = lease, True
        self._saved: list[_Saved] = []

    def hooks(self) -> Any:
        """To run the block under, with its weights bound."""
        super().hooks()
        self._pack, self._unpack = by_place(self._unit, self._where)
        return torch.autograd.graph.saved_tensors_hooks(self._keep, self._give)

    def end(self) -> None:
        """The block has run: from here on the graph owns what was kept."""
        self._saved.clear()

    def _keep(self, tensor: torch.Tensor) -> _Saved:
        if self.is_kept and not self.lease.grow(self.add(tensor)):
            self.is_kept = False
            self.lease.release()
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


class Keeping:
    """Decides for the calls of one unit, and remembers what they take."""

    def __init__(self, unit: Unit, room: Room, device_kind: str, where: str) -> None:
        """Args: room: Shared by all units."""
        self._unit, self._room, self._device_kind, self._where = unit, room, device_kind, where
        self._trainable = unit.params[: unit.num_trainable]
        self.always = unit.plan.policy == "keep"
        """Whether nothing is counted."""
        self.counts = not self.always and room.nbytes > 0
        """Whether calls have kinds."""
        self._known: dict[Hashable, tuple[int, Sequence[int]]] = {}
        self._dropped = Dropped(where)
        self._usual = Kept(unit, None, None, where) if self.always else self._dropped

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """What the bytes of a call depend on."""
        device = self._device_kind
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        flags = tuple([p.requires_grad for p in self._trainable])
        return self._unit.module.training, autocast, flags, _signature(args), _signature(kwargs)

    def lease(self, args: Any, kwargs: Any) -> Lease | None:
        """Take room for a call of which it is known what it takes."""
        known = self._known.get(self.kind_of(args, kwargs)) if self.counts else None
        return None if known is None else self._room.lease(known[0])

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> Kept | Dropped | Trial:
        """Decide for a call.

        Args:
            kind: Of its arguments; None: it must do as the policy says.
            tensors: Its arguments.
        """
        if kind is None:
            return self._usual
        known = self._known.get(kind)
        if known is None:
            self._room.expect(sum(t.nbytes for t in tensors))
        if self._shares_casts() or self._room.free_bytes <= 0:
            return self._dropped
        if known is None:
            return Trial(self._unit, Lease(self._room), self._where)
        lease = self._room.lease(known[0])
        return self._dropped if lease is None else Kept(self._unit, lease, known[1], self._where)

    def _shares_casts(self) -> bool:
        """Whether a kept graph needs a cache of casts of its own, which would empty that of the whole model."""
        return torch.is_autocast_enabled(self._device_kind) and torch.is_autocast_cache_enabled()

    def end(self, kind: Hashable, chosen: Kept | Trial, results: Sequence[torch.Tensor]) -> Sequence[int]:
        """Learn from a call that has kept all. Returns which of its results the graph needs unchanged."""
        if isinstance(chosen, Trial):
            chosen.end()
            self.learn(kind, chosen, results)
        return chosen.saved_among(results)

    def count(self, kind: Hashable) -> Count | None:
        """What counts in a recompute, where nobody knows yet what the call would have saved."""
        return None if kind in self._known else Count(self._unit, self._where)

    def learn(self, kind: Hashable, count: Count, results: Sequence[torch.Tensor]) -> None:
        """Remember what calls take."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[kind] = count.nbytes, count.saved_among(results)


def _signature(value: Any) -> Any:
    """What the form of arguments is: shapes, not values, of tensors."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple([_signature(part) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _signature(part)) for name, part in value.items()])
    return value if isinstance(value, bool | int | str | None) else type(value)
