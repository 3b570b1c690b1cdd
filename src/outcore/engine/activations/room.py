"""Room on the device for activations that are kept although the plan would recompute them.

[Note: keep what fits] A plan guarantees that a unit can be recomputed. What the device has left may be used to keep
its activations instead: less work, same bits. Nothing is guessed. The first call of a unit with arguments of given
shapes is a *trial* (``policies.KeepUntilFull``): it counts and keeps what autograd saves. If that does not fit, the
call drops all and will be recomputed after all. A later call with such arguments takes as many bytes in advance; if
they are not there, it will be recomputed. Bytes are given back when backward comes to the call, or when its graph goes.

[Note: what else is alive] On an accelerator results, logits and workspace need memory too, and only a run can tell how
much. So the room there is closed until a step has been measured in which nothing was kept. The peak of that step is set
aside. Arguments larger than those measured close the room again, until another such step has been measured.

[Note: between units] Several units may get the same tensor, as all blocks of a decoder get what the encoder gave. If
each of them sent it, each would need room for it in its slot. So the first call alone sends it. For the others it stays
on the device, once, until their backward: that takes no more than one slot would.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from outcore.device.device_memory import MemoryMeter
from outcore.device.lanes import Handle
from outcore.engine.activations.saved import storage_of, version_of
from outcore.order.activations import SavedCall
from outcore.torch_private import keeps_graph

_OTHER_SHARE = 1.125  # of a measured peak is set aside: allocators leave gaps


class Lease:
    """Bytes that one call has taken. They are given back with the object at the latest."""

    __slots__ = ("_room", "nbytes")

    def __init__(self, room: ActivationRoom) -> None:
        self._room, self.nbytes = room, 0

    def grow(self, nbytes: int) -> bool:
        """Take more; False if there is no room."""
        if nbytes > self._room.free_bytes:
            return False
        self.nbytes += nbytes
        self._room.take(nbytes)
        return True

    def give_back(self) -> None:
        """Give all back. Idempotent."""
        nbytes, self.nbytes = self.nbytes, 0
        self._room.give_back(nbytes)

    def give_back_in_backward(self, *_: object) -> None:
        """Give all back, as a hook of a node: what it and earlier ones saved goes now, unless the graph is retained."""
        if not keeps_graph():
            self.give_back()

    def __del__(self) -> None:
        self.give_back()


class ActivationRoom:
    """Bytes that calls may keep, and those taken. See [Note: keep what fits] and [Note: what else is alive]."""

    def __init__(self, nbytes: int, meter: MemoryMeter | None = None) -> None:
        """Args: nbytes: All that may be kept at a time. meter: Measures peaks; None: nothing else is counted."""
        self.nbytes = nbytes
        self.taken_bytes = 0
        self._meter = meter
        self._is_open = meter is None
        self._other_bytes = 0
        self._was_used = False
        self._largest = self._measured = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now; 0 while the room is closed."""
        return self.nbytes - self._other_bytes - self.taken_bytes if self._is_open else 0

    def take(self, nbytes: int) -> None:
        """Count bytes that are kept from now on."""
        self.taken_bytes += nbytes
        self._was_used = True

    def give_back(self, nbytes: int) -> None:
        """Count bytes as free again."""
        self.taken_bytes -= nbytes

    def lease(self, nbytes: int) -> Lease | None:
        """Take bytes for a call, or None if there is no room."""
        lease = Lease(self)
        return lease if lease.grow(nbytes) else None

    def expect(self, nbytes: int) -> None:
        """Note the bytes of arguments of a kind that is new to a unit. The largest so far close the room."""
        if self._meter is not None and nbytes > self._largest:
            self._largest = nbytes
            self._is_open = False
            if not self.taken_bytes:
                self._start(self._meter)

    def end_step(self) -> None:
        """Measure a step in which nothing was kept, if that is needed."""
        if self._meter is None or self._largest == self._measured:
            return
        if not self._was_used:
            self._other_bytes = max(self._other_bytes, int(_OTHER_SHARE * self._meter.peak_bytes()))
            self._measured, self._is_open = self._largest, True
        self._start(self._meter)

    def _start(self, meter: MemoryMeter) -> None:
        self._was_used = False
        meter.begin()


class _SavedResult(NamedTuple):
    """A result that its own call has saved."""

    memory: weakref.ref[torch.UntypedStorage]
    call: weakref.ref[SavedCall[Handle]]
    start: int
    version: int


class SharedArguments:
    """Memory that calls of units share, while it lives: arguments and results. See [Note: between units]."""

    def __init__(self) -> None:
        self._met = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
        self._sent: dict[int, _SavedResult] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether an earlier call got the same memory."""
        return storage_of(tensor) != 0 and tensor.untyped_storage()._cdata in self._met

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the arguments of a call."""
        for tensor in tensors:
            if tensor.requires_grad and storage_of(tensor):
                storage = tensor.untyped_storage()
                self._met[storage._cdata] = storage

    def send(self, result: torch.Tensor, version: int, call: SavedCall[Handle], start: int) -> None:
        """Note a result that its own call saved. Args: version: The result's. start: Where it begins in the home."""
        storage = result.untyped_storage()
        place = storage._cdata
        memory = weakref.ref(storage, functools.partial(self._sent.pop, place))
        self._sent[place] = _SavedResult(memory, weakref.ref(call), start, version)

    def lender_of(self, tensor: torch.Tensor) -> tuple[SavedCall[Handle], int] | None:
        """Return the call that has sent the same memory, if it is unchanged, and where it begins there."""
        sent = self._sent.get(tensor.untyped_storage()._cdata)
        call = None if sent is None else sent.call()
        if sent is None or call is None or call.left is None or not call.is_coming:
            return None
        return (call, sent.start) if version_of(tensor) == sent.version else None
