"""Moves what one call saved off the device and back. See [Note: activations away].

[Note: storages that leave] Saved tensors share memory: three views of one matrix product may be saved, and the result
of one function is the argument of the next. So storages leave, each once and whole, and views are made again from
offset, size and strides. What the caller keeps in any case stays, since sending it would win nothing: weights that live
on the device, buffers, arguments that need no gradient. Small storages stay too. A storage that an earlier call has
sent, because it is that call's result, is borrowed from there ([Note: lent bytes] in ``order.activations``).
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from outcore.core.errors import UnsupportedError
from outcore.core.quantities import ALIGN_BYTES, PAGE_BYTES, SMALL_BYTES, align_up
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.activations.room import SharedArguments
from outcore.engine.activations.saved import (
    KeptTensor,
    SavedCast,
    SavedWeight,
    SavedWrapper,
    StoredForm,
    by_place,
    changed,
    escaped,
    hooks_on_saved,
    storage_of,
    version_of,
)
from outcore.engine.unit.unit import Unit
from outcore.memory.arena import Region
from outcore.model.casts import cast_of
from outcore.order.activations import ActivationOrder, Loan, SavedCall
from outcore.order.ledger import ByteSpan
from outcore.spec.lane_names import Lane

TOO_LARGE = (
    "a call saves more than the plan has room for on host or disk, and is recomputed in backward, which changes no "
    "result; give outcore.prepare() the largest batch as sample=, under autocast if forward runs under it"
)
"""A warning, in the same words for all units, so that Python shows it once."""
TAKEN = (
    "a unit is called again before the backward of an earlier call, and what both save is more than the plan has room "
    "for on host or disk; the later call is recomputed in backward, which changes no result; give outcore.prepare() "
    "a batch as large as both together as sample="
)
_calls = itertools.count()


class _AutogradMemory(NamedTuple):
    """Memory that autograd has taken, under a name for the race checker."""

    region: Region


class _Liveness:
    """Tells whether an object lives. Asking never keeps the object alive: it must not end on a lane."""

    __slots__ = ("_gone", "_of")

    def __init__(self, of: object) -> None:
        self._gone: list[object] = []
        self._of = weakref.ref(of, self._gone.append)

    @property
    def lives(self) -> bool:
        return not self._gone


class _Storage(NamedTuple):
    """One storage that the call saved, and where it begins in the call's room."""

    memory: torch.Tensor  # 1D uint8
    start: int
    lender: tuple[SavedCall[Handle], int] | None
    """The call that has sent it, and where it begins there; None: this call sends it."""


class _OffloadedView(StoredForm):
    """A saved tensor that leaves with its storage."""

    __slots__ = ("is_changed", "tensor", "version")

    version: int
    is_changed: bool
    tensor: torch.Tensor | None

    def free(self) -> None:
        """Free the tensor: its bytes have been copied, so later changes do not matter."""
        if self.tensor is not None:
            self.is_changed = self.tensor._version != self.version
            self.tensor = None


class StoragePacker:
    """Hooks that gather the storages that leave, and find them again when they are back."""

    def __init__(
        self,
        unit: Unit,
        device: torch.device,
        room: int,
        shared: SharedArguments,
        staying: Iterable[torch.Tensor],
        where: str,
    ) -> None:
        """Args: device: Storages leave it. room: Bytes for them. staying: Tensors whose memory the caller keeps."""
        self._unit, self._device, self._room, self._where = unit, device, room, where
        self._shared = shared
        self._staying = {0, *map(storage_of, staying)}
        self.storages: dict[int, _Storage] = {}
        """Storages by address, until they are home."""
        self._views: list[_OffloadedView] = []
        self._params: dict[int, int] = {}
        """Indices of parameters by identity, if autocast casts them."""
        self._casts: list[SavedCast] = []
        self._ends = [0, 0]
        """Bytes that the call sends itself, from the start of its room; bytes that others have sent, from the end."""
        self.fits = True
        self.memory: torch.Tensor | None = None
        """Where the storages are when they are back, while backward is at the unit."""

    def hooks(self) -> Any:
        """Return the hooks to run the block under, with its weights bound."""
        self._by_place = by_place(self._unit, self._where, keeps=False)
        buffer = self._unit.device_buffer()
        if buffer is not None:
            self._staying.add(storage_of(buffer.bytes))
        if torch.is_autocast_enabled(self._device.type):
            self._params = {id(p): i for i, p in enumerate(self._unit.params)}
        hooks = hooks_on_saved(self._unit, self._keep, self.unpack)
        return _HooksWithCasts(hooks, self) if self._params else hooks

    def _keep(self, tensor: torch.Tensor) -> Any:
        cast = self._cast(tensor) if self._params else None
        return cast or (self._by_place[0](tensor) or self.pack(tensor) if self.fits else None)

    def _cast(self, tensor: torch.Tensor) -> SavedCast | None:
        weight = cast_of(tensor)
        if weight is None or id(weight) not in self._params:
            return None
        self._casts.append(SavedCast(tensor, weight))
        return self._casts[-1]

    def settle(self) -> None:
        """Save casts of weights that the block has changed since; others can be made again. Called after the block."""
        touched = self._unit.presence.watch.touched
        for cast in self._casts:
            tensor, cast.tensor, weight = cast.tensor, None, cast.weight
            is_changed = weight._version != cast.version or self._params[id(weight)] in touched
            cast.instead = self.pack(tensor) if is_changed and tensor is not None else None
        self._casts.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Store a tensor that is no weight. Returns what ``unpack`` takes; None: nothing fits any more."""
        if not self.fits:
            return None
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        place = storage_of(tensor)
        storage = self.storages.get(place)
        if storage is None:
            is_elsewhere = tensor.device != self._device or place in self._staying
            if is_elsewhere or tensor.untyped_storage().nbytes() <= SMALL_BYTES:
                return KeptTensor(tensor.detach(), version_of(tensor))
            storage = self._take(place, tensor)
        if storage is None:
            return None
        view = _OffloadedView(tensor, storage.start + int(tensor.storage_offset()) * tensor.dtype.itemsize)
        view.version, view.is_changed = tensor._version, False
        view.tensor = tensor.detach()  # without its node: a result would keep its own node alive
        self._views.append(view)
        return view

    def _take(self, place: int, tensor: torch.Tensor) -> _Storage | None:
        whole, lender = tensor.untyped_storage(), self._shared.lender_of(tensor)
        if sum(self._ends) + whole.nbytes() > self._room:
            self.drop()
            return None
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(whole)
        is_lent = lender is not None
        start = self._ends[0]
        self._ends[is_lent] += align_up(whole.nbytes(), ALIGN_BYTES)
        if is_lent:
            start = self._room - self._ends[1]
        storage = self.storages[place] = _Storage(memory, start, lender)
        return storage

    @property
    def nbytes(self) -> int:
        """Bytes that the call sends itself."""
        return self._ends[0]

    def loans(self, owner: _Liveness) -> list[Loan[Handle]]:
        """Return loans of what others have sent. Args: owner: The call's owner."""
        found = [(memory.numel(), start, lender) for memory, start, lender in self.storages.values() if lender]
        return [Loan(owner, *lender, nbytes, at) for nbytes, at, lender in found]

    def drop(self) -> None:
        """Keep nothing: it does not fit."""
        self.fits = False
        self.storages.clear()
        for view in self._views:
            view.tensor = None
        self._views.clear()

    def begin_again(self) -> None:
        """Begin again, as if nothing had been saved yet."""
        self.drop()
        self._ends, self.fits = [0, 0], True

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return what was stored, wherever it is."""
        if packed is None:
            raise UnsupportedError(escaped(self._where))
        if isinstance(packed, SavedWeight | SavedWrapper):
            return self._by_place[1](packed)
        if isinstance(packed, KeptTensor):
            return packed.unchanged(self._where)
        if isinstance(packed, SavedCast):
            return packed.again() if packed.instead is None else self.unpack(packed.instead)
        if packed.is_changed or (packed.tensor is not None and packed.tensor._version != packed.version):
            raise UnsupportedError(changed(packed.size, self._where))
        if packed.tensor is not None:
            return packed.tensor
        if self.memory is None:
            raise UnsupportedError(escaped(self._where))
        return packed.again(self.memory)

    def free(self) -> None:
        """Free all storages: they are home."""
        for view in self._views:
            view.free()
        self.storages.clear()


class _HooksWithCasts:
    """Hooks that settle casts when the block has run under them."""

    def __init__(self, hooks: Any, packing: StoragePacker) -> None:
        self._hooks, self.packing = hooks, packing

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self.packing.settle()


class OffloadedCall:
    """What one call has saved: the object that ``ActivationOrder`` moves off the device and back."""

    def __init__(
        self,
        unit: Unit,
        order: ActivationOrder[Handle],
        device: Device,
        shared: SharedArguments,
        room: int,
        staying: Iterable[torch.Tensor],
        where: str,
    ) -> None:
        """Args: device: Storages leave it. room: Bytes in the home. staying: Tensors whose memory the caller keeps."""
        self._unit, self._order, self._device, self._where = unit, order, device, where
        self._shared = shared
        self._is_alone = room == unit.plan.saved_bytes
        self.packing = StoragePacker(unit, device.torch_device, room, shared, staying, where)
        self._owner: _Liveness | None = None
        self._returned: list[tuple[torch.Tensor, int]] = []
        self._is_changed = False
        self.nbytes = 0
        self.is_held = True
        self.memory: _AutogradMemory | None = None

    def say_too_large(self) -> bool:
        """Warn that it does not fit. Returns whether it would not fit into an empty home either."""
        warnings.warn(TOO_LARGE if self._is_alone else TAKEN, stacklevel=3)
        return self._is_alone

    # What the order asks for.

    def is_wanted(self) -> bool:
        """Whether backward may come to it: as long as its graph lives."""
        return self._owner is not None and self._owner.lives

    def leave(self, target: ByteSpan) -> Callable[[], None]:
        """Return the work that copies its own storages to where they rest, or to a slot on the way there."""
        storages, into = self.packing.storages.values(), target.memory.bytes
        mine = [(memory, start) for memory, start, lender in storages if lender is None]
        pairs = [(into[start : start + memory.numel()], memory) for memory, start in mine]

        def copy() -> None:
            for to, origin in pairs:
                to.copy_(origin, non_blocking=True)

        return copy

    def close(self) -> None:
        """See ``order.activations.SavedActivations``."""
        self.is_held = False
        self._is_changed, self._returned = self._has_changed(), []
        self.packing.free()

    def close_early(self) -> None:
        """See ``order.activations.SavedActivations``."""
        for storage in self.packing.storages.values():
            self._device.hand_over(storage.memory, Lane.D2H)
        self.close()

    # What the call does. It keeps the ``SavedCall``: kept here, the two would keep each other and the memory alive.

    def end_forward(self, owner: object) -> SavedCall[Handle] | None:
        """End forward: what the block saved will leave, if there is anything.

        Args: owner: Lives as long as backward may come.
        """
        self.nbytes = align_up(self.packing.nbytes, PAGE_BYTES)
        self._owner = _Liveness(owner)
        self.memory = _AutogradMemory(Region(f"activations of {self._unit.label}, call {next(_calls)}", 0, self.nbytes))
        loans = self.packing.loans(self._owner)
        return self._order.end_forward(self._unit.ledger, self, loans) if self.packing.storages else None

    def watch(self, call: SavedCall[Handle] | None, returned: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Watch results, which must not be changed until all is home. They share no versions with what was saved.

        Args:
            call: What ``end_forward`` returned.
            returned: Results as they are outside, and their versions.
        """
        self._returned = list(returned)
        for tensor, version in returned:
            storage = self.packing.storages.get(storage_of(tensor))
            if call is not None and storage is not None and storage.lender is None:
                self._shared.send(tensor, version, call, storage.start)

    def _has_changed(self) -> bool:
        return self._is_changed or any(tensor._version != version for tensor, version in self._returned)

    def begin_backward(self, call: SavedCall[Handle] | None) -> None:
        """Bring back what was saved. Args: call: What ``end_forward`` returned."""
        if self._has_changed():
            raise UnsupportedError(
                f"a result of {self._where} was changed in place after the call; change a copy instead"
            )
        if call is not None:
            span = self._order.begin_backward(call)
            self.packing.memory = None if span is None else span.memory.bytes

    def end_backward(self, call: SavedCall[Handle] | None, *, is_over: bool) -> None:
        """Note that compute is done with it. Args: is_over: Whether the graph is not walked again."""
        self.packing.memory = None
        if call is not None:
            self._order.end_backward(call, is_over=is_over)


class CallOffloader:
    """Makes an ``OffloadedCall`` for each call of one unit."""

    def __init__(
        self, unit: Unit, order: ActivationOrder[Handle], shared: SharedArguments, device: Device, where: str
    ) -> None:
        """Args: order, shared: Those of all units. device: The one that computes. where: For errors."""
        self._unit, self._order, self._device, self._where = unit, order, device, where
        self._shared = shared
        self._buffers = [buffer for module in unit.modules for buffer in module.buffers(recurse=False)]

    def begin(self, tensors: Sequence[torch.Tensor]) -> OffloadedCall | None:
        """Begin a call. Returns None if the unit's home is full. Args: tensors: Arguments of the call."""
        room = self._order.room(self._unit.ledger)
        if not room:
            warnings.warn(TAKEN, stacklevel=3)
            return None
        staying = [*self._buffers, *(t for t in tensors if not t.requires_grad or self._shared.has(t))]
        return OffloadedCall(self._unit, self._order, self._device, self._shared, room, staying, self._where)
