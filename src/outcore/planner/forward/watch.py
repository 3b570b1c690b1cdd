"""The bytes that are alive while a step is followed on shapes alone, and those that its calls save."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from outcore.core.quantities import ALIGN_BYTES, PAGE_BYTES, SMALL_BYTES, align_up
from outcore.model.casts import cast_of
from outcore.model.expensive_operations import is_dear, may_be_dear
from outcore.model.wrapped import tensors_in
from outcore.planner.forward.footprint import SavedBytes, Step
from outcore.spec.plan import POLICIES, Policy
from outcore.torch_private import TorchDispatchMode, pytree


class MemoryWatch(TorchDispatchMode):
    """Counts the bytes that are alive while a step is followed. Allocators give multiples of 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        """Args: device: The device that will compute."""
        super().__init__()
        self.device = device
        self.steps: list[Step] = []
        self.staying: set[int] = set()
        """Numbers of the storages that stay in any case: parameters, buffers and the batch."""
        self.met: dict[int, int] = {}
        """Storage -> bytes, of arguments that calls of units got so far. See [Note: between units] in
        ``activations.room``."""
        self.shared: dict[int, int] = {}
        """The same, of arguments that several calls got."""
        self.call: SavedByPolicy | None = None
        """What the running forward of a unit saves; None outside of one."""
        self._serials: dict[int, int] = {}
        """Address of a storage -> its number, while it lives: addresses are used again."""
        self._count = 0
        self._alive = 0
        self._peaks = _Peaks()
        self._latest: SavedByPolicy | None = None
        """Like ``call``, but until the next visit begins."""
        self._walk: Walk | None = None
        self._begun: tuple[str, bool, int] = ("", False, 0)
        self._first = _First()

    def begin(self, own: Iterable[torch.Tensor]) -> None:
        """Begin a step. Args: own: Tensors that exist before it."""
        self.staying = {self.number(t) for t in own}
        self._held = list(own)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._serials:
            self._count += 1
            self._serials[place] = self._count
            weakref.finalize(storage, self._serials.pop, place, None)
        return self._serials[place]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            for inner in tensors_in(tensor) if isinstance(tensor, torch.Tensor) else ():
                self._note(inner.untyped_storage())
        if self.call is not None and may_be_dear(func) and is_dear(func, args, kwargs, result):
            self.call.select(result)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._serials:
            return
        self._count += 1
        self._serials[storage._cdata] = self._count
        nbytes = align_up(storage.nbytes(), ALIGN_BYTES)
        self._alive += nbytes
        self._peaks.see(self._alive)
        walk = self._walk
        if walk is not None:
            walk.add(nbytes)
        weakref.finalize(storage, self._end_of, storage._cdata, nbytes, walk)

    def _end_of(self, place: int, nbytes: int, walk: Walk | None) -> None:
        number = self._serials.pop(place, None)
        self._alive -= nbytes
        if self._latest is not None:
            self._latest.lose(number, nbytes, self._peaks)
        if walk is not None:
            walk.add(-nbytes)

    def meet(self, arguments: Iterable[torch.Tensor]) -> list[bool]:
        """Note the arguments of a unit's forward. Returns which of them an earlier unit got."""
        given = list(arguments)
        sizes = [(self.number(t), t.untyped_storage().nbytes()) for t in given]
        if not self.met:
            self._first.count, self._first.nbytes = len(given), sum(dict(sizes).values())
            for tensor in given:
                weakref.finalize(tensor, self._end_of_first)
        found = [number in self.met for number, _ in sizes]
        self.shared |= {number: nbytes for number, nbytes in sizes if number in self.met and nbytes > SMALL_BYTES}
        self.met |= dict(sizes)
        return found

    def _end_of_first(self) -> None:
        self._first.count -= 1
        if not self._first.count:
            self._first.before = dict(self._peaks.most)

    def begin_call(self, arguments: Sequence[torch.Tensor], met: Iterable[torch.Tensor]) -> SavedByPolicy:
        """Begin a unit's forward. Args: met: The arguments that an earlier unit got."""
        self.call = self._latest = SavedByPolicy(self, arguments, met)
        return self.call

    def end_call(self, made: Sequence[torch.Tensor]) -> SavedBytes:
        """End a unit's forward. Args: made: Its results. Returns what it saved."""
        call, self.call = self.call, None
        if call is None:
            raise AssertionError("no call runs")
        return call.saved(made)

    def visit(self, unit: str, *, is_backward: bool) -> None:
        """Begin a visit of a unit, which ends the visit before."""
        self.end()
        self._begun, self._latest = (unit, is_backward, self._alive), None

    @property
    def is_backward(self) -> bool:
        """Whether the last visit was a unit's backward."""
        return self._begun[1]

    def rise(self, risen: Risen) -> None:
        """Count this visit as an earlier one of its kind."""
        self._peaks.most = {policy: max(n, self._alive + risen.most[policy]) for policy, n in self._peaks.most.items()}
        self._peaks.lost |= risen.lost
        self._peaks.again = self._begun[2] + risen.again

    @property
    def risen(self) -> Risen:
        """What this visit has counted so far."""
        most = {policy: n - self._begun[2] for policy, n in self._peaks.most.items()}
        return Risen(most, dict(self._peaks.lost), self._peaks.again - self._begun[2])

    def end(self) -> None:
        """Write down what was alive since the last visit began."""
        (unit, is_backward, begin), made, before = self._begun, self._walk, self._first.before
        rises = () if before is None else [n - before[policy] for policy, n in self._peaks.most.items()]
        self.steps.append(
            Step(
                unit=unit,
                is_backward=is_backward,
                begin_bytes=begin,
                peak_bytes=self._peaks.most["recompute"],
                select_bytes=self._peaks.most["select"],
                keep_bytes=self._peaks.most["keep"],
                made_bytes=0 if made is None else made.peak,
                again_bytes=self._peaks.again,
                is_first_gone=before is not None and min(rises) >= self._first.nbytes,
            )
        )
        self._walk, self._peaks = None, _Peaks(self._alive)
        self._first.before = None if before is None else dict.fromkeys(POLICIES, 0)

    def walk(self) -> Walk:
        """Begin to count what backward makes while it goes through the unit's graph."""
        self._walk, self._peaks.again = Walk(), self._peaks.most["select"]
        return self._walk


class _First:
    """The arguments of the first unit."""

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        """Number of those tensors that a variable of the model still holds, and bytes of all of them."""
        self.before: Mapping[Policy, int] | None = None
        """The most that had been alive in this visit when the model let go of them; None if it has not yet."""


class Risen(NamedTuple):
    """What a visit adds to the bytes that were alive when it began."""

    most: Mapping[Policy, int]
    lost: Mapping[Policy, int]
    """Bytes that were dropped, but that a policy would hold."""
    again: int
    """As ``Step.again_bytes``."""


class _Peaks:
    """The most bytes alive in a visit, by policy: if the call saves nothing, something or all."""

    def __init__(self, alive: int = 0) -> None:
        self.lost: dict[Policy, int] = dict.fromkeys(POLICIES, 0)
        self.most: dict[Policy, int] = dict.fromkeys(POLICIES, alive)
        self.again = 0
        """As ``Step.again_bytes``."""

    def see(self, alive: int) -> None:
        """Note that so many bytes are alive now."""
        for policy in POLICIES:
            self.most[policy] = max(self.most[policy], alive + self.lost[policy])


class Walk:
    """Bytes that were made since it began, and are still alive."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def add(self, nbytes: int) -> None:
        """Add bytes; negative ones were freed."""
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)


class SavedByPolicy:
    """What one call saves, by policy, each storage once."""

    def __init__(self, watch: MemoryWatch, arguments: Sequence[torch.Tensor], met: Iterable[torch.Tensor]) -> None:
        self._watch = watch
        mine = (*met, *(t for t in arguments if not t.requires_grad))
        self._staying = watch.staying | {watch.number(t) for t in mine}
        self._arguments = self._large([t for t in arguments if t.requires_grad])
        self._keep: dict[int, int] = {}
        self._casts: dict[int, int] = {}
        """Casts of weights: they do not leave, but are made again."""
        self._select: dict[int, int] = {}
        self._small: dict[int, int] = {}
        """Storages that ``keep`` saves but that are so small that they stay."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Pack hook: note a tensor that autograd saves."""
        for inner in tensors_in(tensor):
            self._keep_inner(inner)

    def _keep_inner(self, tensor: torch.Tensor) -> None:
        weight = cast_of(tensor)
        is_cast = weight is not None and self._watch.number(weight) in self._watch.staying
        kept = self._casts if is_cast else self._keep
        large = self._large([tensor])
        kept |= large
        if not large:
            self._small |= self._sizes([tensor])

    def select(self, result: Any) -> None:
        """Note the result of an operation that is dear."""
        self._select |= self._large([t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)])

    def saved(self, made: Sequence[torch.Tensor]) -> SavedBytes:
        """Return what was saved. Args: made: Results; what shares memory with them is not selected."""
        outside = {self._watch.number(t) for t in made}
        self._select = {number: nbytes for number, nbytes in self._select.items() if number not in outside}
        return SavedBytes(
            keep=_total(self._keep),
            select=_total(self._select | self._arguments),
            recompute=_total(self._arguments),
            kept=_total(self._arguments | self._keep | self._casts),
            cast=max(self._casts.values(), default=0),
            small=sum(align_up(nbytes, ALIGN_BYTES) for nbytes in self._small.values()),
        )

    def lose(self, number: int | None, nbytes: int, peaks: _Peaks) -> None:
        """Note that a storage is gone, which some policies would hold."""
        if number in self._keep or number in self._small:
            peaks.lost["keep"] += nbytes
        if number in self._select:
            peaks.lost["select"] += nbytes

    def _large(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        return {n: nbytes for n, nbytes in self._sizes(tensors).items() if nbytes > SMALL_BYTES}

    def _sizes(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        sizes = {self._watch.number(t): t.untyped_storage().nbytes() for t in tensors}
        return {n: nbytes for n, nbytes in sizes.items() if n not in self._staying}


def _total(sizes: Mapping[int, int]) -> int:
    return align_up(sum(align_up(nbytes, ALIGN_BYTES) for nbytes in sizes.values()), PAGE_BYTES)
