"""Gradients of several ranks: exchanged in turns, added up in rank order, averaged.

See [Note: turns]. A parameter has a gradient if any rank has one for it. Its handle is then on ``p.grad`` on all ranks,
also on those that did not reach it.

[Note: one exchange] With ``reduction="fast"`` a bucket is not given back when a pass is over: the next pass adds to it,
in the dtype in which autograd makes gradients. The last promised pass of a step exchanges the sums, as every pass
otherwise exchanges its gradients. Until then nothing is on ``p.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from outcore.core.errors import OutcoreError, UnsupportedError
from outcore.device.lanes import Handle
from outcore.engine.gradients.gradient_norms import RankNorms
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.homes import GradientHomes, PassWork
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.gradients.unit_gradients import BackwardPass, UnitGradients
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import own_slice
from outcore.optim.sums import Sum, Work, add_works
from outcore.order.ledger import ByteSpan
from outcore.order.slots import SlotPool
from outcore.order.turns import Turns
from outcore.ranks.world import World
from outcore.spec.lane_names import Lane
from outcore.torch_private import copy_each

_NOWHERE = torch.empty(0, dtype=torch.uint8, device="cpu")
"""An empty tensor, for works that need no scratch."""


class RankedUnitGradients(UnitGradients):
    """Gradients of one unit: sums over all ranks, of which each rank has the elements that it updates at home."""

    def __init__(self, unit: Unit, store: BackwardGradients, home: GradientHomes) -> None:
        """Begin without gradients."""
        super().__init__(unit, store, home)
        self._ranks = cast(RankedGradients, store)
        self.has_bucket = self.has_bucket or unit.spec.keeps_bucket

    def gradient_norm(self, handle: GradHandle, order: float) -> torch.Tensor:
        """Return the norm of the mean over all ranks; of order 2 as in [Note: one tree]. A collective."""
        if not self.store.clipping:
            return super().gradient_norm(handle, order)  # refuses
        self._refuse_stale(handle)
        if order == 2:
            return self._ranks.norms.of(handle)
        return torch.linalg.vector_norm(self._home.value(self, handle), order)

    def known_norm(self, handle: GradHandle) -> torch.Tensor | None:
        """Return the norm of the mean, if the handle has no other factors. A collective."""
        return None if handle.factors or handle.is_zero else self._ranks.norms.of(handle)


class RankedGradients(BackwardGradients):
    """All gradients of a model during backward, of one rank among several."""

    _of_unit = RankedUnitGradients

    def __init__(self, units: Sequence[Unit], *args: Any, world: World, **options: Any) -> None:
        """Args: as for ``BackwardGradients``. world: This rank and the others."""
        super().__init__(units, *args, **options)
        homes = self._homes = cast(RankedHomes, self._resting)
        self._world = world
        self.average = torch.tensor(1 / world.size, dtype=torch.float64, device="cpu")
        mine = [cast(RankedUnitGradients, self.of[unit.name]) for unit in units if unit.num_trainable]
        self.norms = RankNorms(mine, homes, world)
        self._turns = Turns(mine)
        self._sent: list[_ExchangeTurn] = []
        self._is_broken = False
        self._num_kept = 0
        """Number of passes of this step whose gradients are not exchanged yet. See [Note: one exchange]."""

    def deposit(self, unit: Unit, grads: dict[int, torch.Tensor]) -> None:
        """Take gradients that autograd made in the pass that is running now."""
        if grads and any(sent.gradients.unit is unit for sent in self._sent):
            raise UnsupportedError(
                f"expected one exchange of the gradients of unit '{unit.label}' in a backward, but more came after it; "
                "with several ranks a parameter's gradient must be whole when autograd has reached it"
            )
        super().deposit(unit, grads)

    def break_off(self) -> None:
        """End the pass after an exception. Other ranks wait for exchanges that will not come."""
        if self._tasks or self._sent:
            self._is_broken = True
        super().break_off()

    def refuse_unfinished(self) -> None:
        """Raise if passes are kept that were not exchanged. See [Note: one exchange]."""
        if self._num_kept:
            raise UnsupportedError(
                f"expected {self._accumulation_steps} backward passes before optimizer.step() with reduction='fast', "
                f"as accumulation_steps promised, but there were {self._num_kept}; call backward as often in each "
                "step, or prepare with reduction='exact'"
            )

    def zero(self) -> None:
        """Drop what was kept."""
        self._num_kept = 0
        for gradients in self._turns.order:
            if gradients.open is not None and not self._tasks:
                gradients.open = None
                self._order.let_go(gradients.unit.ledger)

    @property
    def _is_kept(self) -> bool:
        """Whether the pass that runs leaves its gradients in their buckets."""
        keeps = any(gradients.unit.spec.keeps_bucket for gradients in self._turns.order)
        return keeps and self._num_kept + 1 < (self._accumulation_steps or 1)

    def _reset(self) -> None:
        self._is_broken = self._is_broken or self._num_kept > 0  # sums of earlier passes are lost, too
        super()._reset()

    def _join_pass(self, gradients: UnitGradients) -> None:
        if self._is_broken:
            raise OutcoreError(
                f"rank {self._world.rank}: expected whole backwards on all ranks, but one of this rank ended in an "
                "exception, and the others wait for its gradients; end all ranks, and go on from what was saved"
            )
        super()._join_pass(gradients)

    def _make_room(self, pool: SlotPool[Handle]) -> None:
        """Empty a bucket into tensors beside the plan: units whose turn has not come hold all buckets of a pool."""
        taken = ((g, g.unit.ledger.bucket) for g in self._turns.order)
        gradients = next(g for g, bucket in taken if bucket is not None and bucket.pool is pool)
        unit, current = gradients.unit, gradients.open
        if current is None or unit.ledger.bucket is None:
            raise AssertionError(f"unit '{unit.label}' holds a bucket outside of a pass")
        self._take_over(unit, current)
        views = unit.views.native(unit.ledger.bucket.slot.span(unit.spec.bucket_bytes).memory)
        current.loose = {i: views[i].clone(memory_format=torch.preserve_format) for i in current.present}
        self._order.let_go(unit.ledger)

    def _end_task(self, task: int) -> None:
        """End a task. The outermost one ends the pass: units left have their turn, and all ranks get all handles."""
        try:
            if len(self._tasks) == 1:
                self._finish()
                self._open.clear()
            self._tasks.pop(task, None)
        except BaseException:
            self.break_off()
            raise

    @torch.no_grad()
    def _close(self, gradients: UnitGradients) -> None:
        """Let a unit take its turn, or wait for it: all its gradients are there."""
        current = gradients.open
        if current is None or self._is_kept:
            return
        self._take_over(gradients.unit, current)
        for turn in self._turns.come(cast(RankedUnitGradients, gradients)):
            self._send(turn)

    @torch.no_grad()
    def _finish(self) -> None:
        if self._is_kept:
            self._num_kept += 1
            for current in (gradients.open for gradients in self._turns.order):
                if current is not None:
                    current.reached.clear()
            return
        self._num_kept = 0
        for turn in self._turns.rest():
            self._send(turn)
        sent, self._sent = self._sent, []
        device = self._device.torch_device
        for gradients, work, held, exchanged in sent:
            exchanged.wait_issued()
            if exchanged.failure is not None:
                exchanged.failure.throw()
            unit = gradients.unit
            for i in work.present_anywhere() - held:
                handle = GradHandle(unit.gradient_form.likes[i], device, gradients, i)
                handle.averaging = (self.average,)
                unit.params[i].grad = gradients.handles[i] = handle

    def _send(self, gradients: RankedUnitGradients) -> None:
        if not self._sent:
            self._world.note(f"backward {self._num_passes}")
        unit, current = gradients.unit, gradients.open or BackwardPass(0)
        if gradients.open is not None:
            self._take_over(unit, current)
        held = {i: handle for i, handle in gradients.held_handles().items() if not handle.is_zero}
        changed = next((i for i, handle in held.items() if not handle.averaging), None)
        if changed is not None:
            name = unit.spec.params[changed].name
            raise UnsupportedError(
                f"expected no backward between a change of p.grad of '{name}' and optimizer.step(), but one came; with "
                "several ranks the change was made to the mean over ranks: change gradients after the last backward"
            )
        self._count_pass(gradients, is_first=not held)
        gradients.version += 1
        work = self._homes.shared_work(gradients, current, held, self._num_passes)
        exchanged = self._order.share(unit.ledger, work, self._make_room, is_first=not held)
        gradients.open = None  # last, so that gradients are known to be lost if this is interrupted before
        self._sent.append(_ExchangeTurn(gradients, work, set(held), exchanged))


class _ExchangeTurn(NamedTuple):
    """A turn in the pass that runs."""

    gradients: RankedUnitGradients
    work: RankWork
    held: set[int]
    exchanged: Handle


class RankWork(PassWork):
    """What is done with the gradients of one pass of a unit. See ``order.gradients.SharedWork``."""

    def __init__(self, world: World, number: int, *args: Any) -> None:
        """Args: world: This rank and the others. number: The pass's, alike on all. args: As for ``PassWork``.

        This rank's pass may have given nothing. What is held is the same on all ranks.
        """
        super().__init__(*args)
        self._world, self._number = world, number
        self._present: list[set[int]] = []
        """Parameters with a gradient, by rank; known once the exchange was made."""

    def present_anywhere(self) -> set[int]:
        """Return the parameters for which any rank has a gradient."""
        return set().union(*self._present)

    def put_in(self, bucket: ByteSpan) -> None:
        """Put loose gradients into the bucket, on compute."""
        loose = self._current.loose
        if loose:
            views = self._unit.views.native(bucket.memory)
            copy_each([views[i] for i in loose], list(loose.values()))

    def exchange(self, bucket: ByteSpan, received: ByteSpan) -> Callable[[], None]:
        """Return the deed of the exchange, all to all. Bits beside it name the turn, what is held, and what is sent."""
        unit, world, present = self._unit, self._world, self._current.present
        numbers = (world.num_steps, self._number, unit.ledger.index)
        turn = b"".join(number.to_bytes(8, "little") for number in numbers)
        factors = {i: min(1 + len(handle.factors), 255) for i, handle in self._held.items()}
        turn += bytes(factors.get(i, 0) for i in range(unit.num_trainable))
        bits = turn + bytes(i in present for i in range(unit.num_trainable))
        source, target = bucket.memory.bytes, received.memory.bytes

        def deed() -> None:
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

        return deed

    def add_runs(self, received: ByteSpan, target: ByteSpan) -> Callable[[], None]:
        """Return the deed that adds the runs up in rank order, in the update dtype."""
        unit, held, self._gradients.is_native = self._unit, self._held, False
        on_host, runs, home = target.of.tier != "device", received.memory, target.memory
        factors = {i: [f.to("cpu") if on_host else f for f in h.factors] for i, h in held.items() if h.factors}
        for handle in held.values():
            if not on_host:
                for factor in handle.factors:
                    self._device.hand_over(factor, Lane.DEVICE_UPDATE)
            handle.factors.clear()
        known = set(held)

        def deed() -> None:
            targets, counted = unit.views.update(home), set(known)
            for i, mine in factors.items():
                for factor in mine:
                    targets[i].mul_(factor)
            for rank, present in enumerate(self._present):
                sources = unit.views.received(runs, rank)
                sums = [Sum(targets[i], sources[i], is_first=i not in counted) for i in sorted(present)]
                counted |= present
                if on_host:
                    self._run_all(add_works(sums))
                else:
                    for one in sums:
                        (one.target.copy_ if one.is_first else one.target.add_)(one.source)

        return deed


class RankedHomes(GradientHomes):
    """Gradients at rest. Each rank has what it updates; all ranks together give whole values."""

    def __init__(self, *args: Any, world: World) -> None:
        """Args: as for ``GradientHomes``. world: This rank and the others."""
        super().__init__(*args)
        self._world = world

    def shared_work(
        self, gradients: UnitGradients, current: BackwardPass, held: Mapping[int, GradHandle], number: int
    ) -> RankWork:
        """Return what is done in a turn. Args: number: The pass's."""
        return RankWork(self._world, number, gradients, current, held, self._device, self._run_all)

    @torch.no_grad()
    def value(self, gradients: UnitGradients, handle: GradHandle) -> torch.Tensor:
        """Return the mean over all ranks times its factors, whole, on the device (1D). A collective."""
        own = super().value(gradients, handle)
        if handle.is_zero:
            return own
        spec = gradients.unit.spec
        numels = [spec.owned(rank)[handle.index][1] for rank in range(spec.num_ranks)]
        what = f"read the gradient of '{spec.params[handle.index].name}'"
        return self._world.gather_parts(own, numels, what).to(own.device)

    @property
    def torch_device(self) -> torch.device:
        """The device on which values are wanted."""
        return self._device.torch_device

    def run(self, works: Sequence[Work], *, on_host: bool) -> None:
        """Run works on threads of the host, or on compute."""
        if on_host:
            self._run_all(works)
        else:
            for work in works:
                work(_NOWHERE)

    def change(self, gradients: UnitGradients, handle: GradHandle, change: Callable[[torch.Tensor], Any]) -> None:
        """Change the mean in place: a change is made element by element, so it needs no other rank."""
        handle.factors[:0], handle.averaging = handle.averaging, ()
        super().change(gradients, handle, change)

    def replace(self, gradients: UnitGradients, handle: GradHandle, value: torch.Tensor) -> None:
        """Store another value of the mean; this rank stores what it updates."""
        super().replace(gradients, handle, own_slice(gradients.unit.spec, handle.index, value))
        handle.averaging = ()
