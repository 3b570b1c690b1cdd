"""Exchange of gradients between ranks: in turns, added up in rank order, averaged.

See [Note: turns]. A parameter has a gradient if any rank has one for it. Its handle is then on ``p.grad`` on all ranks,
also on those that did not reach it.

[Note: one exchange] With ``reduction="fast"`` a bucket is not given back when a pass is over: the next pass adds to it,
in the dtype in which autograd makes gradients. The last promised pass of a step exchanges the sums, as every pass
otherwise exchanges its gradients. Until then nothing is on ``p.grad``.

Norms of gradients that are cut among ranks take one exchange for all of them. See [Note: one tree].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from outcore.core.errors import OutcoreError, UnsupportedError
from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.homes import GradientHomes
from outcore.engine.gradients.unit_gradients import UnitGradients, UnitPass
from outcore.engine.unit.unit import Unit
from outcore.optim.norms import Node, block_sums, node_sums, norm_of, num_blocks, whole_nodes
from outcore.optim.piece import CUT_NUMEL
from outcore.optim.sums import Sum, add_works
from outcore.order.gradients import GradientOrder, Turns
from outcore.order.ledger import ByteSpan
from outcore.order.slots import SlotPool
from outcore.ranks.world import World
from outcore.spec.lane_names import Lane
from outcore.torch_private import copy_each

_NOWHERE = torch.empty(0, dtype=torch.uint8, device="cpu")
_CHUNK_NUMEL = 2**16  # in float64 a chunk stays in cache


class RankNorms:
    """The norm of every gradient that is held. Asking for one makes all known, on all ranks."""

    def __init__(self, units: Sequence[UnitGradients], homes: GradientHomes, world: World) -> None:
        """Args: units: Those with trainable parameters, in the same order on all ranks."""
        self._units, self._homes, self._world = units, homes, world
        self._known: dict[GradHandle, tuple[object, torch.Tensor]] = {}

    def of(self, handle: GradHandle) -> torch.Tensor:
        """Return the norm of one gradient, as the user sees it. A collective, unless it is known."""
        known = self._known.get(handle)
        if known is None or known[0] != _state(handle):
            self._take_all()
        return self._known[handle][1].clone()  # the caller may edit it

    @torch.no_grad()
    def _take_all(self) -> None:
        self._known.clear()
        self._world.note("a gradient's norm")
        held = [(unit, list(unit.held_handles().values())) for unit in self._units]
        sums = [part for unit, handles in held for part in self._sums(unit, handles)]
        mine = torch.cat([torch.zeros(0, dtype=torch.float64, device="cpu"), *sums])
        handles = [(unit, handle) for unit, some in held for handle in some]
        ranks = range(self._world.size)
        nodes = [[[] if h.is_zero else _nodes(unit, h, rank) for unit, h in handles] for rank in ranks]
        counts = [sum(map(len, of_rank)) for of_rank in nodes]
        values = iter(self._world.gather_parts(mine, counts, "ask for a gradient's norm").tolist())
        found: list[dict[Node, float]] = [{} for _ in handles]
        for of_rank in nodes:
            for known, of_handle in zip(found, of_rank, strict=True):
                known.update((node, next(values)) for node in of_handle)
        norms = []
        for (unit, handle), known in zip(handles, found, strict=True):
            count = 0 if handle.is_zero else num_blocks(unit.unit.spec.params[handle.index].numel)
            norms.append(norm_of(known, count))
        exact, device = torch.tensor(norms, dtype=torch.float64, device="cpu"), self._homes.device.torch_device
        rounded = exact.float().to(device).unbind()
        exact = exact.to(device)
        for i, (unit, handle) in enumerate(handles):
            is_double = unit.unit.gradient_form.update_dtypes[handle.index] is torch.float64
            self._known[handle] = _state(handle), exact[i] if is_double else rounded[i]

    def _sums(self, gradients: UnitGradients, handles: Sequence[GradHandle]) -> list[torch.Tensor]:
        """Return sums of the subtrees that this rank has, by gradient."""
        spec, wanted = gradients.unit.spec, [handle for handle in handles if not handle.is_zero]
        if not wanted:
            return []
        stored = gradients.all_stored()
        rooms = [_room(stored[handle.index]) for handle in wanted]
        works = []
        for handle, room in zip(wanted, rooms, strict=True):
            factors = [f.to("cpu") if room.is_cpu else f for f in (*handle.averaging, *handle.factors)]
            chunks = zip(stored[handle.index].split(_CHUNK_NUMEL), room.split(_CHUNK_NUMEL // CUT_NUMEL), strict=True)
            works += [partial(_take, chunk, factors, part) for chunk, part in chunks]
        if rooms[0].is_cpu:
            self._homes.run_all(works)
        else:  # on compute, where works need no scratch
            for work in works:
                work(_NOWHERE)
        found = []
        for handle, room in zip(wanted, rooms, strict=True):
            first, stop, count = _blocks(gradients, handle, spec.rank)
            found.append(node_sums(room, first, stop, count).cpu())
        return found


def _state(handle: GradHandle) -> object:
    return handle.owner.version, handle.is_zero, tuple(map(id, handle.factors))


def _room(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(num_blocks(values.numel()), dtype=torch.float64, device=values.device)


def _take(values: torch.Tensor, factors: Sequence[torch.Tensor], room: torch.Tensor, _: torch.Tensor) -> None:
    room.copy_(block_sums(values, factors))


def _blocks(gradients: UnitGradients, handle: GradHandle, rank: int) -> tuple[int, int, int]:
    """Return the first block of a rank, the one behind its last, and how many blocks the parameter has."""
    spec = gradients.unit.spec
    first, numel = spec.held(rank, handle.index)
    start = first // CUT_NUMEL
    return start, start + num_blocks(numel), num_blocks(spec.params[handle.index].numel)


def _nodes(gradients: UnitGradients, handle: GradHandle, rank: int) -> list[Node]:
    return whole_nodes(*_blocks(gradients, handle, rank))


class RankExchange:
    """What a backward does with gradients that are complete, on one rank among several."""

    def __init__(
        self,
        gradients: Sequence[UnitGradients],
        order: GradientOrder[Handle],
        homes: GradientHomes,
        world: World,
        accumulation_steps: int | None,
    ) -> None:
        """Begin without gradients.

        Args:
            gradients: Those of the units with trainable parameters, in the same order on all ranks.
            order: Submits the exchanges.
            homes: Those of all units.
            world: This rank and the others.
            accumulation_steps: Micro-batches per step, if promised.
        """
        self._order, self._device, self._world = order, homes.device, world
        self._accumulation_steps = accumulation_steps
        self._average = (torch.tensor(1 / world.size, dtype=torch.float64, device="cpu"),)
        homes.norm_of_ranks = RankNorms(gradients, homes, world).of
        self._turns, self._sent = Turns(gradients), list[_ExchangeTurn]()
        self._keeps_buckets = any(one.unit.spec.keeps_bucket for one in gradients)
        self._is_broken = False
        self._num_kept = 0
        """Number of passes of this step whose gradients are not exchanged yet. See [Note: one exchange]."""

    def refuse_late(self, unit: Unit) -> None:
        """Raise if gradients of a unit come after its turn."""
        if any(sent.gradients.unit is unit for sent in self._sent):
            raise UnsupportedError(
                f"expected one exchange of the gradients of unit '{unit.label}' in a backward, but more came after it; "
                "with several ranks a parameter's gradient must be whole when autograd has reached it"
            )

    def refuse_broken(self) -> None:
        """Raise if a backward of this rank was cut short: other ranks wait for exchanges that will not come."""
        if self._is_broken:
            raise OutcoreError(
                f"rank {self._world.rank}: expected whole backwards on all ranks, but one of this rank ended in an "
                "exception, and the others wait for its gradients; end all ranks, and go on from what was saved"
            )

    def refuse_unfinished(self) -> None:
        """Raise if passes are kept that were not exchanged. See [Note: one exchange]."""
        if self._num_kept:
            raise UnsupportedError(
                f"expected {self._accumulation_steps} backward passes before optimizer.step() with reduction='fast', "
                f"as accumulation_steps promised, but there were {self._num_kept}; call backward as often in each "
                "step, or prepare with reduction='exact'"
            )

    def break_off(self, *, is_running: bool) -> None:
        """Note that a pass ends in an exception."""
        self._is_broken = self._is_broken or is_running or bool(self._sent)

    def lose_kept(self) -> None:
        """Note that sums of earlier passes are lost."""
        self._is_broken = self._is_broken or self._num_kept > 0

    def zero(self, *, is_running: bool) -> None:
        """Drop what was kept."""
        self._num_kept = 0
        for gradients in self._turns.order:
            if gradients.open is not None and not is_running:
                gradients.open = None
                self._order.give_back(gradients.unit.ledger)

    @property
    def _is_kept(self) -> bool:
        """Whether the pass that runs leaves its gradients in their buckets."""
        return self._keeps_buckets and self._num_kept + 1 < (self._accumulation_steps or 1)

    def make_room(self, pool: SlotPool[Handle]) -> None:
        """Empty a bucket into tensors beside the plan: units whose turn has not come hold all buckets of a pool."""
        taken = ((g, g.unit.ledger.bucket) for g in self._turns.order)
        gradients = next(g for g, bucket in taken if bucket is not None and bucket.pool is pool)
        unit, current = gradients.unit, gradients.open
        if current is None or unit.ledger.bucket is None:
            raise AssertionError(f"unit '{unit.label}' holds a bucket outside of a pass")
        current.take_over()
        views = unit.views.native(unit.ledger.bucket.slot.span(unit.spec.bucket_bytes).memory)
        current.loose = {i: views[i].clone(memory_format=torch.preserve_format) for i in current.present}
        self._order.give_back(unit.ledger)

    def come(self, gradients: UnitGradients, number: int) -> None:
        """Let a unit take its turn, or wait for it: all its gradients are there. Args: number: The pass's."""
        if gradients.open is None or self._is_kept:
            return
        gradients.open.take_over()
        for turn in self._turns.come(gradients):
            self._send(turn, number)

    @torch.no_grad()
    def finish(self, number: int) -> None:
        """End a pass: units that are left have their turn, and all ranks get all handles. Args: number: The pass's."""
        if self._is_kept:
            self._num_kept += 1
            for current in (gradients.open for gradients in self._turns.order):
                if current is not None:
                    current.reached.clear()
            return
        self._num_kept = 0
        for turn in self._turns.rest():
            self._send(turn, number)
        sent, self._sent = self._sent, []
        for gradients, work, exchanged in sent:
            exchanged.wait_issued()
            if exchanged.failure is not None:
                exchanged.failure.throw()
            gradients.put_handles(work.new_anywhere(), self._average)

    def _send(self, gradients: UnitGradients, number: int) -> None:
        if not self._sent:
            self._world.note(f"backward {number}")
        unit, current = gradients.unit, gradients.open or UnitPass(gradients, 0)
        if gradients.open is not None:
            current.take_over()
        current.held = held = {i: handle for i, handle in gradients.held_handles().items() if not handle.is_zero}
        changed = next((handle for handle in held.values() if not handle.averaging), None)
        if changed is not None:
            raise UnsupportedError(
                f"expected no backward between a change of p.grad of '{changed.param_name}' and optimizer.step(), but "
                "one came; with several ranks the change was made to the mean over ranks: change gradients after the "
                "last backward"
            )
        gradients.count_pass(number, self._accumulation_steps, is_first=not held)
        gradients.version += 1
        work = _SharedPass(current, self._world, number)
        exchanged = self._order.share(unit.ledger, work, self.make_room, is_first=not held)
        gradients.open = None  # last, so that gradients are known to be lost if this is interrupted before
        self._sent.append(_ExchangeTurn(gradients, work, exchanged))


class _ExchangeTurn(NamedTuple):
    """A turn in the pass that runs."""

    gradients: UnitGradients
    work: _SharedPass
    exchanged: Handle


class _SharedPass:
    """The work of several ranks on one pass of a unit. See ``order.gradients.SharedWork``.

    This rank's pass may have given nothing. What is held is the same on all ranks.
    """

    def __init__(self, current: UnitPass, world: World, number: int) -> None:
        """Args: current: This rank's pass. world: All ranks. number: The pass's, alike on all."""
        self._current, self._world, self._number = current, world, number
        self._gradients, self._unit, self._held = current.gradients, current.gradients.unit, dict(current.held)
        self._present: list[set[int]] = []
        """Parameters with a gradient, by rank; known once the exchange was made."""

    def new_anywhere(self) -> set[int]:
        """Return the parameters for which any rank has a gradient, and none was held."""
        return set().union(*self._present) - self._held.keys()

    def put_in(self, bucket: ByteSpan) -> None:
        """Put loose gradients into the bucket, on compute."""
        loose = self._current.loose
        if loose:
            views = self._unit.views.native(bucket.memory)
            copy_each([views[i] for i in loose], list(loose.values()))

    def exchange(self, bucket: ByteSpan, received: ByteSpan) -> Callable[[], None]:
        """Return the work of the exchange, all to all. Bits beside it name the turn, what is held, and what is sent."""
        unit, world, present = self._unit, self._world, self._current.present
        numbers = (world.num_steps, self._number, unit.ledger.index)
        turn = b"".join(number.to_bytes(8, "little") for number in numbers)
        factors = {i: min(1 + len(handle.factors), 255) for i, handle in self._held.items()}
        turn += bytes(factors.get(i, 0) for i in range(unit.num_trainable))
        bits = turn + bytes(i in present for i in range(unit.num_trainable))
        source, target = bucket.memory.bytes, received.memory.bytes

        def work() -> None:
            said = world.exchange(bits, source, target, unit.label)
            other = next((rank for rank, one in enumerate(said) if one[: len(turn)] != turn), None)
            if other is not None:
                steps, number = (int.from_bytes(said[other][i : i + 8], "little") for i in (0, 8))
                raise OutcoreError(
                    f"rank {world.rank}: expected the same backward on all ranks, with the same gradients held before, "
                    f"but at unit '{unit.label}' of backward {self._number} after {world.num_steps} steps rank "
                    f"{other} was in backward {number} after {steps} steps"
                    f"{'' if (steps, number) != numbers[:2] else ', and holds others'}; all ranks must call "
                    "backward, step and zero_grad alike: end all, and go on from what was saved"
                )
            self._present = [{i for i, bit in enumerate(one[len(turn) :]) if bit} for one in said]

        return work

    def add_runs(self, received: ByteSpan, target: ByteSpan) -> Callable[[], None]:
        """Return the work that adds the runs up in rank order, in the update dtype."""
        unit, held, homes, self._gradients.is_native = self._unit, self._held, self._gradients.homes, False
        on_host, runs, home = target.of.tier != "device", received.memory, target.memory
        factors = {i: [f.to("cpu") if on_host else f for f in h.factors] for i, h in held.items() if h.factors}
        for handle in held.values():
            if not on_host:
                for factor in handle.factors:
                    homes.device.hand_over(factor, Lane.DEVICE_UPDATE)
            handle.factors.clear()

        def work() -> None:
            targets, counted = unit.views.update(home), set(held)
            for i, mine in factors.items():
                for factor in mine:
                    targets[i].mul_(factor)
            for rank, present in enumerate(self._present):
                sources = unit.views.received(runs, rank)
                sums = [Sum(targets[i], sources[i], is_first=i not in counted) for i in sorted(present)]
                counted |= present
                if on_host:
                    homes.run_all(add_works(sums))
                else:
                    for one in sums:
                        (one.target.copy_ if one.is_first else one.target.add_)(one.source)

        return work
