"""What calls do with what autograd saves: one object per unit, and one per call. See [Note: keep what fits]."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.activations.offloaded_call import CallOffloader
from outcore.engine.activations.room import ActivationRoom, Lease, SharedArguments
from outcore.engine.activations.saved import by_place, escaped, hooks_on_saved, offloaded_argument_class, storage_of
from outcore.engine.activations.saving import CallSaving, DropGraph, Graph, KeepGraph, SendGraph, edges_of
from outcore.engine.activations.selection import Selection
from outcore.engine.unit.unit import Unit
from outcore.model.wrapped import bytes_of
from outcore.order.activations import ActivationOrder

_MOST_KNOWN = 4096  # kinds of arguments that are remembered


class Policy:
    """What the calls of one unit do with what autograd saves. This policy keeps all on the device, uncounted."""

    keeps_all = True
    has_kinds = False
    """Whether it tells calls apart by the kind of their arguments."""

    def __init__(self, unit: Unit, device_kind: str, where: str) -> None:
        """Args: where: For errors."""
        self._unit, self._device_kind, self._where = unit, device_kind, where
        self._trainable = unit.params[: unit.num_trainable]
        self._kept = KeepGraph(unit, None, None, where)

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """Return the kind of a call's arguments: what the saved bytes depend on."""
        return None

    def _kind(self, args: Any, kwargs: Any) -> Hashable:
        device = self._device_kind
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        flags = tuple([p.requires_grad for p in self._trainable])
        return self._unit.module.training, autocast, flags, _signature(args), _signature(kwargs)

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> CallSaving:
        """Decide what a call does.

        Args:
            kind: Kind of its arguments; None: all such calls must do the same.
            tensors: Its arguments.
        """
        return self._kept

    def lease(self, args: Any, kwargs: Any) -> Lease | None:
        """Take room for a call. Returns None if its bytes are not known, or if there is no room."""
        return None

    def count(self, kind: Hashable) -> SavedBytesCounter | None:
        """Return a counter for a recompute, if it is not known yet what the call would have saved."""
        return None

    def learn(self, kind: Hashable, count: SavedBytesCounter, made: Sequence[torch.Tensor]) -> None:
        """Remember what calls of a kind save."""


class SavedBytesCounter:
    """Counts what is saved while a block runs, each storage once, weights left out."""

    nbytes = 0

    def __init__(self, unit: Unit, where: str) -> None:
        """Args: where: For errors."""
        self._unit, self._where = unit, where

    def hooks(self) -> Any:
        """Return the hooks to run the block under, with its weights bound."""
        self._counted = self._weights()
        pack, unpack = by_place(self._unit, self._where)
        return hooks_on_saved(self._unit, lambda tensor: pack(self._counting(tensor)), unpack)

    def saved_of(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """Return indices of results that were saved: the graph needs them unchanged."""
        return [i for i, t in enumerate(made) if storage_of(t) in self._counted]

    def add(self, tensor: torch.Tensor) -> int:
        """Count a saved tensor. Returns the bytes that it adds."""
        place = storage_of(tensor)
        if place in self._counted:
            return 0
        self._counted.add(place)
        nbytes = tensor.untyped_storage().nbytes()
        self.nbytes += nbytes
        return nbytes

    def _weights(self) -> set[int]:
        return {0, *map(storage_of, self._unit.params)}

    def _counting(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add(tensor)
        return tensor


class KeepUntilFull(CallSaving, SavedBytesCounter):
    """Counts what is saved and keeps it, until there is no room; then nothing is kept."""

    def __init__(self, policy: KeepWhatFits, kind: Hashable, unit: Unit, lease: Lease, where: str) -> None:
        """Args: policy: It learns from the trial. lease: Empty at first; it grows with what is kept."""
        SavedBytesCounter.__init__(self, unit, where)
        self._policy, self._kind, self._lease, self.is_kept = policy, kind, lease, True
        self._saved: list[list[Any]] = []
        """What is kept of each saved tensor: one entry, or none once there is no room."""

    def hooks(self) -> Any:
        """See ``CallSaving``."""
        self._counted = self._weights()
        self._pack, self._unpack = by_place(self._unit, self._where)
        return hooks_on_saved(self._unit, self._keep, self._give)

    @property
    def is_needed(self) -> bool:
        """Whether the graph was kept."""
        return self.is_kept

    def watched(self, made: Sequence[torch.Tensor]) -> Sequence[int]:
        """See ``CallSaving``."""
        return self.saved_of(made)

    def end(self, inner: Sequence[torch.Tensor], made: Sequence[torch.Tensor], owner: object) -> Graph | None:
        """End forward. From here on the graph owns what was kept."""
        self._saved.clear()
        if not self.is_kept:
            return None
        self._policy.learn(self._kind, self, made)
        return inner, edges_of(made)

    def _keep(self, tensor: torch.Tensor) -> list[Any]:
        if self.is_kept and not self._lease.grow(self.add(tensor)):
            self.is_kept = False
            self._lease.give_back()
            for saved in self._saved:
                saved.clear()
        saved = [self._pack(tensor)] if self.is_kept else []
        self._saved.append(saved)
        return saved

    def _give(self, saved: list[Any]) -> torch.Tensor:
        if not saved:
            raise UnsupportedError(escaped(self._where))
        return self._unpack(saved[0])


class KeepWhatFits(Policy):
    """Keeps what is saved where there is room, else recomputes. Remembers how much calls save."""

    keeps_all = False

    def __init__(
        self, unit: Unit, room: ActivationRoom, device_kind: str, sender: CallOffloader | None, where: str
    ) -> None:
        """Args: room: That of all units. sender: Sends what recomputes need off the device; None: it stays there."""
        super().__init__(unit, device_kind, where)
        self._room, self._sender, self._selects = room, sender, unit.plan.policy == "select"
        self._saves = self._selects or sender is not None
        self.has_kinds = room.nbytes > 0 or self._saves
        self._known: dict[Hashable, tuple[int, Sequence[bool]]] = {}
        """Bytes that calls of a kind save, and whether each result is among them."""
        self._dropped = DropGraph(where)

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """See ``Policy``."""
        return self._kind(args, kwargs) if self._room.nbytes else True

    def lease(self, args: Any, kwargs: Any) -> Lease | None:
        """See ``Policy``."""
        known = self._known.get(self.kind_of(args, kwargs)) if self.has_kinds else None
        return None if known is None else self._room.lease(known[0])

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> CallSaving:
        """See ``Policy``."""
        if kind is None:
            return self._dropped
        known = self._known.get(kind)
        if known is None:
            self._room.expect(sum(map(bytes_of, tensors)))
        if self._shares_casts() or self._room.free_bytes <= 0:
            return self._drop(tensors)
        if known is None:
            return KeepUntilFull(self, kind, self._unit, Lease(self._room), self._where)
        lease = self._room.lease(known[0])
        return self._drop(tensors) if lease is None else KeepGraph(self._unit, lease, known[1], self._where)

    def _drop(self, tensors: Sequence[torch.Tensor]) -> CallSaving:
        offloaded = None
        if self._sender is not None:
            offloaded = self._sender.begin(tensors)
            if offloaded is None:  # the unit's home is full
                return self._dropped
        selection = Selection(self._where) if self._selects else None
        return DropGraph(self._where, tensors, selection, offloaded) if self._saves else self._dropped

    def _shares_casts(self) -> bool:
        """Whether a kept graph needs a cache of casts of its own, which would empty the whole model's cache."""
        return torch.is_autocast_enabled(self._device_kind) and torch.is_autocast_cache_enabled()

    def count(self, kind: Hashable) -> SavedBytesCounter | None:
        """See ``Policy``."""
        return None if kind in self._known else SavedBytesCounter(self._unit, self._where)

    def learn(self, kind: Hashable, count: SavedBytesCounter, made: Sequence[torch.Tensor]) -> None:
        """See ``Policy``."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        watched = count.saved_of(made)
        self._known[kind] = count.nbytes, [i in watched for i in range(len(made))]


class OffloadPolicy(Policy):
    """Sends what is saved off the device. A call that does not fit its home is recomputed.

    Once that is known of arguments of given shapes, calls with such arguments send the arguments alone, if they fit.
    """

    keeps_all, has_kinds = False, True

    def __init__(self, unit: Unit, device_kind: str, sender: CallOffloader, where: str) -> None:
        """Args: sender: The unit's sender."""
        super().__init__(unit, device_kind, where)
        self._sender, self._dropped = sender, DropGraph(where)
        self._too_large, self._gone = set[Hashable](), offloaded_argument_class(where)

    def kind_of(self, args: Any, kwargs: Any) -> Hashable:
        """Return one kind for all calls, as long as all fit."""
        return self._kind(args, kwargs) if self._too_large else True

    def begin(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> CallSaving:
        """See ``Policy``."""
        if kind is None:
            return self._dropped
        offloaded = self._sender.begin(tensors)
        if offloaded is None:
            return self._dropped
        if kind in self._too_large and kind is not True:
            return DropGraph(self._where, tensors, None, offloaded)
        return SendGraph(offloaded, functools.partial(self._learn, kind), self._gone)

    def _learn(self, kind: Hashable) -> None:
        if len(self._too_large) >= _MOST_KNOWN:
            self._too_large.clear()
        self._too_large.add(kind)


def policy_of(
    unit: Unit,
    room: ActivationRoom,
    order: ActivationOrder[Handle],
    shared: SharedArguments,
    device: Device,
    where: str,
) -> Policy:
    """Return the policy that the plan gives to a unit."""
    sender = None if unit.plan.activations == "device" else CallOffloader(unit, order, shared, device, where)
    kind = device.torch_device.type
    if unit.plan.policy == "keep":
        return Policy(unit, kind, where) if sender is None else OffloadPolicy(unit, kind, sender, where)
    return KeepWhatFits(unit, room, kind, sender, where)


def _signature(value: Any) -> Any:
    """Return the form of arguments: shapes of tensors, not their values."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple([_signature(part) for part in value])
    if isinstance(value, dict):
        return tuple([(name, _signature(part)) for name, part in value.items()])
    return value if isinstance(value, bool | int | str | None) else type(value)
